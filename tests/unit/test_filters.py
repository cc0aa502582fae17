"""Filters, the choice of prompts and resampling against plain loops."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos.filters import FILTERS, accuracy_range, choose, mixed, shortage, whole_groups
from spmdrl.algos.resample import METHODS, Buffer, draw, weights
from spmdrl.spmd.seeds import seed_for, uniform

SCORES = st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0, -2.0])
SAMPLES = st.lists(st.tuples(SCORES, st.sampled_from([-7, 3, 4, 10**9])), max_size=24)


def columns(samples) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([s for s, _ in samples], dtype=torch.float64),
        torch.tensor([g for _, g in samples], dtype=torch.int64),
    )


def members(samples) -> dict[int, list[float]]:
    return {group: [s for s, g in samples if g == group] for _, group in samples}


# ── filters ──────────────────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(SAMPLES)
def test_filters_match_a_loop(samples):
    score_B, group_B = columns(samples)
    groups = members(samples)
    assert mixed(score_B, group_B).tolist() == [len(set(groups[g])) > 1 for _, g in samples]
    mean = {g: math.fsum(scores) / len(scores) for g, scores in groups.items()}
    # Away from the bounds, where the loop's rounding does not decide.
    kept = accuracy_range(score_B, group_B, low=0.2123, high=0.6789).tolist()
    assert kept == [0.2123 <= mean[g] <= 0.6789 for _, g in samples]


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_layout_filters_do_not_see_order_or_other_groups(samples, rng):
    score_B, group_B = columns(samples)
    order = list(range(len(samples)))
    rng.shuffle(order)
    for f in FILTERS.values():
        keep_B = f(score_B, group_B)
        assert whole_groups(keep_B, group_B) is keep_B
        assert torch.equal(f(score_B[order], group_B[order]), keep_B[order])
        for group in group_B.unique():
            alone = group_B == group
            assert torch.equal(f(score_B[alone], group_B[alone]), keep_B[alone])


@pytest.mark.parametrize("size", [5, 10, 15, 35])
def test_accuracy_range_holds_its_ends(size):
    """The fractions 0.2 and 0.8 are inside, one sample further is outside; fp32 and integer scores agree."""
    correct = {1: size // 5, 2: size // 5 - 1, 3: size * 4 // 5, 4: size * 4 // 5 + 1}
    score = torch.tensor([float(i < n) for n in correct.values() for i in range(size)])
    group = torch.tensor([g for g in correct for _ in range(size)])
    expected = [g in (1, 3) for g in group.tolist()]
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        assert accuracy_range(score.to(dtype), group).tolist() == expected


@pytest.mark.parametrize("name", FILTERS)
def test_filters_on_nothing_and_on_nan(name):
    empty = torch.zeros(0)
    kept = FILTERS[name](empty, empty.long())
    assert kept.shape == (0,) and kept.dtype == torch.bool
    assert whole_groups(kept, empty.long()).shape == (0,)
    with pytest.raises(ValueError, match=r"sequence 1: nan, sequence 2: inf"):
        FILTERS[name](torch.tensor([0.0, math.nan, math.inf]), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        FILTERS[name](torch.zeros(3), torch.zeros(2).long())


def test_filter_settings_are_checked():
    with pytest.raises(ValueError, match="low <= high"):
        accuracy_range(torch.zeros(2), torch.zeros(2).long(), low=0.8, high=0.2)
    assert not mixed(torch.tensor([1.0]), torch.tensor([0])).any(), "a group of one has nothing to compare with"


def test_whole_groups_names_the_function_and_the_fault():
    group_B = torch.tensor([5, 9, 5, 9, 7])
    keep_B = torch.tensor([True, False, False, False, True])
    with pytest.raises(ValueError, match=r"my\.py:f kept only a part of groups \[5\]"):
        whole_groups(keep_B, group_B, "my.py:f")
    for wrong, got in (
        (keep_B.long(), r"torch\.int64 \[5\]"),
        (keep_B[:4], r"torch\.bool \[4\]"),
        (keep_B[:, None], r"torch\.bool \[5, 1\]"),
        ([True] * 5, "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"my\.py:f must return a bool tensor \[5\].*{got}"):
            whole_groups(wrong, group_B, "my.py:f")  # pyright: ignore[reportArgumentType]


# ── the choice of prompts ────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=40), st.integers(0, 30))
def test_layout_choice_does_not_depend_on_ranks(kept, wanted):
    expected = sorted({p for p, _ in kept})[:wanted]
    parts = [torch.tensor([p for p, r in kept if r == rank], dtype=torch.int64) for rank in range(4)]
    assert choose(parts, wanted).tolist() == expected
    assert choose(parts[::-1], wanted).tolist() == expected
    assert choose(torch.unique(torch.cat(parts)), wanted).tolist() == expected


def test_choice_of_nothing():
    assert choose([], 3).tolist() == [] and choose([], 3).dtype == torch.int64
    assert choose(torch.tensor([4, 2]), 0).tolist() == []


def test_shortage_says_what_to_change():
    text = shortage("mixed", kept=12, sampled=96, wanted=32, rounds=3)
    assert "filter mixed kept 12 of 96 prompts (acceptance rate 12.5%) in 3 rounds, and a step needs 32" in text
    assert "--filter.max-rounds (to about 8 " in text and "--rollout.prompts-per-step (to 12 or less)" in text
    for nothing in (shortage("mixed", 0, 96, 32, 1), shortage("mixed", 0, 0, 32, 0)):
        assert "0.0%" in nothing and "samples.jsonl" in nothing
        assert all(f in nothing for f in ("--filter.max-rounds", "--filter.keep", "--rollout.prompts-per-step"))


# ── resampling ───────────────────────────────────────────────────────────────


def paper_weights(method: str, scores: list[float], rng: random.Random, orders: int) -> list[float]:
    """Computes PF-PPO's weight vector over ranks of one group, ties broken by chance: the mean over many orders."""
    n = len(scores)
    if n == 1:
        return [1.0]
    by_rank = [0.5] + ([0.5 / (n - 1)] * (n - 1) if method == "best_random" else [0.0] * (n - 2) + [0.5])
    total = [0.0] * n
    for _ in range(orders):
        for rank, i in enumerate(sorted(range(n), key=lambda i: (-scores[i], rng.random()))):
            total[i] += by_rank[rank] / orders
    return total


@pytest.mark.parametrize("method", ["best_random", "best_worst"])
def test_group_weights_are_the_papers(method):
    groups = {3: [0.1, 0.9, 0.5, -1.0], 8: [1.0, 0.0, 1.0, 1.0, 0.0], 1: [2.0], 6: [0.5] * 3, 2: [0.0, 1.0]}
    rng = random.Random(0)
    rows = [(g, i) for g, scores in groups.items() for i in range(len(scores))]
    rng.shuffle(rows)
    got = weights(
        torch.tensor([groups[g][i] for g, i in rows]), method, group_N=torch.tensor([g for g, _ in rows])
    ).tolist()
    for g, scores in groups.items():
        mine = [got[rows.index((g, i))] for i in range(len(scores))]
        assert sum(mine) == pytest.approx(1, abs=1e-12)
        tied = len(set(scores)) < len(scores)
        expected = paper_weights(method, scores, rng, 20_000 if tied else 1)
        assert mine == pytest.approx(expected, abs=0.01 if tied else 1e-12)
    # The ties of group 8, by hand: three best of five.
    mine = sorted(got[rows.index((8, i))] for i in range(5))
    by_hand = [0.125, 0.125, 0.25, 0.25, 0.25] if method == "best_random" else [1 / 6, 1 / 6, 1 / 6, 0.25, 0.25]
    assert mine == pytest.approx(by_hand, abs=1e-12)


def test_batch_weights_by_hand():
    """Values of verl 0.9.1, which adds 1e-8 to each: here a weight of 0 is never drawn."""
    score_N, one_N = torch.tensor([0.5, -2.0, 1.0, 0.0, 1.0]), torch.zeros(5, dtype=torch.int64)
    assert weights(score_N, "pow", one_N).tolist() == [0.25, 4.0, 1.0, 0.0, 1.0]
    assert weights(score_N, "pow", one_N, 3.0).tolist() == [0.125, 8.0, 1.0, 0.0, 1.0]
    assert weights(score_N, "max_min", one_N).tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert weights(score_N, "max_random", one_N).tolist() == [0.1, 0.1, 0.4, 0.1, 0.4]
    assert weights(torch.zeros(3), "pow", one_N[:3]).tolist() == [1.0, 1.0, 1.0]
    assert weights(torch.zeros(3), "max_min", one_N[:3]).tolist() == [1.0, 1.0, 1.0]


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_layout_weights_move_with_their_samples(samples, rng):
    score_N, group_N = columns(samples)
    order = list(range(len(samples)))
    rng.shuffle(order)
    for method in METHODS:
        weights_N = weights(score_N, method, group_N=group_N)
        assert weights_N.shape == score_N.shape and weights_N.dtype == torch.float64
        assert bool((weights_N >= 0).all()) and (not samples or bool((weights_N > 0).any()))
        assert torch.equal(weights(score_N[order], method, group_N=group_N[order]), weights_N[order])
        if method.startswith("best"):
            assert float(weights_N.sum()) == pytest.approx(len(members(samples)), abs=1e-9)


def test_weights_say_what_is_wrong():
    one_N = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="unknown resampling method 'best'"):
        weights(torch.zeros(2), "best", one_N)
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        weights(torch.zeros(2), "best_worst", one_N[:1])
    with pytest.raises(ValueError, match="power .* must be >= 0"):
        weights(torch.ones(2), "pow", one_N, -1.0)
    with pytest.raises(ValueError, match="lower the power"):
        weights(torch.tensor([1e200], dtype=torch.float64), "pow", one_N[:1], 2.0)
    for method in METHODS:
        with pytest.raises(ValueError, match="sequence 1: nan"):
            weights(torch.tensor([0.0, math.nan]), method, group_N=torch.tensor([0, 0]))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, 1e-3]), min_size=1, max_size=8).filter(any),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=20),
)
def test_draw_walks_the_weights(values, numbers):
    edges = [math.fsum(values[: i + 1]) / math.fsum(values) for i in range(len(values))]
    drawn = draw(torch.tensor(values, dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64)).tolist()
    for u, i in zip(numbers, drawn, strict=True):
        assert values[i] > 0
        wanted = next(k for k, edge in enumerate(edges) if u < edge)
        assert i == wanted or min(abs(u - edge) for edge in edges) < 1e-6, "at an edge, rounding may decide"


def test_draw_has_the_frequencies_of_its_weights():
    values = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0], dtype=torch.float64)
    n = 40_000
    seed = torch.full((n,), seed_for(3, 7))
    drawn = draw(values, uniform(seed, torch.arange(n)))
    assert torch.equal(drawn, draw(values * 2.0**1021, uniform(seed, torch.arange(n)))), "the scale makes no difference"
    assert torch.equal(drawn[:100], draw(values, uniform(seed[:100], torch.arange(100)))), "nor how many are drawn"
    counts = Counter(drawn.tolist())
    assert counts.keys() == {1, 3, 4}
    for i, p in ((1, 0.125), (3, 0.25), (4, 0.625)):
        assert abs(counts[i] / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_draw_at_its_ends():
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    values = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0])
    assert draw(values, ends).tolist() == [1, 3]
    for _ in range(2000):
        values = torch.rand(5, generator=generator, dtype=torch.float64)
        values[[0, 4]] = 0.0
        assert draw(values, ends).tolist() == [1, 3]
    assert draw(torch.zeros(0), torch.zeros(0)).tolist() == []
    assert draw(values, torch.zeros(0)).dtype == torch.int64
    for nothing in (torch.zeros(0), torch.zeros(4)):
        with pytest.raises(ValueError, match="no weight is positive"):
            draw(nothing, torch.tensor([0.5]))
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite and >= 0"):
            draw(torch.tensor([1.0, wrong]), torch.tensor([0.5]))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12))
def test_buffer_against_a_list(steps, additions):
    buffer, everything, step = Buffer[int](steps), [], 0
    for jump, n in additions:
        step += jump
        items = list(range(len(everything), len(everything) + n))
        buffer.append(step, items)
        everything += [(step, item) for item in items]
        held = [(s, item) for s, item in everything if s > step - steps]
        assert buffer.entries() == held
        for age in range(steps + 1):
            assert buffer.aged(age) == [item for s, item in held if s == step - age]


def test_buffer_drops_steps_without_items_too():
    buffer = Buffer[str](3)
    assert buffer.entries() == [] and buffer.aged(0) == []
    buffer.append(4, ["a", "b"])
    buffer.append(5, [])
    buffer.append(6, ["c"])
    assert buffer.aged(2) == ["a", "b"]
    buffer.append(7, [])
    assert buffer.entries() == [(6, "c")], "step 5, which was empty, is the oldest"
    with pytest.raises(ValueError, match="at least 1 step"):
        Buffer(0)
