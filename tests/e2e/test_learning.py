"""Every preset learns the demo task, and a wrong sign does not: held-out accuracy from 0.35 to 0.85 in 30 steps.

So do distillation (recipes/opd) and a user's own functions (recipes/own). One seed here, and a run ends as soon as it
is there; tests/long/test_learning.py has three seeds and goes on to 0.95.
"""

import pytest

from spmdrl.config.presets import PRESETS
from tests.e2e.learning import DISTILLED, Run, has_learned, learning, wrong_sign

pytestmark = pytest.mark.timeout(600)
NAMES = [*PRESETS, DISTILLED, "own", "wrong sign"]


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
