"""Tokens that KL-Cov and Clip-Cov hold back: the formula over the whole batch, however it lies on ranks (law 2)."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos.covariance_losses import Selecting
from spmdrl.algos.losses import LOSSES
from spmdrl.algos.rows import settings_of

NAMES = pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.select])
LOOSE = {"kl_cov": {"cov_ratio": 0.1}, "clip_cov": {"cov_ratio": 0.1, "cov_low": 0.0, "cov_high": 2.0}}


def whole(seed: int, lengths: list[int], ties: bool = False) -> Selecting:
    rng = torch.Generator().manual_seed(seed)
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    columns = [torch.randn(len(seq), generator=rng, dtype=torch.float64) for _ in range(3)]
    draw = torch.rand(len(seq), generator=rng, dtype=torch.float64)
    mask = torch.rand(len(seq), generator=rng) < 0.8
    if ties:  # many equal covariances and draws
        columns, draw = [c.round() for c in columns], (draw * 4).round() / 4
    columns = [torch.where(mask, c, torch.nan) for c in columns]
    return Selecting(columns[0] - 1, columns[1] * 0.1 + columns[0] - 1, columns[2], mask, seq, len(lengths), draw)


def written_out(name: str, x: Selecting, cov_ratio, cov_low=1.0, cov_high=5.0, clip_low=0.2, clip_high=0.2) -> set[int]:
    """Computes the selected tokens in plain Python."""
    tokens = [t for t in range(len(x.mask)) if x.mask[t]]
    adv, logp = ({t: v[t].item() for t in tokens} for v in (x.advantages, x.logp))
    mean_adv, mean_logp = (sum(v.values()) / max(1, len(tokens)) for v in (adv, logp))
    cov = {t: (adv[t] - mean_adv) * (logp[t] - mean_logp) for t in tokens}
    most = max(1, int(cov_ratio * len(tokens)))
    if name == "kl_cov":
        return set(sorted(tokens, key=lambda t: (-cov[t], t))[:most])
    ratio = {t: (x.logp[t] - x.old_logp[t]).exp().item() for t in tokens}
    bounded = {t: min(max(ratio[t], 1 - clip_low), 1 + clip_high) for t in tokens}
    free = [t for t in tokens if cov_low < cov[t] < cov_high and adv[t] * ratio[t] <= adv[t] * bounded[t]]
    return set(sorted(free, key=lambda t: (x.draw[t].item(), t))[:most])


def on_ranks(name: str, x: Selecting, rank_of: list[int], ranks: int, **options) -> tuple[torch.Tensor, list[int]]:
    """Selects with sequence s on rank rank_of[s], as threads that meet in `gather`; returns also each one's calls."""
    barrier, slots, calls = threading.Barrier(ranks), [None] * ranks, [0] * ranks
    selected, errors = torch.zeros(len(x.mask), dtype=torch.bool), []

    def work(rank: int) -> None:
        # A rank may hold its sequences in any order.
        mine = [s for s in range(x.sequences) if rank_of[s] == rank][:: -1 if rank % 2 else 1]
        index = torch.cat([torch.nonzero(x.seq == s).flatten() for s in mine] or [torch.zeros(0, dtype=torch.int64)])
        renumbered = {s: i for i, s in enumerate(mine)}
        seq = torch.tensor([renumbered[int(s)] for s in x.seq[index]], dtype=torch.int64)

        def gather(seq_n, columns_nK):
            calls[rank] += 1
            assert bool((seq_n.diff() >= 0).all())
            slots[rank] = (torch.tensor([mine[i] for i in seq_n], dtype=torch.int64), columns_nK)
            barrier.wait()
            keys = torch.cat([keys for keys, _ in slots])
            order = torch.argsort(keys, stable=True)
            place = torch.argsort(order)
            start = sum(len(keys) for keys, _ in slots[:rank])
            rows = torch.cat([rows for _, rows in slots])[order]
            barrier.wait()
            return rows, place[start : start + len(seq_n)]

        columns = (v[index] for v in (x.logp, x.old_logp, x.advantages, x.mask))
        try:
            selected[index] = LOSSES[name].select(Selecting(*columns, seq, len(mine), x.draw[index], gather), **options)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return selected, calls


@NAMES
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10))
def test_selection_is_the_formula_over_the_whole_batch(name, seed, lengths):
    x = whole(seed, lengths)
    selected = LOSSES[name].select(x, **LOOSE[name])
    expected = written_out(name, x, **LOOSE[name]) if x.mask.any() else set()
    assert set(torch.nonzero(selected).flatten().tolist()) == expected


@NAMES
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=10),
    ranks=st.integers(1, 4),
    ties=st.booleans(),
    cov_ratio=st.sampled_from([0.0, 1e-4, 0.1, 0.5, 1.0]),
)
def test_layout_selection_spread_over_ranks_is_the_single_one(name, seed, lengths, ranks, ties, cov_ratio):
    x = whole(seed, lengths, ties)
    options = LOOSE[name] | {"cov_ratio": cov_ratio}
    rank_of = torch.randint(ranks, (len(lengths),), generator=torch.Generator().manual_seed(seed)).tolist()
    selected, calls = on_ranks(name, x, rank_of, ranks, **options)  # some ranks have nothing
    assert torch.equal(selected, LOSSES[name].select(x, **options))
    assert calls == [2] * ranks


@NAMES
def test_equal_candidates_go_by_sample_and_token(name):
    seq, ones = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), torch.ones(8, dtype=torch.float64)
    mask = torch.tensor([False, True, True, True, False, True, True, True])
    x = Selecting(-ones, -ones, ones, mask, seq, 3, ones / 2)  # every covariance is 0, every draw 1/2
    wide = {"cov_ratio": 0.7} | ({"cov_low": -1.0} if name == "clip_cov" else {})
    for rank_of in ([0, 0, 0], [1, 0, 1], [2, 1, 0]):
        selected, _ = on_ranks(name, x, rank_of, 3, **wide)
        assert torch.nonzero(selected).flatten().tolist() == [1, 2, 3, 5]  # int(0.7 * 6)


def test_clip_cov_takes_no_token_that_ppo_has_clipped():
    logp, old = torch.tensor([[-1.0, -2.0, -1.0, -2.0], [-1.5, -2.0, -1.0, -2.5]], dtype=torch.float64)
    adv, mask = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    draw = torch.zeros(4, dtype=torch.float64)
    x = Selecting(logp, old, adv, mask, torch.zeros(4, dtype=torch.int64), 1, draw)
    # Covariances are all 1. Token 0 has gone up by more than 20 % with A > 0; token 3 as well, but with A < 0.
    selected = LOSSES["clip_cov"].select(x, cov_ratio=1.0, cov_low=0.5)
    assert selected.tolist() == [False, True, True, True]
    assert LOSSES["clip_cov"].select(x, cov_ratio=1.0).tolist() == [False] * 4  # 1 is not above 1
    assert LOSSES["clip_cov"].select(x, cov_ratio=1.0, cov_low=0.5, clip_high=1.0).tolist() == [True] * 4


@NAMES
def test_selections_take_the_settings_of_their_loss_and_say_what_is_wrong(name):
    assert settings_of(LOSSES[name].select) == settings_of(LOSSES[name].function)
    x = whole(0, [3, 2])
    with pytest.raises(ValueError, match="cov_ratio"):
        LOSSES[name].select(x, cov_ratio=-0.1)
    if name == "clip_cov":
        with pytest.raises(ValueError, match="draw"):
            LOSSES[name].select(Selecting(x.logp, x.old_logp, x.advantages, x.mask, x.seq, 2))
        with pytest.raises(ValueError, match="cov_low"):
            LOSSES[name].select(x, cov_low=5.0, cov_high=1.0)
    empty = whole(0, [])
    assert LOSSES[name].select(empty).shape == (0,)
    assert not LOSSES[name].select(Selecting(**vars(x) | {"mask": x.mask & False})).any()
