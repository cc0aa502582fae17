"""Every preset learns the demo task on three seeds, and no loss does with a wrong sign.

The long form of tests/e2e/test_learning.py: runs go on to 0.95. The curves of the presets that were asked for go to
docs/results/learning/, and with them the table of docs/learning.md.
"""

import contextlib
import platform
import statistics
import time
from importlib.metadata import version

import pytest

from spmdrl.algos.losses import LOSSES
from spmdrl.config.presets import PRESETS
from tests.e2e.learning import (
    EVERY,
    ROOT,
    STEPS,
    Curve,
    Run,
    has_learned,
    learn,
    learning,
    read,
    table,
    write,
    wrong_sign,
)
from tests.e2e.runner import metrics

pytestmark = pytest.mark.timeout(1800)
RESULTS = ROOT / "docs" / "results" / "learning"
SEEDS = (0, 1, 2)
GOES_ON = 0.95
"""Accuracy at which a run ends here."""
RUNS = {f"{preset} {seed}": Run(preset, seed) for preset in PRESETS for seed in SEEDS}


@pytest.fixture(scope="module")
def curve(request, tmp_path_factory):
    """Returns the curve of a run by name."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    runs = {name: run for name, run in RUNS.items() if name in asked}
    with learning(runs, tmp_path_factory.mktemp("learning"), GOES_ON) as result:
        yield result
        # A run that failed has reported so in its own test.
        with contextlib.suppress(RuntimeError):
            keep([result(name) for name in runs])


def keep(curves: list[Curve]) -> None:
    """Replaces the curves of the same preset and seed in docs/results/learning."""
    about = {
        "task": "builtin:reverse, 256 held-out prompts sampled at temperature 1",
        "evaluated_every": EVERY,
        "most_steps": STEPS,
        "ends_at": GOES_ON,
        "machine": f"{platform.machine()}, 1 thread, two runs at a time",
        "date": time.strftime("%Y-%m-%d"),
        "torch": version("torch"),
    }
    file = RESULTS / "curves.json"
    known = {f"{c.preset} {c.seed}": c for c in [*(read(file) if file.exists() else []), *curves]}
    write(file, about, [known[name] for name in RUNS if name in known])
    (RESULTS / "table.md").write_text(table(read(file)) + "\n")


@pytest.mark.parametrize("name", RUNS)
def test_learning_reaches_the_target(curve, name):
    print(curve(name))
    has_learned(curve(name))


@pytest.fixture(scope="module")
def wrong(request, tmp_path_factory):
    """Returns loss -> the curve of the opposite loss."""
    folder = tmp_path_factory.mktemp("wrong")
    asked = {item.callspec.params.get("loss") for item in request.session.items if hasattr(item, "callspec")}
    runs = {loss: wrong_sign(loss, folder / f"{loss}.py") for loss in WRONG if loss in asked}
    with learning(runs, folder) as result:
        yield result


# What a loss selects beforehand is chosen by its name, which a user's file does not have.
WRONG = [name for name, row in LOSSES.items() if not row.select]


@pytest.mark.parametrize("loss", WRONG)
def test_learning_fails_with_a_wrong_sign(wrong, loss):
    print(loss, wrong(loss))
    with pytest.raises(AssertionError, match="not 0.85 in"):
        has_learned(wrong(loss))
    assert wrong(loss).accuracy[-1] < 0.1 < wrong(loss).accuracy[0], "it unlearns what it knew"


@pytest.mark.parametrize("seed", SEEDS)
def test_learning_under_a_constraint_keeps_its_cost(tmp_path, seed):
    """In Safe RLHF right answers cost 0.1 in the mean; under the constraint the policy leaves most of that out."""

    def mean_cost(folder, *more: str) -> float:
        found = learn("safe_rlhf", seed, folder, ["--run.steps", "20", *more], target=2.0)
        print(found)
        assert max(found.accuracy) >= 0.85
        return statistics.mean(row["safety/cost"] for row in metrics(folder)[-10:])

    free = mean_cost(tmp_path / "free", "--safety.multiplier", "1e-6", "--safety.lr", "1e-6")
    bound = mean_cost(tmp_path / "bound")
    print(f"mean cost of the last 10 steps: {free:.3f} without the constraint, {bound:.3f} with it, limit 0.05")
    assert bound < 0.05 < 0.07 < free
