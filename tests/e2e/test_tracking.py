"""Curves land in the run folder by every tracker at once, without an account and without the network."""

from importlib.util import find_spec

import pytest

from tests.e2e.runner import argv, metrics
from tests.e2e.warm import succeed

pytestmark = [
    pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed"),
    pytest.mark.timeout(180),
]
STEPS = 3
FLAGS = argv(
    f"--tracking.trackers jsonl tensorboard wandb --rollout.engine hf --run.steps {STEPS} --rollout.prompts_per_step 4 "
    "--rollout.samples_per_prompt 4 --eval.every 0 --checkpoint.no-at-end"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked") / "run"
    succeed([*FLAGS, "--run.dir", folder], 120, env={"WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40})
    return folder


def test_tracking_tensorboard_holds_the_numbers_of_metrics_jsonl(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in ("reward/mean", "entropy/mean", "time/step"):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in metrics(folder)], name


def test_tracking_wandb_offline_run_is_written(folder):
    (run,) = (folder / "wandb").glob("offline-run-*")
    (data,) = run.glob("*.wandb")
    assert data.stat().st_size > 1000
    content = data.read_bytes()
    for name in (b"reward/mean", b"entropy/mean"):
        assert content.count(name) >= STEPS, "one record a step"


def test_tracking_no_secret_reaches_the_run_folder(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"0" * 40 not in path.read_bytes(), path
