"""A run looks at no setting that is declared unread: a setting of use is never refused as useless."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from spmdrl.config import resume
from spmdrl.config.dump import to_dict
from spmdrl.config.load import from_command_line
from spmdrl.config.use import is_read
from spmdrl.rl.build import build_run
from spmdrl.session import journal
from spmdrl.session.session import Session
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.harness import run_ranks
from tests.watch import watch

BASE = (
    "--run.steps 2 --rollout.engine hf --rollout.prompts-per-step 4 --rollout.samples-per-prompt 2 "
    "--rollout.max-new-tokens 4 --rollout.max-prompt-tokens 16 --rollout.assignment static --data.limit 8 "
    "--eval.every 1 --eval.prompts 4 --checkpoint.no-at-end --tracking.trackers jsonl"
)
RUNS = {
    "bypass, several updates": "--algo.old-logp rollout --algo.updates-per-step 2",
    "a pass before, several updates": "--algo.old-logp policy --algo.updates-per-step 2",
    "replay": "--algo.preset pf_ppo --filter.replay-steps 1 --algo.updates-per-step 2",
    "critic that warms up": "--algo.preset vapo --critic.warmup-steps 1 --algo.updates-per-step 2",
    "process rewards": "--algo.preset prime --filter.low 0 --filter.high 1",
    "KL in the reward": "--algo.preset reinforce_pp --algo.kl-target 0.1 --reference.refresh-every 1",
    "adapters, correction, shaping": "--lora.rank 2 --correction.kind icepop --shaping.length-penalty linear "
    "--shaping.overlong-buffer 2 --shaping.clip-high 0.5 --shaping.mask-cut --optimizer.schedule cosine",
    "evaluation off": "--eval.every 0",
}

TOUCHED = {
    "algo.part_weights": "whoever checks the parts of a reward looks whether any are named",
    "optimizer.min_lr_ratio": "copied with the rest of a critic's optimizer settings",
    "optimizer.decay_share": "the same",
    "eval.temperature": "an engine checks the temperatures it may be asked for",
}
"""Settings that a run may read without any use of them."""


def run_watched(world, flags: list[str]) -> list[str]:
    """Names of the settings that a run looks at, apart from writing all of them down."""
    config = from_command_line(flags).config
    watched, seen = watch(config)
    plain = lambda _: to_dict(config)  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(patch.object(journal, "to_dict", plain))
        stack.enter_context(patch.object(resume, "to_dict", plain))
        run = build_run(Session(watched, world, Timer()))
        train(run)
        run.close()
    return sorted(seen)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_reads_nothing_that_is_declared_unread(name, tmp_path):
    flags = f"{BASE} {RUNS[name]} --run.dir {tmp_path}/run".split()
    (seen,) = run_ranks(run_watched, 1, flags)
    config = from_command_line(flags).config
    assert {"algo.loss", "shaping.normalize", "optimizer.lr"} <= set(seen)
    assert {setting for setting in seen if not is_read(config, setting)} - TOUCHED.keys() == set()
