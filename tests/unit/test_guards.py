"""The guard of an update lets steps pass, counts them, hands them on and ends the run, by plain numbers."""

import json
import math

import pytest
import torch

from spmdrl.data.batch import Batch
from spmdrl.policy.grad_guard import LEAST, MOST, WINDOW, AnomalousStep, Guard, NonFiniteError

NONE = Batch(torch.zeros(0, dtype=torch.int64))


class Kept:
    """A guard and the steps that it handed on."""

    def __init__(self, limit: int = 3, factor: float = 20.0):
        self.seen: list[AnomalousStep] = []
        self.guard = Guard(limit, factor, self.keep)

    def keep(self, step: AnomalousStep) -> str:
        self.seen.append(step)
        return "here"

    def __call__(self, norm: float, loss_finite: bool = True) -> bool:
        return self.guard.passes(AnomalousStep(NONE, 0, 7, 3, norm, loss_finite, self.guard.median, False))


def test_guard_skips_what_is_not_finite_and_ends_at_the_third_in_a_row():
    kept = Kept()
    assert kept(1.0) and not kept(math.nan) and not kept(math.inf) and kept(1.0), "a good one between starts anew"
    assert not kept(1.0, loss_finite=False) and not kept(math.nan)
    with pytest.raises(NonFiniteError, match=r"gradient norm is inf at optimizer step 7, the last of 3 bad steps"):
        kept(math.inf)
    assert list(kept.guard.norms) == [1.0, 1.0], "what was left out is no measure"


@pytest.mark.parametrize("limit", [0, 1])
def test_guard_ends_at_the_first_one_when_told(limit):
    with pytest.raises(NonFiniteError, match="the loss is not finite at optimizer step 7; weights are unchanged"):
        Kept(limit)(1.0, loss_finite=False)


def test_guard_measures_a_spike_by_the_median_and_never_stops_it():
    kept = Kept()
    for i in range(LEAST - 1):
        assert kept(1.0 + i / 10)
    assert kept(1000.0) and not kept.seen, "too few before it to tell"
    kept = Kept()
    for i in range(LEAST):
        assert kept(1.0 + i / 10) and kept(0.0), "a step without signal measures nothing"
    assert kept.guard.median == pytest.approx(1.35)
    assert kept(20 * 1.35) and not kept.seen
    assert kept(20 * 1.4 + 1) and [step.norm for step in kept.seen] == [29.0]
    assert kept.seen[0].finite and kept.seen[0].median == pytest.approx(1.4)


def test_guard_hands_on_three_of_each_kind_and_forgets_old_norms():
    kept = Kept(limit=99)
    for _ in range(2 * WINDOW):
        kept(1.0)
    for _ in range(MOST + 2):
        kept(100.0)
        kept(math.nan)
    assert [step.finite for step in kept.seen] == [True, False] * MOST
    assert len(kept.guard.norms) == WINDOW
    assert Kept(factor=0)(1e30)
    off = Kept(factor=0)
    for norm in [1.0] * LEAST + [1e30]:
        off(norm)
    assert not off.seen


def test_guard_continues_after_a_resume():
    kept, other = Kept(), Kept()
    for norm in [0.1 + i / 7 for i in range(40)] + [math.nan, math.nan]:
        kept(norm)
    other.guard.restore(json.loads(json.dumps(kept.guard.state())))
    assert other.guard.state() == kept.guard.state() and other.guard.median == kept.guard.median
    with pytest.raises(NonFiniteError, match="last of 3 bad steps in a row"):
        other(math.nan)
