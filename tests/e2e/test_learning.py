"""Presets learn the demo task, one for each way through the code, and a wrong sign does not: 0.35 to 0.85 in 30 steps.

So do distillation (recipes/opd) and a user's own functions (recipes/own). One seed here, and a run ends as soon as it
is there. tests/long/test_learning.py runs every preset on three seeds, on to 0.95; here its record of each is read.
"""

import pytest

from spmdrl.config.presets import PRESETS
from tests.e2e.learning import DISTILLED, ROOT, Run, has_learned, learning, read, wrong_sign

pytestmark = pytest.mark.timeout(600)
WAYS = {
    "dapo": "advantages of groups, sampled until enough are mixed",
    "reinforce": "one update a step, and no group",
    "gspo": "a loss of whole sequences",
    "kl_cov": "tokens selected over all of an optimizer step",
    "remax": "a greedy sample beside the others",
    "gdpo": "parts of the reward",
    "vapo": "a critic that trains alone at first",
    "pf_ppo": "samples drawn again by reward",
    "prime": "a process reward that trains",
    "safe_rlhf": "a critic of the cost, and a multiplier",
    "distill": "a teacher as the reference",
    DISTILLED: "`spmdrl.distill`",
    "own": "a user's own functions",
}
"""Preset or recipe -> the way through the code that it stands for."""
NAMES = [*WAYS, "wrong sign"]


@pytest.fixture(scope="module")
def curve(request, tmp_path_factory):
    """Name -> its curve. All selected runs start with the first request, two at a time."""
    folder = tmp_path_factory.mktemp("learning")
    runs = {name: Run(name) for name in NAMES} | {"wrong sign": wrong_sign("ppo", folder / "wrong.py")}
    # Runs of a test file that was collected before this one are included: they ask for other names.
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with learning({name: run for name, run in runs.items() if name in asked}, folder) as result:
        yield result


@pytest.mark.parametrize("name", NAMES[:-1])
def test_learning_reaches_the_target(curve, name):
    print(curve(name))
    has_learned(curve(name))


@pytest.mark.parametrize("name", NAMES[-1:])
def test_learning_fails_with_a_wrong_sign(curve, name):
    """PPO's loss gets the opposite advantages, through the same function as every preset."""
    print(curve(name))
    with pytest.raises(AssertionError, match="not 0.85 in"):
        has_learned(curve(name))
    assert curve(name).accuracy[-1] < 0.1 < curve(name).accuracy[0], "it unlearns what it knew"


@pytest.mark.parametrize("preset", PRESETS)
def test_learning_of_every_preset_is_on_record(preset):
    """The curves in docs are of the long form; a preset that is not run above must have learned there on every seed."""
    curves = [c for c in read(ROOT / "docs" / "results" / "learning" / "curves.json") if c.preset == preset]
    assert sorted(curve.seed for curve in curves) == [0, 1, 2], "run tests/long/test_learning.py -k " + preset
    for curve in curves:
        has_learned(curve)
