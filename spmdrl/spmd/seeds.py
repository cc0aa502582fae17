"""Data-keyed randomness: one counter-based hash, the same for every rank, device and world size.

The mixing step is SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195).
The SGLang server loads this file in an interpreter without spmdrl, so it imports only torch.
"""

import random

import torch

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def seed_for(*key: int) -> int:
    """Return a 63-bit seed for a key such as (seed, step, prompt, sample, turn)."""
    state = 0
    for part in key:
        state = _mix((state + GOLDEN + (int(part) & _MASK)) & _MASK)
    return state >> 1


def generator_for(*key: int) -> random.Random:
    """Return a Python random generator for a key, for choices such as the data order or split."""
    return random.Random(seed_for(*key))


def signed(x: int) -> int:
    """Return the lowest 64 bits of x as a signed integer."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 values right by `bits`, filling with zeros instead of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Return one uniform random number in (0, 1) per row, float64 [B], computed from its seed and token position.

    seeds_B, position_B: int64 [B].
    """
    x = seeds_B + (position_B + 1) * signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(_MIX1)
    x = (x ^ _shift(x, 27)) * signed(_MIX2)
    x = x ^ _shift(x, 31)
    # 52 bits plus one half are exact in float64. With 53 bits, the largest number would round to 1.
    return (_shift(x, 12).double() + 0.5) * 2.0**-52
