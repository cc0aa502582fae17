"""Advantages against verl 0.9.1's numbers and plain loops; law 2: order of samples and ranks do not change them."""

import inspect
import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos import ADVANTAGES, Samples, compute_advantages
from spmdrl.algos.credit import lagrangian
from spmdrl.algos.groups import power_of_two
from spmdrl.algos.rows import paper_of, settings_of
from spmdrl.algos.samples import last_sampled
from spmdrl.algos.tree import chain, discount

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "verl_0.9.1.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
CLOSE = {"rtol": 0, "atol": 1e-8}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}
GROUPED = sorted(name for name, row in ADVANTAGES.items() if row.compares)
VARIANTS = [
    *((name, {}) for name in ADVANTAGES),
    ("gae", {"gamma": 0.9, "lam": 0.8, "critic_lam": 1.0, "length_adaptive": 0.5}),
    ("gae", {"gamma": 0.9, "lam": 0.8, "whiten": False}),
    ("reinforce", {"baseline": "none"}),
    ("reinforce_plus_plus", {"gamma": 0.7}),
    ("gpg", {"count": "mixed", "f_norm": 2.0}),
    ("grpo_pass_k", {"std": False}),
    ("gdpo", {"weights": {"format": 0.25}}),
    ("gdpo", {"weights": {"score": 2.0, "right": -0.5}}),
    ("gigpo", {"gamma": 0.5, "step_weight": 0.3, "std": False}),
    ("per_token", {"gamma": 0.9, "whiten": True}),
    ("prime", {"gamma": 0.9, "process_coef": 2.0, "outcome_coef": 0.5}),
    ("turn_rloo", {"gamma": 0.7}),
    ("turn_gae", {"gamma": 0.9, "lam": 0.8, "critic_lam": 0.3}),
    ("turn_gae", {"lam": 0.5, "whiten": True}),
]
"""Estimators with settings: every one with its defaults, and settings that change the formula."""
variant = st.sampled_from(VARIANTS)


def fp64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ── batches as lists of sequences, so that references can be plain loops ─────────────────────────────────────────────


def sequences(seed: int, sizes: list[int], dense: bool = True) -> list[dict]:
    """Random sequences of len(sizes) groups: prompt tokens, gaps, some without a sampled token at all."""
    rng = torch.Generator().manual_seed(seed)

    def rand(n):
        return torch.rand(n, generator=rng, dtype=torch.float64)

    out = []
    for group, size in zip(torch.randperm(50, generator=rng).tolist(), sizes, strict=False):
        for _ in range(size):
            n = int(torch.randint(1, 12, (), generator=rng))
            mask, empty = rand(n) < 0.7, rand(1) < 0.1
            mask &= ~empty
            dist = torch.softmax(3 * torch.randn(n, 5, generator=rng, dtype=torch.float64), 1)
            turn = torch.cumsum(rand(n) < 0.3, 0)
            rewards = torch.where(mask, (4 * rand(n)).round() / 4 - 0.25, 0.0)
            if not dense:
                keep = mask.nonzero().flatten()[-1:]
                rewards = torch.zeros(n, dtype=torch.float64).index_copy_(0, keep, rewards[keep])
            out.append(
                {
                    "group": group,
                    "mask": mask,
                    "rewards": rewards,
                    "values": rand(n),
                    "baseline": float(rand(1)),
                    "parts": {"right": float(rand(1).round()), "format": float(rand(1))},
                    "logp": dist[:, 0].log(),
                    "collision": dist.square().sum(1),
                    "process": rand(n) - 0.5,
                    "ends": (rand(n) < 0.4).double(),
                    "turn": turn,
                    "state": (turn + group) % 3,
                }
            )
    return out


def samples(seqs: list[dict], *, rubbish: float | None = None, **changes) -> Samples:
    """Packs sequences; rubbish: value of the floats outside the mask."""

    def pack(name, dtype):
        return torch.cat([s[name] for s in seqs]).to(dtype) if seqs else torch.zeros(0, dtype=dtype)

    tokens = {name: pack(name, torch.float64) for name in ("rewards", "values", "logp", "collision", "process", "ends")}
    known = ("turn", "state", "parent") if seqs and "parent" in seqs[0] else ("turn", "state")
    tokens |= {name: pack(name, torch.int64) for name in known}
    mask = pack("mask", torch.bool)
    for name in ("values", "logp", "collision", "process", "ends") if rubbish is not None else ():
        tokens[name] = torch.where(mask, tokens[name], rubbish)
    lengths = torch.tensor([len(s["mask"]) for s in seqs], dtype=torch.int64)
    fields = {
        "mask": mask,
        "seq": torch.repeat_interleave(torch.arange(len(seqs)), lengths),
        "group": torch.tensor([s["group"] for s in seqs], dtype=torch.int64),
        "baseline": fp64([s["baseline"] for s in seqs]),
        "parts": {k: fp64([s["parts"][k] for s in seqs]) for k in ("right", "format")},
    }
    return Samples(**{**tokens, **fields, **changes})


def outcomes(reward: list[float], group: list[int]) -> Samples:
    """Makes one token in each sequence."""
    n = len(reward)
    return Samples(fp64(reward), torch.ones(n, dtype=torch.bool), torch.arange(n), torch.tensor(group))


def split(x_T: torch.Tensor, x: Samples) -> list[torch.Tensor]:
    return [x_T[x.seq == i] for i in range(x.sequences)]


# ── golden vectors ───────────────────────────────────────────────────────────────────────────────────────────────────

ENTRIES = {
    "gae_g0.99_l0.95": ("gae", "dense", {"gamma": 0.99, "lam": 0.95}),
    "grpo": ("grpo", "rewards", {}),
    "dr_grpo_nostd": ("dr_grpo", "rewards", {}),
    "rloo": ("rloo", "rewards", {}),
    "opo": ("opo", "rewards", {}),
    "remax": ("remax", "rewards", {}),
    "reinforce_plus_plus_g1": ("reinforce_plus_plus", "dense", {"gamma": 1.0}),
    "reinforce_plus_plus_g0.9": ("reinforce_plus_plus", "dense", {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "rewards", {}),
    "gpg": ("gpg", "rewards", {}),
}


@case
@pytest.mark.parametrize("entry", ENTRIES)
def test_parity_verl_advantages(case, entry):
    name, rewards, chosen = ENTRIES[entry]
    assert case["advantages"].keys() == ENTRIES.keys()
    inputs, mask = case["inputs"], fp64(case["inputs"]["mask"])
    extra = {"values": fp64(inputs["values"]), "baseline": fp64(inputs["baseline"])}
    got = compute_advantages(name, rewards=fp64(inputs[rewards]), mask=mask, group=inputs["group"], **extra, **chosen)
    for x, kind in zip(got, ("advantages", "returns"), strict=True):
        expected = fp64(case["advantages"][entry][kind])
        torch.testing.assert_close(x[mask.bool()], expected[mask.bool()], **CLOSE)
        assert (x[~mask.bool()] == 0).all()


# ── plain loops ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ref_whiten(rows: list[list[float]]) -> list[list[float]]:
    flat = [v for row in rows for v in row]
    mean = sum(flat) / len(flat) if flat else 0.0
    var = sum((v - mean) ** 2 for v in flat) / max(1, len(flat) - 1)
    return [[(v - mean) / math.sqrt(var + 1e-8) for v in row] for row in rows]


def ref_normalise(values: list[float], eps: float = 1e-6, std: bool = True) -> list[float]:
    """Normalises one group."""
    if len(values) == 1:
        return [values[0] / (1 + eps)] if std else values
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if std else 1 - eps
    return [(v - mean) / (deviation + eps) for v in values]


def sampled(seqs: list[dict], name: str) -> list[list[float]]:
    return [s[name][s["mask"]].tolist() for s in seqs]


def groups_of(seqs: list[dict]) -> list[list[int]]:
    return [[i for i, s in enumerate(seqs) if s["group"] == g] for g in {s["group"]: 0 for s in seqs}]


def within(seqs: list[dict], values: list[float], f) -> list[float]:
    """Applies f to the values of each group and returns them in order."""
    out = [0.0] * len(seqs)
    for members in groups_of(seqs):
        for i, v in zip(members, f([values[i] for i in members]), strict=True):
            out[i] = v
    return out


def ref_gae(seqs, gamma=1.0, lam=1.0, length_adaptive=None, critic_lam=None, whiten=True):
    advantages, returns = [], []
    for rewards, values in zip(sampled(seqs, "rewards"), sampled(seqs, "values"), strict=True):
        policy = lam
        if length_adaptive is not None and rewards:
            policy = max(0.0, 1 - 1 / (length_adaptive * len(rewards)))
        critic = lam if critic_lam is None else critic_lam
        rows = []
        for k in (policy, critic):
            row = []
            for t in range(len(rewards)):
                total = 0.0
                for u in range(t, len(rewards)):
                    after = values[u + 1] if u + 1 < len(rewards) else 0.0
                    total += (gamma * k) ** (u - t) * (rewards[u] + gamma * after - values[u])
                row.append(total)
            rows.append(row)
        advantages.append(rows[0])
        returns.append([a + v for a, v in zip(rows[1], values, strict=True)])
    return ref_whiten(advantages) if whiten else advantages, returns


def ref_to_go(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]


def ref_per_token(seqs, gamma=0.0, whiten=False):
    returns = [ref_to_go(r, gamma) for r in sampled(seqs, "rewards")]
    return ref_whiten(returns) if whiten else returns, returns


def ref_reinforce_plus_plus(seqs, gamma=1.0):
    return ref_per_token(seqs, gamma, True)


def ref_remax(seqs):
    returns = [ref_to_go(r, 1.0) for r in sampled(seqs, "rewards")]
    return [[v - s["baseline"] for v in r] for r, s in zip(returns, seqs, strict=True)], returns


def ref_outcome(f):
    """Makes an estimator that gives each sequence one number."""

    def reference(seqs, **chosen):
        values = f(seqs, [sum(r) for r in sampled(seqs, "rewards")], **chosen)
        rows = [[v] * int(s["mask"].sum()) for v, s in zip(values, seqs, strict=True)]
        return rows, rows

    return reference


def ref_minus_mean(values):
    return ref_normalise(values, std=False)


def ref_rloo(seqs, scores):
    def one(values):
        if len(values) == 1:
            return values
        return [v - (sum(values[:i]) + sum(values[i + 1 :])) / (len(values) - 1) for i, v in enumerate(values)]

    return within(seqs, scores, one)


def ref_reinforce(seqs, scores, baseline="batch"):
    mean = sum(scores) / max(1, len(scores)) if baseline == "batch" else 0.0
    return [v - mean for v in scores]


def ref_opo(seqs, scores):
    out = []
    for s, score in zip(seqs, scores, strict=True):
        others = [(int(o["mask"].sum()), v) for o, v in zip(seqs, scores, strict=True) if o["group"] == s["group"]]
        weight = sum(n for n, _ in others)
        out.append(score - (sum(n * v for n, v in others) / max(1, weight) if len(others) > 1 else 0.0))
    return out


def ref_gpg(seqs, scores, f_norm=1.0, count="rewarded"):
    if count == "rewarded":
        counted = sum(v != 0 for v in scores)
    else:
        counted = sum(len(g) for g in groups_of(seqs) if len({scores[i] for i in g}) > 1)
    alpha = len(scores) / max(1, counted)
    return [alpha * v / f_norm for v in within(seqs, scores, ref_minus_mean)]


def ref_pass_k(seqs, scores, eps=1e-6, std=True):
    def one(values):
        if len(values) == 1:
            return [0.0]
        first, second = sorted(values, reverse=True)[:2]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + eps if std else 1.0
        return [(first - second) / deviation if v == first else 0.0 for v in values]

    return within(seqs, scores, one)


def ref_gdpo(seqs, weights=None, eps=1e-6):
    total = [0.0] * len(seqs)
    for name in ("score", "right", "format"):
        parts = [s["parts"] | {"score": float(s["rewards"][s["mask"]].sum())} for s in seqs]
        values = [p[name] if s["mask"].any() else 0.0 for p, s in zip(parts, seqs, strict=True)]
        for i, v in enumerate(within(seqs, values, lambda x: ref_normalise(x, eps))):
            total[i] += (1.0 if weights is None else weights.get(name, 0.0)) * v
    rows = ref_whiten([[v] * int(s["mask"].sum()) for v, s in zip(total, seqs, strict=True)])
    return rows, rows


def ref_rf_baseline(seqs):
    rows, _ = ref_outcome(lambda seqs, scores: within(seqs, scores, ref_minus_mean))(seqs)
    return ref_whiten(rows), ref_whiten(rows)


def ref_win_rate(seqs, scores):
    def one(values):
        out = []
        for i, v in enumerate(values):
            others = values[:i] + values[i + 1 :]
            wins = sum(1.0 if o < v else 0.5 if o == v else 0.0 for o in others)
            out.append(wins / len(others) - 0.5 if others else 0.0)
        return out

    return within(seqs, scores, one)


def ref_optimal_token_baseline(seqs, eps=1e-8):
    returns = [ref_to_go(r, 1.0) for r in sampled(seqs, "rewards")]
    energy = []
    for logp, collision in zip(sampled(seqs, "logp"), sampled(seqs, "collision"), strict=True):
        step = [1 - 2 * math.exp(lp) + c for lp, c in zip(logp, collision, strict=True)]
        energy.append([sum(step[: t + 1]) for t in range(len(step))])
    advantages = []
    for s, row in zip(seqs, returns, strict=True):
        out = []
        for t, value in enumerate(row):
            there = [i for i, o in enumerate(seqs) if o["group"] == s["group"] and len(returns[i]) > t]
            weight = sum(energy[i][t] for i in there) + eps
            baseline = sum(energy[i][t] * returns[i][t] for i in there) / weight
            out.append(value - baseline if len(there) > 1 else value)
        advantages.append(out)
    return advantages, returns


def ref_turns(s: dict, default: bool) -> list[dict]:
    """Turns of a sequence: indices among its sampled tokens, reward, state (None: its own)."""
    turns, last, k = [], None, 0
    for t in range(len(s["mask"])):
        if not s["mask"][t]:
            last = None if default else last
            continue
        name = "run" if default else int(s["turn"][t])
        if name != last:
            state = (0 if not turns else None) if default else int(s["state"][t])
            turns.append({"tokens": [], "reward": 0.0, "state": state})
        last = name
        turns[-1]["tokens"].append(k)
        turns[-1]["reward"] += float(s["rewards"][t])
        k += 1
    return turns


def ref_gigpo(seqs, gamma=0.95, step_weight=1.0, std=True, eps=1e-6, default=False):
    scores = [sum(r) for r in sampled(seqs, "rewards")]
    episode = within(seqs, scores, lambda v: ref_normalise(v, eps, std))
    rows, shared = [[v] * int(s["mask"].sum()) for v, s in zip(episode, seqs, strict=True)], {}
    for i, s in enumerate(seqs):
        turns = ref_turns(s, default)
        returns = ref_to_go([t["reward"] for t in turns], gamma)
        for j, (turn, value) in enumerate(zip(turns, returns, strict=True)):
            key = (s["group"], turn["state"], None if turn["state"] is not None else (i, j))
            shared.setdefault(key, []).append((value, i, turn["tokens"]))
    for met in shared.values():
        if len(met) > 1:
            for value, (_, i, tokens) in zip(ref_normalise([v for v, _, _ in met], eps, std), met, strict=True):
                for t in tokens:
                    rows[i][t] += step_weight * value
    return rows, rows


def ref_turn_rloo(seqs, gamma=1.0):
    """Turns of a sequence are a chain, so that those at one depth have the same place in it."""
    turns = [ref_turns(s, False) for s in seqs]
    returns = [ref_to_go([t["reward"] for t in own], gamma) for own in turns]
    advantages, rows = [], []
    for i, s in enumerate(seqs):
        advantages.append([0.0] * int(s["mask"].sum()))
        rows.append([0.0] * int(s["mask"].sum()))
        for k, turn in enumerate(turns[i]):
            others = [r[k] for j, r in enumerate(returns) if j != i and seqs[j]["group"] == s["group"] and len(r) > k]
            for t in turn["tokens"]:
                rows[i][t] = returns[i][k]
                advantages[i][t] = returns[i][k] - (sum(others) / len(others) if others else 0.0)
    return advantages, rows


def ref_turn_gae(seqs, gamma=1.0, lam=1.0, critic_lam=None, whiten=False):
    advantages, rows = [], []
    for s, values in zip(seqs, sampled(seqs, "values"), strict=True):
        turns = ref_turns(s, False)
        value = [values[t["tokens"][0]] for t in turns] + [0.0]
        advantages.append([0.0] * len(values))
        rows.append([0.0] * len(values))
        for out, k, more in ((advantages, lam, 0), (rows, lam if critic_lam is None else critic_lam, 1)):
            later = 0.0
            for n in reversed(range(len(turns))):
                later = turns[n]["reward"] + gamma * value[n + 1] - value[n] + gamma * k * later
                for t in turns[n]["tokens"]:
                    out[-1][t] = later + more * value[n]
    return ref_whiten(advantages) if whiten else advantages, rows


def ref_prime(seqs, gamma=1.0, process_coef=1.0, outcome_coef=1.0):
    scores = [sum(r) for r in sampled(seqs, "rewards")]
    process = sampled(seqs, "process")
    mean = [sum(p) / max(1, len(p)) for p in process]
    outcome, rows = ref_rloo(seqs, scores), []
    for i, s in enumerate(seqs):
        others = [mean[j] for j, o in enumerate(seqs) if o["group"] == s["group"] and j != i]
        baseline = sum(others) / len(others) if others else 0.0
        go = ref_to_go([p - baseline for p in process[i]], gamma)
        rows.append([process_coef * v + outcome_coef * outcome[i] for v in go])
    return rows, rows


def ref_grpo_process(seqs, eps=1e-6):
    rows = [[0.0] * int(s["mask"].sum()) for s in seqs]
    for members in groups_of(seqs):
        steps = []
        for i in members:
            scores, ends = sampled(seqs, "process")[i], sampled(seqs, "ends")[i]
            steps += [(i, t, score) for t, (score, end) in enumerate(zip(scores, ends, strict=True)) if end]
        normal = ref_normalise([score for _, _, score in steps], eps) if steps else []
        for (i, end, _), value in zip(steps, normal, strict=True):
            for t in range(end + 1):
                rows[i][t] += value
    return rows, rows


REFERENCES = {
    "gae": ref_gae,
    "grpo": ref_outcome(lambda seqs, scores: within(seqs, scores, ref_normalise)),
    "dr_grpo": ref_outcome(lambda seqs, scores: within(seqs, scores, ref_minus_mean)),
    "rloo": ref_outcome(ref_rloo),
    "reinforce": ref_outcome(ref_reinforce),
    "remax": ref_remax,
    "reinforce_plus_plus": ref_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": ref_rf_baseline,
    "opo": ref_outcome(ref_opo),
    "gpg": ref_outcome(ref_gpg),
    "grpo_pass_k": ref_outcome(ref_pass_k),
    "gdpo": ref_gdpo,
    "optimal_token_baseline": ref_optimal_token_baseline,
    "gigpo": ref_gigpo,
    "win_rate": ref_outcome(ref_win_rate),
    "per_token": ref_per_token,
    "prime": ref_prime,
    "grpo_process": ref_grpo_process,
    "turn_rloo": ref_turn_rloo,
    "turn_gae": ref_turn_gae,
}
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


def assert_rows(seqs: list[dict], got, rows, **close) -> None:
    """Checks that got [T] is `rows` at the sampled tokens and 0 elsewhere."""
    mask = torch.cat([s["mask"] for s in seqs])
    torch.testing.assert_close(got[mask], fp64([v for row in rows for v in row]), **close)
    assert got.dtype == torch.float64 and (got[~mask] == 0).all()


@settings(max_examples=150, deadline=None)
@given(seed=seeds, sizes=sizes, which=variant)
def test_advantages_match_plain_loops(seed, sizes, which):
    name, chosen = which
    seqs = sequences(seed, sizes)
    advantages, returns = ADVANTAGES[name].function(samples(seqs, rubbish=math.nan), **chosen)
    # Dividing what rounding leaves of a zero spread by eps is not what is tested here.
    close = {"rtol": 1e-9, "atol": 1e-9}
    for got, rows in zip((advantages, returns), REFERENCES[name](seqs, **chosen), strict=True):
        assert_rows(seqs, got, rows, **close)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, sizes=sizes)
def test_gigpo_without_turns_and_states(seed, sizes):
    seqs = sequences(seed, sizes)
    got, _ = ADVANTAGES["gigpo"].function(samples(seqs, turn=None, state=None))
    assert_rows(seqs, got, ref_gigpo(seqs, default=True)[0], rtol=1e-9, atol=1e-9)


def test_advantages_by_hand():
    reward, group = [1.0, 3.0, 2.0, 5.0, 0.5, 0.5, 8.0], [7, 7, 7, 7, 40, 40, 3]
    std = math.sqrt(sum((r - 2.75) ** 2 for r in (1, 3, 2, 5)) / 3) + 1e-6
    expected = {
        "grpo": [-1.75 / std, 0.25 / std, -0.75 / std, 2.25 / std, 0, 0, 8 / (1 + 1e-6)],
        "dr_grpo": [-1.75, 0.25, -0.75, 2.25, 0, 0, 8],
        "rloo": [1 - 10 / 3, 3 - 8 / 3, 2 - 9 / 3, 5 - 6 / 3, 0, 0, 8],
        "reinforce": [r - 20 / 7 for r in reward],
        "grpo_pass_k": [0, 0, 0, 2 / std, 0, 0, 0],
        "win_rate": [-0.5, 1 / 6, -1 / 6, 0.5, 0, 0, 0],
        "opo": [-1.75, 0.25, -0.75, 2.25, 0, 0, 8],
        "per_token": reward,
    }
    for name, values in expected.items():
        got, returns = ADVANTAGES[name].function(outcomes(reward, group))
        torch.testing.assert_close(got, fp64(values), rtol=0, atol=1e-12, msg=name)
        assert torch.equal(got, returns)
    got, _ = ADVANTAGES["gpg"].function(outcomes(reward, group), count="mixed")
    torch.testing.assert_close(got, fp64([7 / 4 * v for v in expected["dr_grpo"]]))


def test_process_supervision_by_hand():
    """Steps of a group are normalised together, whatever their number in a sample; a later token than the last is 0."""
    x = Samples(
        rewards=fp64([0, 0, 0, 0, 1, 0]),
        mask=torch.ones(6, dtype=torch.bool),
        seq=torch.tensor([0, 0, 0, 0, 0, 1]),
        group=torch.tensor([4, 4]),
        process=fp64([0, 0.2, 0, 0.8, 0, 0.5]),
        ends=fp64([0, 1, 0, 1, 0, 1]),
    )
    a, b = -0.3 / (0.3 + 1e-6), 0.3 / (0.3 + 1e-6)
    got, returns = ADVANTAGES["grpo_process"].function(x)
    torch.testing.assert_close(got, fp64([a + b, a + b, b, b, 0, 0]), rtol=0, atol=1e-12)
    assert torch.equal(got, returns)


def test_gae_skips_what_a_tool_wrote():
    with_gap = Samples(
        rewards=fp64([0.5, 0, 0, 2.0]),
        mask=torch.tensor([True, False, False, True]),
        seq=torch.zeros(4, dtype=torch.int64),
        group=torch.tensor([0]),
        values=fp64([0.3, math.nan, 9.0, 0.7]),
    )
    advantages, returns = ADVANTAGES["gae"].function(with_gap, gamma=0.9, lam=0.5, whiten=False)
    last = 2.0 - 0.7
    first = 0.5 + 0.9 * 0.7 - 0.3 + 0.9 * 0.5 * last
    torch.testing.assert_close(advantages, fp64([first, 0, 0, last]))
    torch.testing.assert_close(returns, fp64([first + 0.3, 0, 0, 2.0]))


def test_pass_k_of_two_best_and_of_one_sample_is_zero():
    for std in (True, False):
        got, _ = ADVANTAGES["grpo_pass_k"].function(
            outcomes([1.0, 1.0, 0.0, 4.0, 2.0, 2.0], [0, 0, 0, 1, 2, 2]), std=std
        )
        assert got.tolist() == [0.0] * 6


def test_discount_both_ways():
    seq = torch.tensor([0, 0, 2, 2, 2])
    after, decay = chain(seq), fp64([0.5, 9.0, 2.0])[seq]
    assert after.tolist() == [-1, 0, -1, 2, 3]
    assert discount(fp64([1, 2, 1, 1, 1]), after, decay).tolist() == [2, 2, 7, 3, 1]
    assert discount(fp64([1, 2, 1, 1, 1]), after, decay, forward=True).tolist() == [1, 2.5, 1, 3, 7]


def test_lagrangian():
    got = lagrangian(fp64([1.0, -1.0]), fp64([2.0, 0.5]), 3.0)
    torch.testing.assert_close(got, fp64([(1 - 6) / 4, (-1 - 1.5) / 4]))
    with pytest.raises(ValueError, match="multiplier"):
        lagrangian(fp64([1.0]), fp64([1.0]), -1.0)
    with pytest.raises(ValueError, match="one shape"):
        lagrangian(fp64([1.0]), fp64([1.0, 2.0]), 1.0)


# ── law 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(seed=seeds, sizes=sizes, which=variant)
def test_layout_advantages_do_not_see_the_order_of_samples(seed, sizes, which):
    name, chosen = which
    seqs = sequences(seed, sizes)
    order = torch.randperm(len(seqs), generator=torch.Generator().manual_seed(seed)).tolist()
    x, shuffled = samples(seqs), samples([seqs[i] for i in order])
    for a, b in zip(ADVANTAGES[name].function(x, **chosen), ADVANTAGES[name].function(shuffled, **chosen), strict=True):
        a, b = split(a, x), split(b, shuffled)
        for place, i in enumerate(order):
            if name == "optimal_token_baseline":  # sums tokens of many sequences in order of the samples
                torch.testing.assert_close(b[place], a[i], **EXACT)
            else:
                assert torch.equal(b[place], a[i])  # bit for bit


class Ranks:
    """Ranks as threads whose gather sorts the rows of all by the global number of their sequence."""

    def __init__(self, owned: list[list[int]]):
        self.owned, self.calls = owned, [0] * len(owned)
        self.rows: list = [None] * len(owned)
        self.barrier = threading.Barrier(len(owned), timeout=20)

    def gather(self, rank: int):
        def everyone(seq_n, columns_nK):
            self.calls[rank] += 1
            self.rows[rank] = (torch.tensor(self.owned[rank], dtype=torch.int64)[seq_n], columns_nK)
            self.barrier.wait()
            number_N, rows_NK = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
            start = sum(len(number) for number, _ in self.rows[:rank])
            self.barrier.wait()  # nobody overwrites what others still read
            order = torch.argsort(number_N, stable=True)
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order))
            return rows_NK[order], places[start : start + len(seq_n)]

        return everyone

    def run(self, name: str, seqs: list[dict], chosen: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (advantages, returns) of each sequence, in global order."""
        out: list = [None] * len(seqs)
        errors = []

        def work(rank):
            try:
                x = samples([seqs[i] for i in self.owned[rank]], gather=self.gather(rank))
                parts = [split(part, x) for part in ADVANTAGES[name].function(x, **chosen)]
                for i, *both in zip(self.owned[rank], *parts, strict=True):
                    out[i] = both
            except BaseException as e:
                errors.append(e)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.owned))]
        [t.start() for t in threads]
        [t.join() for t in threads]
        if errors:
            raise errors[0]
        return out


@settings(max_examples=100, deadline=None)
@given(seed=seeds, sizes=sizes, which=variant, ranks=st.integers(2, 3))
def test_layout_ranks_do_not_change_advantages(seed, sizes, which, ranks):
    name, chosen = which
    seqs = sequences(seed, sizes)
    rng = torch.Generator().manual_seed(seed)
    place = torch.randint(0, ranks, (len(seqs),), generator=rng).tolist()  # some ranks may have nothing
    world = Ranks([[i for i, r in enumerate(place) if r == rank] for rank in range(ranks)])
    got, x = world.run(name, seqs, chosen), samples(seqs)
    for k, whole in enumerate(ADVANTAGES[name].function(x, **chosen)):
        for a, b in zip((both[k] for both in got), split(whole, x), strict=True):
            torch.testing.assert_close(a, b, **EXACT)
    assert len(set(world.calls)) == 1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_lockstep_the_number_of_gathers_does_not_depend_on_data(name):
    def calls(seqs, **changes):
        count = 0

        def gather(seq_n, columns_nK):
            nonlocal count
            count += 1
            return columns_nK, torch.arange(len(seq_n))

        ADVANTAGES[name].function(samples(seqs, gather=gather, **changes))
        return count

    usual = calls(sequences(0, [3, 2]))
    seqs = sequences(1, [3, 1])
    masked = [s | {"mask": s["mask"] & False, "rewards": s["rewards"] * 0} for s in seqs]
    assert [calls([]), calls(masked), calls(seqs, parts={}), calls(seqs, turn=None, state=None)] == [usual] * 4
    assert usual <= 3


# ── properties ───────────────────────────────────────────────────────────────────────────────────────────────────────

shiftable = ("grpo", "dr_grpo", "rloo", "opo", "reinforce", "grpo_pass_k", "win_rate", "reinforce_plus_plus_baseline")


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    name=st.sampled_from(shiftable),
    c=st.floats(-9, 9),
)
def test_a_constant_in_every_reward_changes_nothing(seed, sizes, name, c):
    seqs = [s for s in sequences(seed, sizes, dense=False)]
    for s in seqs:
        s["mask"][0] = True  # a sequence without a sampled token has no reward to shift
    shifted = []
    for s in seqs:
        rewards = s["rewards"].clone()
        rewards[s["mask"].nonzero().flatten()[-1]] += c
        shifted.append(s | {"rewards": rewards})
    before, after = (ADVANTAGES[name].function(samples(v))[0] for v in (seqs, shifted))
    # Rounding of reward + c may turn equal rewards of several tokens into all but equal ones: not with one reward each.
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, sizes=sizes, power=st.integers(-30, 30), which=variant)
def test_scale_of_the_rewards(seed, sizes, power, which):
    """Rewards times 2^k give advantages times 2^k, or the same ones where a spread divides (with eps 0)."""
    name, chosen = which
    scale = 2.0**power
    divides = name in ("grpo", "win_rate") or (name in ("grpo_pass_k", "gigpo") and chosen.get("std", True))
    if name in WHITENED or chosen.get("whiten") or name in ("remax", "prime", "grpo_process"):
        return
    seqs = sequences(seed, [n + 1 for n in sizes])
    scaled = [s | {"rewards": s["rewards"] * scale, "values": s["values"] * scale} for s in seqs]
    chosen = chosen | ({"eps": 0.0} if "eps" in settings_of(ADVANTAGES[name].function) else {})
    before, after = (ADVANTAGES[name].function(samples(v), **chosen)[0] for v in (seqs, scaled))
    torch.testing.assert_close(after, before if divides else before * scale, rtol=1e-12, atol=1e-12 * max(1.0, scale))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_singletons_and_equal_rewards(name):
    """Equal rewards give exactly 0; a group of one keeps its reward where that is documented."""
    third = 1 / 3  # thirds do not sum exactly
    equal = outcomes([third] * 3 + [0.1] * 7, [0] * 3 + [1] * 7)
    if "process" in ADVANTAGES[name].needs:
        marks = {"process": torch.full((10,), third).double(), "ends": torch.ones(10).double()}
        equal = replace(equal, **marks)
    if name in GROUPED and name not in ("optimal_token_baseline", "prime", "reinforce_plus_plus_baseline", "gdpo"):
        assert (ADVANTAGES[name].function(equal)[0] == 0).all()
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        assert (ADVANTAGES[name].function(equal)[0] == 0).all()  # whitened zeros
    alone = {"grpo": 5 / (1 + 1e-6), "dr_grpo": 5, "rloo": 5, "opo": 5, "gpg": 5, "gigpo": 5 / (1 + 1e-6)}
    alone |= {"grpo_pass_k": 0, "win_rate": 0, "reinforce": 0, "per_token": 5, "turn_rloo": 5}
    alone |= {"reinforce_plus_plus": 0, "reinforce_plus_plus_baseline": 0, "gdpo": 0}
    if name in alone:
        torch.testing.assert_close(ADVANTAGES[name].function(outcomes([5.0], [3]))[0], fp64([alone[name]]))


def test_whitening_of_equal_values_is_exactly_zero():
    x = samples(sequences(3, [4, 3]))
    assert (x.whiten(torch.full_like(x.rewards, 0.1)) == 0).all()
    white = x.whiten(x.values)[x.mask]
    assert abs(white.mean()) < 1e-12 and abs(white.var() - 1) < 1e-6


@settings(max_examples=60, deadline=None)
@given(seed=seeds, sizes=sizes, which=variant, power=st.sampled_from([-320, -300, -160, -8, 8, 30, 155, 200, 280]))
def test_huge_and_tiny_rewards_give_no_nan(seed, sizes, which, power):
    name, chosen = which
    seqs = sequences(seed, sizes)
    for s in seqs:
        s["parts"] = {k: v * 10.0**power for k, v in s["parts"].items()}
        s |= {k: s[k] * 10.0**power for k in ("rewards", "values", "process")}
        s["baseline"] *= 10.0**power
    for got in ADVANTAGES[name].function(samples(seqs), **chosen):
        assert got.isfinite().all()


def test_a_huge_spread_is_still_normalised():
    got, _ = ADVANTAGES["grpo"].function(outcomes([0.0, 2e200], [0, 0]))
    torch.testing.assert_close(got, fp64([-(0.5**0.5), 0.5**0.5]))
    got, _ = ADVANTAGES["reinforce_plus_plus"].function(outcomes([0.0, 2e200], [0, 0]))
    torch.testing.assert_close(got, fp64([-(0.5**0.5), 0.5**0.5]))
    torch.testing.assert_close(power_of_two(fp64([0.0, 1.0, -3.0, 5e-324, 1e290])).log2() % 1, torch.zeros(5).double())


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_nothing_sampled_and_nothing_at_all(name):
    seqs = [s | {"mask": s["mask"] & False, "rewards": s["rewards"] * 0} for s in sequences(5, [2, 3])]
    for x in (samples(seqs, rubbish=math.nan), samples([])):
        for got in ADVANTAGES[name].function(x):
            assert got.shape == x.mask.shape and (got == 0).all()
    # One masked row among others: zeros there, and a sample of reward 0 for the rest of its group.
    mixed = [seqs[0] | {"group": 0}, *(s | {"group": 0} for s in sequences(6, [3]))]
    x = samples(mixed, rubbish=math.nan)
    for got in ADVANTAGES[name].function(x):
        assert got.isfinite().all() and (split(got, x)[0] == 0).all()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_advantages_refuse_what_is_broken():
    with pytest.raises(ValueError, match=r"rewards of sequences \[1\]"):
        outcomes([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match=r"rewards of sequences \[0, 2\]"):
        outcomes([math.inf, 0.0, -math.inf], [0, 0, 0])
    x = samples(sequences(0, [3, 2]))
    bad = {
        "values": (x.values[1:], "values must be"),
        "baseline": (x.values, "baseline must be"),
        "mask": (x.mask.double(), "bool"),
        "seq": (x.seq.flip(0), "ascend"),
        "group": (x.group.double(), "integers"),
        "state": (x.seq + 2**53, "2\\^53"),
        "parent": (x.values, "integers"),
    }
    for field, (value, message) in bad.items():
        with pytest.raises(ValueError, match=message):
            replace(x, **{field: value})
    for name, row in ADVANTAGES.items():
        for field in row.needs:
            with pytest.raises(ValueError, match=field):
                ADVANTAGES[name].function(replace(x, **{field: None}))
            broken = getattr(x, field).clone()
            broken[x.mask.nonzero()[0] if len(broken) == len(x.mask) else 0] = math.nan
            with pytest.raises(ValueError, match=rf"{field} of sequences \["):
                ADVANTAGES[name].function(replace(x, **{field: broken}))
    with pytest.raises(ValueError, match="right"):
        ADVANTAGES["gdpo"].function(replace(x, parts={"right": torch.full_like(x.baseline, math.nan)}))
    with pytest.raises(ValueError, match="part of the reward is named 'score'"):
        ADVANTAGES["gdpo"].function(replace(x, parts={"score": x.baseline}))
    with pytest.raises(ValueError, match="must not decrease"):
        ADVANTAGES["gigpo"].function(replace(x, turn=-torch.arange(len(x.mask))))
    with pytest.raises(ValueError, match="same state"):
        ADVANTAGES["gigpo"].function(replace(x, turn=torch.zeros_like(x.seq), state=torch.arange(len(x.mask))))


def test_rows_say_what_is_true():
    bare = {"values": None, "baseline": None, "logp": None, "collision": None, "process": None}
    x = samples(sequences(0, [3, 2, 1]))
    for name, row in ADVANTAGES.items():
        estimator, needed = row.function, {k: getattr(x, k) for k in row.needs}
        advantages, _ = estimator(replace(x, **{**bare, **needed}))
        regrouped, _ = estimator(replace(x, group=torch.zeros_like(x.group)))
        assert torch.equal(advantages, regrouped) == (not row.compares), name
        kinds = {p.kind for p in list(inspect.signature(estimator).parameters.values())[1:]}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY}, name
        assert paper_of(estimator).startswith("https://"), name


@pytest.mark.parametrize(
    "name, chosen, message",
    [
        ("grpo", {"eps": -1.0}, "eps"),
        ("gae", {"gamma": 1.1}, "gamma"),
        ("gae", {"lam": math.nan}, "lam"),
        ("gae", {"critic_lam": -0.1}, "critic_lam"),
        ("gae", {"length_adaptive": 0.0}, "length_adaptive"),
        ("reinforce", {"baseline": "group"}, "baseline"),
        ("gpg", {"f_norm": 0.0}, "f_norm"),
        ("gpg", {"count": "all"}, "mixed"),
        ("gdpo", {"weights": {"colour": 1.0}}, "colour"),
        ("gdpo", {"weights": [1.0]}, "one number for each part of the reward, .*, and has 1;"),
    ],
)
def test_settings_out_of_range(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGES[name].function(samples(sequences(0, [3, 2])), **chosen)


def test_last_sampled():
    mask = torch.tensor([True, False, True, False, False, True])
    assert last_sampled(mask, torch.tensor([0, 0, 0, 1, 1, 3]), 4).tolist() == [2, -1, -1, 5]


# ── the notebook ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(seed=seeds, sizes=sizes, which=variant)
def test_notebook_is_the_packed_estimator(seed, sizes, which):
    name, chosen = which
    seqs = sequences(seed, sizes)
    shape = len(seqs), max(len(s["mask"]) for s in seqs)

    def padded(key, fill):
        x = torch.full(shape, fill, dtype=seqs[0][key].dtype)
        for row, s in zip(x, seqs, strict=True):
            row[: len(s["mask"])] = s[key]
        return x

    tokens = {key: padded(key, math.nan) for key in ("values", "logp", "collision", "process", "ends")}
    tokens |= {"turn": padded("turn", 0), "state": padded("state", 0)}
    if name != "reinforce":  # whose `baseline` is a setting
        tokens["baseline"] = [s["baseline"] for s in seqs]
    mask = padded("mask", False)
    got = compute_advantages(
        name,
        rewards=torch.where(mask, padded("rewards", math.nan), math.nan),  # outside the mask anything
        mask=mask.long().tolist(),
        group=np.array([f"prompt {s['group']}" for s in seqs]),
        parts={k: [s["parts"][k] for s in seqs] for k in ("right", "format")},
        **tokens,
        **chosen,
    )
    x = samples(seqs)
    for a, b in zip(got, ADVANTAGES[name].function(x, **chosen), strict=True):
        assert a.shape == shape and (a[~mask] == 0).all()
        torch.testing.assert_close(a[mask], b[x.mask], **EXACT)


def test_notebook_places_outcomes_and_keeps_the_dtype():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    a, returns = compute_advantages("remax", rewards=[1.0, 2.0, math.nan], mask=mask, baseline=0.5)
    torch.testing.assert_close(a, fp64([[0, 0.5, 0.5, 0], [1.5, 0, 1.5, 1.5], [0, 0, 0, 0]]))
    torch.testing.assert_close(returns, fp64([[0, 1, 1, 0], [2, 0, 2, 2], [0, 0, 0, 0]]))
    for rewards, dtype in [
        (torch.tensor([1, 2, 3]), torch.float64),
        (torch.tensor([True, False, True]), torch.float64),
        (torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), torch.bfloat16),
        (torch.tensor([1.0, 2.0, 3.0]).requires_grad_(), torch.float32),
        (np.array([1.0, 2.0, 3.0], dtype=np.float16), torch.float16),
    ]:
        for group in (["a", "a", "b"], torch.tensor([4, 4, 0]), np.array([1, 1, 2]), ("x", "x", 3)):
            a, returns = compute_advantages("dr_grpo", rewards=rewards, mask=mask, group=group)
            assert a.dtype == returns.dtype == dtype and not a.requires_grad
            difference = 1.0 if rewards.dtype == torch.bool else -1.0
            assert a[:, 2].tolist() == [difference / 2, -difference / 2, 0]
            assert a.data_ptr() != returns.data_ptr()
    parts = {"a": [1.0, 0.0, 0.0], "b": torch.rand(3, 4)}
    gdpo = {"name": "gdpo", "rewards": [0, 1, 0], "mask": mask, "group": [0, 0, 0], "parts": parts}
    a, _ = compute_advantages(**gdpo, weights=[2, 1])
    assert a.abs().sum() > 0
    torch.testing.assert_close(a, compute_advantages(**gdpo, weights={"a": 2, "b": 1, "score": 0})[0])


def test_notebook_gdpo_learns_the_score_of_a_reward_with_parts():
    """By hand, two samples normalise to +-sqrt(1/2); the right one wins by its score, the tidy one by its format."""
    rewards, mask, half = [1.0, 0.0, 0.0, 0.0], torch.ones(4, 1), 2**-0.5
    gdpo = {"name": "gdpo", "rewards": rewards, "mask": mask, "group": [0, 0, 1, 1]}
    parts = {"format": [0.0, 1.0, 1.0, 0.0]}

    def whitened(raw):
        raw = fp64(raw)
        return ((raw - raw.mean()) / (raw.var() + 1e-8).sqrt())[:, None]

    for weights, raw in [
        (None, [0.0, 0.0, half, -half]),
        ({"score": 1}, [half, -half, 0.0, 0.0]),
        ({"format": 1}, [-half, half, half, -half]),
        ({"score": 3, "format": 1}, [2 * half, -2 * half, half, -half]),
    ]:
        a, _ = compute_advantages(**gdpo, parts=parts, weights=weights)
        torch.testing.assert_close(a, whitened(raw), rtol=1e-5, atol=1e-5)


def test_notebook_says_what_is_wrong():
    rewards, mask, group = torch.rand(2, 3), torch.ones(2, 3), [0, 0]
    good = {"rewards": rewards, "mask": mask, "group": group}
    for name, changes, message in [
        ("gpro", {}, "did you mean 'grpo'.*choose one of gae"),
        ("grpo", {"epsilon": 1e-6}, "grpo takes no 'epsilon'.*did you mean 'eps'.*its settings: eps;"),
        ("grpo", {"gamma": 1.0}, "takes no 'gamma'"),
        ("grpo", {"group": None}, "pass group"),
        ("grpo", {"group": [0]}, "must be \\[2\\], one number or string for each row"),
        ("grpo", {"rewards": torch.rand(3)}, "rewards must be"),
        ("grpo", {"rewards": torch.tensor([1.0, math.nan])}, r"rewards of sequences \[1\]"),
        ("grpo", {"rewards": "high"}, "rewards must be a tensor"),
        ("grpo", {"mask": torch.full((2, 3), 0.5)}, "0 and 1"),
        ("grpo", {"mask": torch.ones(2)}, "mask must be"),
        ("gae", {}, "needs `values`"),
        ("gae", {"values": torch.rand(2)}, "values must be"),
        ("remax", {"baseline": torch.rand(3)}, "baseline must be"),
        ("gdpo", {"parts": [1.0, 2.0]}, "parts must be a dict"),
        ("gdpo", {"parts": {"a": [1.0]}}, r"parts\['a'\] must be"),
        ("gigpo", {"turn": torch.rand(2, 3)}, "turn must hold integers"),
    ]:
        with pytest.raises(ValueError, match=message):
            compute_advantages(name, **(good | changes))
    for name in ADVANTAGES.keys() - set(GROUPED):
        inputs = {} if name == "reinforce" else {"baseline": 0.0, "values": rewards}
        compute_advantages(name, rewards=rewards, mask=mask, **inputs)
