"""The planner says what FSDP's ranks hold and send that reduce their gradients after each micro-batch."""

import pytest

from tests.ranks.test_plan import SETTINGS, both, compare, dense, said, settings


@pytest.mark.parametrize(("ranks", "axes"), [(2, {}), (4, {"dp_replicate": 2})])
def test_gradients_reduced_after_each_micro_batch(ranks, axes, tmp_path):
    policy = {"policy": SETTINGS["policy"] | {"reduce_gradients": "each"}}
    found = both([("each", settings(dense(tmp_path), axes, **policy))], ranks)
    wrong = {key: lines for key, (is_, told) in found.items() if (lines := compare(is_, told))}
    assert not wrong, said(wrong)
