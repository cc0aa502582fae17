"""Law 5's checksums detect every change on the way, and stay the same otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.spmd import checksum as digests
from spmdrl.spmd.checksum import digest, weighted_sum, word_sum, words
from spmdrl.weights.shards import shard_rows

BOTH = [digest, weighted_sum]
"""Digest of a CPU and digest of a GPU."""

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8]
SIZES = [1, 2, 3, 5, 7, 64, 4095, 4096, 4097, 8192, 20003, 70000]


def random_bytes(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.integers(0, 2**31), st.data())
def test_stale_digest_sees_any_flipped_bit(dtype, n, seed, data):
    x = random_bytes(n, dtype, seed)
    before = [take(x).item() for take in BOTH]
    place = data.draw(st.integers(0, n * dtype.itemsize - 1))
    as_bytes(x)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert all(take(x).item() != old for take, old in zip(BOTH, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [6, 4096, 4096 * 5 + 3])
@pytest.mark.parametrize("digest", BOTH)
def test_stale_digest_sees_a_changed_sign(dtype, n, digest):
    """The top bit of a word is the first one that a product modulo 2**64 loses."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digest(x).item()
    for place in {0, 1, 2, 3, n // 2, n // 2 + 1, n - 2, n - 1}:
        y = x.clone()
        y[place] = -y[place]
        assert digest(y).item() != before, place
        y[(place + 2) % n] = -y[(place + 2) % n]  # and two of them do not cancel
        assert digest(y).item() != before, place
    assert digest(-x).item() != before


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.sampled_from(SIZES[1:]), st.data())
def test_stale_digest_sees_two_exchanged_elements(dtype, n, data):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    a = data.draw(st.integers(0, n - 1))
    # The same column of the sum's grid, the same row, anywhere; and values that differ in their sign alone.
    b = data.draw(st.one_of(st.integers(0, n - 1), st.sampled_from([(a + k) % n for k in (1, 2, 4096, 8192)])))
    if data.draw(st.booleans()) and a != b:
        x[b] = -x[a]
    y = x.clone()
    y[a], y[b] = x[b].item(), x[a].item()
    assert all(torch.equal(x, y) == (take(x).item() == take(y).item()) for take in BOTH)


@pytest.mark.parametrize("digest", BOTH)
def test_stale_digest_sees_exchanged_rows_and_shifts(digest):
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    before = digest(x).item()
    for other in (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(4, 0), x.roll(1, 1), x.t().contiguous(), x * 2):
        assert digest(other.contiguous()).item() != before


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 9), st.sampled_from(DTYPES))
def test_stale_digest_of_a_shard_is_that_of_its_rows_in_the_whole(rows, width, shards, dtype):
    """The sender digests its own rows, the receiver a range of rows: alignment must not matter."""
    x = random_bytes(rows * width, dtype, rows).view(rows, width)
    for full in (x, x.flatten()[:rows].clone()):
        pieces = list(full.chunk(shards))
        pieces += [full[:0]] * (shards - len(pieces))
        assert [shard_rows(rows, shards, i)[1] - shard_rows(rows, shards, i)[0] for i in range(shards)] == [
            len(p) for p in pieces
        ]
        for take in BOTH:
            assert [take(p.clone()) for p in pieces] == [
                take(full[slice(*shard_rows(rows, shards, i))]) for i in range(shards)
            ]


def test_stale_weighted_sum_is_its_formula_in_any_number_of_steps(monkeypatch):
    """Each 32-bit word is multiplied by an odd weight, modulo 2**64; a large message is summed some rows at a time."""
    lanes, by_row = digests._LANES, 2 * 0x9E3779B1
    x = random_bytes(lanes * 5 + 77, torch.float32, 9)
    values, whole = x.view(torch.int32).tolist(), lanes * 5
    want = sum(v * (2 * (i % lanes) + 1 + (2 * (i // lanes) + 1) * by_row) for i, v in enumerate(values[:whole]))
    want += sum(v * (2 * i + 1) * 0x85EBCA77 for i, v in enumerate(values[whole:]))
    for rows in (1, 2, 3, 5, 4096):
        monkeypatch.setattr(digests, "_ROWS", rows)
        assert weighted_sum(x).item() % (1 << 64) == want % (1 << 64)


def test_stale_whole_check_does_not_depend_on_how_tensors_are_fused():
    g = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(n, 64, generator=g).to(dtype) for n in (64, 32, 32))
        assert word_sum([q, k, v]) == word_sum([torch.cat([q, k, v])]) == word_sum([v, q, k])
        changed = q.clone()
        changed[5, 5] = -changed[5, 5]
        assert word_sum([changed, k, v]) != word_sum([q, k, v])
    assert word_sum([]) == 0 and words(torch.zeros(0)).numel() == 0
