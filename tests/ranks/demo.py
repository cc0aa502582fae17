"""The demo as a run of few steps, in process: what `spmdrl.train` does after it has read its flags."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spmdrl.config.schema import Config
from spmdrl.rl.build import build_run
from spmdrl.rl.run import Run
from spmdrl.session.session import Session
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.documented import check_documented
from tests.ranks.cases import config

STEPS = 5
TIMED = ("time/", "tokens/s", "memory/")


def demo(folder: str, **sections) -> Config:
    """Config of the demo with few prompts, two updates a step and a KL, so that no number is zero by construction."""
    base = dict(
        run={"dir": folder, "steps": STEPS, "seed": 3},
        model={"path": "tiny"},
        policy={"share_prompts": True},
        optimizer={"lr": 3e-4, "clip_grad_norm": 1.0, "warmup_steps": 2, "schedule": "linear"},
        rollout={
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "max_new_tokens": 8,
            "assignment": "static",
            "max_prompt_tokens": 16,
        },
        algo={"kl_coef": 0.05, "updates_per_step": 2, "entropy_coef": 0.001},
        eval={"every": 2, "prompts": 16},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
        data={"limit": 64},
    )
    alone = {name: sections.pop(name) for name in ("env",) if name in sections}
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()}
    return replace(config(**merged), **alone)


class Interrupted(Exception):
    """Signals the kill of a job."""


def open_demo(world, folder: str, sections: dict, stop_after: int = 0) -> Run:
    """Opens a run that stops as if it was killed once the checkpoint of step `stop_after` stands."""
    Path(folder).mkdir(exist_ok=True)
    return dying(build_run(Session(demo(folder, **sections), world, Timer())), stop_after)


def dying(run, stop_after: int):
    """Lets a job stop as if it was killed once step `stop_after` is done; 0: never."""
    save = run.checkpoint

    def then_die(step):
        save(step)
        if step + 1 == stop_after:
            raise Interrupted

    run.checkpoint = then_die
    return run


def first_step(run: Run) -> list:
    """Returns a list that gets this rank's episodes of the first step once they are taken."""
    assert run.sampler is not None
    seen, take = [], run.sampler.take

    def watched(step, version):
        done = take(step, version)
        if not step:
            seen.extend(done.episodes)
        return done

    run.sampler.take = watched
    return seen


def train_demo(world, folder: str, sections: dict, stop_after: int = 0) -> tuple[int, int, int]:
    """Trains a demo; returns its first step, its version and its updates."""
    run = open_demo(world, folder, sections, stop_after)
    with suppress(Interrupted):
        train(run)
    run.close()
    policy = run.models.policy
    return run.checkpoints.start_step, policy.version, policy.updates_done


def metrics(folder) -> list[dict]:
    """Returns the lines of metrics.jsonl, one dict a step."""
    return check_documented([json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()])


def untimed(rows: list[dict]) -> list[dict]:
    """Leaves out the metrics that differ from run to run."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]
