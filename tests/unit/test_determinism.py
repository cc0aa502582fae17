"""Generators of a process start from the seed of the run, and not from the rank (law 3)."""

import random

import numpy
import pytest
import torch

from spmdrl.config.schema import RunConfig
from spmdrl.session.determinism import make_deterministic


@pytest.fixture
def generators_stay():
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_generators_are_alike_on_all_ranks_and_differ_by_seed(generators_stay, monkeypatch):
    def draws(rank: int, seed: int) -> tuple:
        monkeypatch.setenv("RANK", str(rank))
        make_deterministic(RunConfig(seed=seed))
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert draws(0, 5) == draws(1, 5)
    assert not set(draws(0, 5)) & set(draws(0, 6))
