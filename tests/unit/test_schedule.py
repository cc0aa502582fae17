"""Schedules of the learning rate, against those of transformers."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from spmdrl.config.supervised import SupervisedOptimizerConfig as OptimizerConfig
from spmdrl.policy.optimizer import learning_rate

LR, WARMUP, TOTAL = 2.0, 4, 40


def theirs(name: str, decay: int) -> list[float]:
    """Returns the learning rate of each step after the warm-up. decay: steps over which it falls."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    if decay < TOTAL - WARMUP:
        schedule = get_wsd_schedule(optimizer, WARMUP, decay, TOTAL, decay_type=name)
    else:
        of = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[name]
        schedule = of(optimizer, WARMUP, TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates[WARMUP:]


@pytest.mark.parametrize("decay", [36, 18, 9])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_parity_the_learning_rate_after_the_warm_up_is_that_of_transformers(name, decay):
    cfg = OptimizerConfig(lr=LR, schedule=name, warmup_steps=WARMUP, decay_share=decay / 36)
    mine = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL)]
    assert mine[:WARMUP] == pytest.approx([LR * k / WARMUP for k in range(1, WARMUP + 1)])
    assert mine[WARMUP:] == pytest.approx(theirs(name, decay), abs=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_no_schedule_falls_below_its_least_rate_or_beyond_the_last_step(name, share):
    cfg = OptimizerConfig(lr=LR, schedule=name, min_lr_ratio=0.25, decay_share=share)
    rates = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL + 5)]
    assert rates[0] == LR and rates == sorted(rates, reverse=True) and rates[TOTAL:] == pytest.approx([LR / 4] * 5)


def test_a_constant_rate_stays():
    assert {learning_rate(OptimizerConfig(lr=LR), step, TOTAL) for step in range(TOTAL)} == {LR}
