"""Law 3: draws are keyed by data. The hash mixes well, and uniform numbers are uniform and independent."""

import itertools
import math

import pytest
import torch

from spmdrl.data.mixture import drawn_indices
from spmdrl.spmd.seeds import generator_for, seed_for, uniform

MASK = (1 << 64) - 1


def mix_reference(x: int) -> int:
    """Computes SplitMix64's output function in plain integers (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(y: int) -> int:
    """Computes the inverse: the input that gives y."""

    def unshift(value: int, bits: int) -> int:
        out = value
        for _ in range(64 // bits + 1):
            out = value ^ (out >> bits)
        return out

    x = unshift(y, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return unshift(x, 30)


def seed_that_draws(y: int) -> int:
    """Returns the seed (int64) whose number at position 0 has the bits y."""
    x = (unmix(y) - 0x9E3779B97F4A7C15) & MASK
    return x - (1 << 64) if x >> 63 else x


def test_splitmix_matches_its_published_sequence():
    """The first outputs of SplitMix64 seeded with 1234567."""
    state, got = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        got.append(mix_reference(state))
    assert got == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    # `uniform` takes the same outputs as its numbers, position by position.
    u = uniform(torch.full((5,), 1234567), torch.arange(5))
    assert torch.allclose(u, torch.tensor([x / 2**64 for x in got], dtype=torch.float64), rtol=0, atol=2**-51)


def test_seeds_differ_by_every_part_of_their_key():
    keys = list(itertools.product(range(3), range(4), range(20), range(16), range(2)))
    seeds = [seed_for(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= s < 1 << 63 for s in seeds)
    assert seed_for(1, 2) != seed_for(2, 1) and seed_for(0) != seed_for(0, 0) and seed_for(-1) != seed_for(1)
    # One SplitMix64 step for each part, on top of the sum so far.
    state = 0
    for part in (0, 1, 2, 3, 4):
        state = mix_reference((state + 0x9E3779B97F4A7C15 + part) & MASK)
    assert seed_for(0, 1, 2, 3, 4) == state >> 1
    assert generator_for(1, 2).random() == generator_for(1, 2).random() != generator_for(1, 3).random()


def test_every_bit_of_a_seed_depends_on_every_bit_of_its_key():
    base = [seed_for(7, 0, i) for i in range(256)]
    flips = torch.zeros(8, 63)
    for bit in range(8):
        for i, seed in enumerate(base):
            changed = seed ^ seed_for(7, 0, i ^ (1 << bit))
            flips[bit] += torch.tensor([changed >> b & 1 for b in range(63)], dtype=torch.float32)
    # 256 fair coins: 5 standard deviations are 40.
    assert ((flips - 128).abs() < 40).all()


def test_uniform_is_uniform_and_neighbours_are_independent():
    """Prompt, sample and position are keys, as in a rollout: cells are equal, neighbours uncorrelated."""
    seeds = torch.tensor([seed_for(0, 5, p, p, s, 0) for p in range(64) for s in range(8)])
    u = uniform(seeds.repeat_interleave(64), torch.arange(64).repeat(512)).view(64, 8, 64)
    n = u.numel()
    assert abs(u.mean().item() - 0.5) < 4 / math.sqrt(12 * n)
    cells = torch.histc(u.flatten().float(), 64, 0, 1)
    chi2 = ((cells - n / 64) ** 2 / (n / 64)).sum().item()
    assert 20 < chi2 < 120  # 63 degrees of freedom; a regular grid would give 0
    for dim in range(3):
        a, b = u.narrow(dim, 0, u.shape[dim] - 1).flatten(), u.narrow(dim, 1, u.shape[dim] - 1).flatten()
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(a)), dim
    # Pairs of neighbours fill the square evenly too.
    pairs = (u[..., :-1] * 8).long() * 8 + (u[..., 1:] * 8).long()
    counts = torch.bincount(pairs.flatten(), minlength=64).double()
    expected = pairs.numel() / 64
    assert 20 < ((counts - expected) ** 2 / expected).sum().item() < 120


@pytest.mark.parametrize("bits", [0, 1, MASK, MASK - 1, MASK - (1 << 11), 1 << 63])
def test_uniform_stays_strictly_between_0_and_1(bits):
    seed = seed_that_draws(bits)
    assert mix_reference((seed + 0x9E3779B97F4A7C15) & MASK) == bits
    u = uniform(torch.tensor([seed]), torch.tensor([0])).item()
    assert 0 < u < 1
    assert abs(u - bits / 2**64) < 2**-51


def test_uniform_rows_do_not_depend_on_each_other():
    seeds = torch.tensor([seed_for(i) for i in range(100)])
    positions = torch.arange(100) % 7
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(100)])
    assert torch.equal(together, alone)


def test_steps_cut_the_epochs_into_equal_pieces():
    """Law 3: steps are a function of (seed, step); every prompt comes once an epoch, whatever the world size."""
    n, size = 37, 8
    line = [i for step in range(37) for i in drawn_indices(n, step * size, size, seed=3)]
    assert [sorted(line[e * n : (e + 1) * n]) for e in range(8)] == [list(range(n))] * 8
    assert line[:n] != line[n : 2 * n] != list(range(n))
    assert drawn_indices(n, 32, 8, seed=3) == line[32:40] != drawn_indices(n, 32, 8, seed=4)
    assert drawn_indices(n, 5, 0, seed=3) == []
