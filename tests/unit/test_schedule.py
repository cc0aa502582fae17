"""Schedules of the learning rate, against those of transformers."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from spmdrl.config.schema import OptimizerConfig
from spmdrl.policy.optimizer import learning_rate

LR, WARMUP, TOTAL = 2.0, 4, 40


def theirs(name: str) -> list[float]:
    """Returns the learning rate of each step after the warm-up."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    if name == "wsd":
        schedule = get_wsd_schedule(optimizer, WARMUP, 10, TOTAL, decay_type="linear")
    else:
        of = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[name]
        schedule = of(optimizer, WARMUP, TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates[WARMUP:]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_parity_the_learning_rate_after_the_warm_up_is_that_of_transformers(name):
    cfg = OptimizerConfig(lr=LR, schedule=name, warmup_steps=WARMUP, decay_share=0.25)
    mine = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL)]
    assert mine[:WARMUP] == pytest.approx([LR * k / WARMUP for k in range(1, WARMUP + 1)])
    assert mine[WARMUP:] == pytest.approx(theirs(name), abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_no_schedule_falls_below_its_least_rate_or_beyond_the_last_step(name):
    cfg = OptimizerConfig(lr=LR, schedule=name, min_lr_ratio=0.25)
    rates = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL + 5)]
    assert rates[0] == LR and rates == sorted(rates, reverse=True) and rates[TOTAL:] == pytest.approx([LR / 4] * 5)


def test_a_constant_rate_stays():
    assert {learning_rate(OptimizerConfig(lr=LR), step, TOTAL) for step in range(TOTAL)} == {LR}
