"""Credit over turns: expected gradients of small decision processes by enumeration, in float64, and slow references.

Two processes: two turns in a row, where the environment may end the episode after the first; and an episode that forks
into two branches. A group is two samples. The expectation of an estimator's gradient, over all pairs of episodes, is
compared with the gradient of the expected reward. docs/credit.md holds the same classes of estimators.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algos import ADVANTAGES, Samples, compute_advantages
from spmdrl.algos.aggregate import AGGREGATIONS, count_totals, token_weights
from spmdrl.algos.tree import Turns, depths, tokens_follow
from spmdrl.config.load import from_command_line
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.pack import from_episodes
from spmdrl.rl.compose import compose
from spmdrl.rl.score import shape
from spmdrl.spmd.peers import Peers
from tests.unit.test_advantages import Ranks, fp64, groups_of, ref_normalise, samples, sequences

EXACT = 1e-10
SEEN = 1e-3
"""A bias of this size is one."""

# ── decision processes ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class Token:
    """One token of an episode: sampled in a context, or observed (no context)."""

    turn: int
    parent: int
    context: str = ""
    action: int = 0
    reward: float = 0.0
    ends: bool = False
    """The turn's last sampled token."""


@dataclass(frozen=True)
class Played:
    """An episode that the process may take."""

    tokens: tuple[Token, ...]
    chance: float
    """Probability of the environment's answers."""

    @property
    def reward(self) -> float:
        return sum(t.reward for t in self.tokens)


def number(*key: Any) -> float:
    """A number in [-1, 1] that belongs to a key."""
    return math.sin(sum((i + 1) * 12.9898 * (ord(c) + 1) for i, c in enumerate(repr(key)))) * 43758.5453 % 2 - 1


def chances(*key: Any, of: int) -> list[float]:
    weights = [math.exp(1.5 * number(*key, i)) for i in range(of)]
    return [w / sum(weights) for w in weights]


def two_turns() -> list[Played]:
    """A first turn of two tokens; then an end, or one of two states with a turn of one token. A tool's word between."""
    played = []
    for a, b in product(range(2), range(2)):
        for place, chance in enumerate(chances("next", a, b, of=3)):
            first = (Token(0, -1, "s", a), Token(0, -1, f"s{a}", b, number("r0", a, b, place), True))
            if not place:  # ends here, at times without any reward, which some estimators tell apart
                last = replace(first[1], reward=b * (first[1].reward + 1))
                played.append(Played((first[0], last), chance))
                continue
            for c in range(2):
                final = 2 + number("r1", place, c) + 2 * number("final", place, c)
                second = Token(1, 0, f"state {place}", c, final, True)
                played.append(Played((*first, Token(1, 0), second), chance))
    return played


def forked(shared: float = 0.0) -> list[Played]:
    """A turn, then two branches whose states the environment draws; the first may go on. Paths stand one by one.

    shared: weight of a final reward that depends on what both branches did.
    """
    played = []
    for a, left, right in product(range(2), range(2), range(2)):
        chance = chances("left", a, of=2)[left] * chances("right", a, of=2)[right]
        for b, c, d in product(range(2), range(2), range(2) if left else [None]):
            joint = shared * number("joint", a, b, c, left, right, d)
            # The final reward falls on the turn that was made last: 3, or 2 without it.
            after = number("final", "deep", d) if left else number("final", right, c)
            ends = [number("r1", left, b), number("r2", right, c), number("r3", b, d)]
            ends[2 if left else 1] += after + joint
            tokens = [Token(0, -1, "root", a, number("r0", a), True), Token(1, 0)]
            tokens.append(Token(1, 0, f"left {left}", b, ends[0], True))
            if d is not None:
                tokens += [Token(3, 1), Token(3, 1, f"deep {b}", d, ends[2], True)]
            # The second path begins with the tokens of the first turn again, outside the mask.
            tokens += [Token(0, -1), Token(2, 0), Token(2, 0, f"right {right} of {left}", c, ends[1], True)]
            played.append(Played(tuple(tokens), chance))
    return played


class Process:
    """A process with a tabular softmax policy, and what estimators need to know of its episodes."""

    def __init__(self, played: list[Played]):
        self.played, self.kept = played, {}
        choices: dict[str, int] = {}
        for t in (t for p in played for t in p.tokens if t.context):
            choices[t.context] = max(choices.get(t.context, 0), t.action + 1)
        self.logits = [
            fp64([number("logit", context, i) for i in range(n)]).requires_grad_() for context, n in choices.items()
        ]
        self.place: dict[tuple[str, int], int] = {}
        for context, n in choices.items():
            self.place |= {(context, i): len(self.place) + i for i in range(n)}
        self.states = {context: i for i, context in enumerate(choices)}
        logp = [self.table()[[self.place[t.context, t.action] for t in p.tokens if t.context]].sum() for p in played]
        self.probability = fp64([p.chance for p in played]) * torch.stack(logp).exp()

    def table(self) -> torch.Tensor:
        """log p of every action in every context, end to end, differentiable in the logits."""
        return torch.cat([torch.log_softmax(x, 0) for x in self.logits])

    def gradient(self, of: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(of, self.logits, retain_graph=True))

    @property
    def exact(self) -> torch.Tensor:
        """The gradient of the expected reward."""
        return self.gradient((self.probability * fp64([p.reward for p in self.played])).sum())

    def values(self, kind: str) -> dict[str, float]:
        """Value of each context: any number, or the expected sum of the rewards that follow."""
        if kind == "any":
            return {context: 3 * number("value", context) for context in self.states}
        total, weight = dict.fromkeys(self.states, 0.0), dict.fromkeys(self.states, 0.0)
        for p, probability in zip(self.played, self.probability.tolist(), strict=True):
            for i, t in enumerate(p.tokens):
                if t.context:
                    total[t.context] += probability * to_go(p.tokens, i)
                    weight[t.context] += probability
        return {context: total[context] / weight[context] for context in total}

    def greedy(self) -> list[tuple[float, float]]:
        """Chance and reward of each episode in which the policy takes its likeliest actions."""
        best = {c: int(x.argmax()) for c, x in zip(self.states, self.logits, strict=True)}
        kept = [p for p in self.played if all(best[t.context] == t.action for t in p.tokens if t.context)]
        assert abs(sum(p.chance for p in kept) - 1) < EXACT
        return [(p.chance, p.reward) for p in kept]

    def columns(self, values: str) -> dict[str, torch.Tensor]:
        """Columns of all episodes end to end, and the place of each token in the table, 0 where it was observed."""
        rows = [(t, i) for i, p in enumerate(self.played) for t in p.tokens]
        value, table = self.values(values), self.table().detach()
        squares = {
            c: float(torch.softmax(x.detach(), 0).square().sum()) for c, x in zip(self.states, self.logits, strict=True)
        }
        first = {(i, t.turn): self.states[t.context] for t, i in reversed(rows) if t.context}

        def column(pick: Callable[[Token], float], rest: float = math.nan) -> torch.Tensor:
            return fp64([pick(t) if t.context else rest for t, _ in rows])

        return {
            "rewards": column(lambda t: t.reward, 0.0),
            "mask": torch.tensor([bool(t.context) for t, _ in rows]),
            "values": column(lambda t: value[t.context]),
            "logp": column(lambda t: float(table[self.place[t.context, t.action]])),
            "collision": column(lambda t: squares[t.context]),
            "process": column(lambda t: t.reward),
            "ends": column(lambda t: float(t.ends)),
            "turn": torch.tensor([t.turn for t, _ in rows]),
            "parent": torch.tensor([t.parent for t, _ in rows]),
            "state": torch.tensor([first[i, t.turn] for t, i in rows]),
            "place": torch.tensor([self.place.get((t.context, t.action), 0) for t, _ in rows]),
        }

    def samples(self, groups: list[tuple[int, int]], values: str) -> tuple[Samples, torch.Tensor]:
        """Packs groups of episodes, given by their numbers; also the place of each token in the table."""
        lengths = torch.tensor([len(p.tokens) for p in self.played])
        ends, numbers = lengths.cumsum(0), torch.tensor(groups).flatten()
        rows = torch.cat([torch.arange(ends[i] - lengths[i], ends[i]) for i in numbers.tolist()])
        if values not in self.kept:
            self.kept[values] = self.columns(values)
        columns = {name: column[rows] for name, column in self.kept[values].items()}
        place_T = columns.pop("place")
        x = Samples(
            seq=torch.repeat_interleave(torch.arange(len(numbers)), lengths[numbers]),
            group=torch.arange(len(groups)).repeat_interleave(2),
            baseline=torch.zeros(len(numbers), dtype=torch.float64),
            parts={"early": fp64([self.played[i].tokens[0].reward for i in numbers.tolist()])},
            **columns,
        )
        return x, place_T

    def expected(
        self, estimator: str | Callable, chosen: dict, values: str = "any", mode: str = "seq-mean-token-sum"
    ) -> torch.Tensor:
        """The expected gradient of an estimator over all pairs of episodes, its loss aggregated as `mode` says."""
        pairs = list(product(range(len(self.played)), repeat=2))
        function = ADVANTAGES[estimator].function if isinstance(estimator, str) else estimator
        chance = self.probability.detach()
        # Estimators that look beyond a group see each pair as a step of its own.
        apart = estimator in WHOLE_STEP or chosen.get("whiten")
        scale = torch.zeros(len(self.place), dtype=torch.float64)
        for step in [[pair] for pair in pairs] if apart else [pairs]:
            x, place_T = self.samples(step, values)
            weight_T = pair_weights(mode, x) * fp64([chance[i] * chance[j] for i, j in step])[x.group[x.seq]]
            for share, reward in self.greedy() if estimator == "remax" else [(1.0, 0.0)]:
                advantages_T, _ = function(replace(x, baseline=torch.full_like(x.lengths, reward)), **chosen)
                scale.index_add_(0, place_T, torch.where(x.mask, share * weight_T * advantages_T, 0.0))
        return self.gradient((scale * self.table()).sum())


def pair_weights(mode: str, x: Samples) -> torch.Tensor:
    """Weight of each token, as the loss of a step that has the token's pair alone gives it."""
    sizes = torch.bincount(x.group[x.seq]).tolist()
    pairs = zip(x.mask.split(sizes), (x.seq % 2).split(sizes), strict=True)
    return torch.cat([token_weights(mode, mask, seq, count_totals(mask, seq), 4.0) for mask, seq in pairs])


def to_go(tokens: tuple[Token, ...], at: int) -> float:
    """Sum of the rewards from a token on: of the rest of its turn, and of all turns below it."""
    below = {tokens[at].turn}
    for turn, parent in sorted({(t.turn, t.parent) for t in tokens}):
        below |= {turn} if parent in below else set()
    later = [t for i, t in enumerate(tokens) if t.turn in below and (t.turn != tokens[at].turn or i >= at)]
    return sum(t.reward for t in later)


PROCESSES = {"two turns": two_turns, "forked": forked, "shared": lambda: forked(2.0)}


@cache
def process(name: str) -> Process:
    return Process(PROCESSES[name]())


# ── which estimators are unbiased ────────────────────────────────────────────

WHOLE_STEP = {"reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gpg"}
"""Estimators that look at all groups of a step."""
UNBIASED, SCALED, BIASED = (
    tuple(name for name, row in ADVANTAGES.items() if row.gradient == kind) for kind in ("exact", "scaled", "biased")
)
CHOSEN: dict[str, dict] = {
    "gae": {"whiten": False},
    "per_token": {"gamma": 1.0},
    "gdpo": {"weights": {"score": 1.0}},
    "prime": {"outcome_coef": 0.0},
}
"""Settings with which an estimator is enumerated. The process rewards are the rewards themselves."""
METHODS = Path(__file__).resolve().parents[2] / "docs" / "credit.md"


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got - want).abs().max().item()


def test_the_processes_are_what_they_should_be():
    for name in PROCESSES:
        p = process(name)
        assert abs(p.probability.sum().item() - 1) < 1e-12 and p.exact.abs().max() > 0.03, name
    assert {len(p.tokens) for p in process("two turns").played} == {2, 4}
    assert {len({t.turn for t in p.tokens}) for p in process("forked").played} == {3, 4}


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("where", ["two turns", "forked"])
def test_expected_gradient_is_exact(where, name):
    p = process(where)
    assert distance(p.expected(name, CHOSEN.get(name, {})), p.exact) < EXACT


@pytest.mark.parametrize(("name", "chosen"), [("reinforce", {"baseline": "none"}), ("prime", {"process_coef": 0.0})])
def test_expected_gradient_of_parts_that_are_exact(name, chosen):
    p = process("two turns")
    assert distance(p.expected(name, chosen), p.exact) < EXACT


@pytest.mark.parametrize(
    ("where", "name"), [("two turns", "dr_grpo"), ("forked", "dr_grpo"), ("two turns", "reinforce")]
)
def test_a_baseline_with_the_own_reward_in_it_scales_the_gradient(where, name):
    p = process(where)
    got = p.expected(name, CHOSEN.get(name, {}))
    assert distance(got, p.exact / 2) < EXACT < SEEN < distance(got, p.exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_these_estimators_are_biased(name):
    """Not by a factor alone: the nearest multiple of the exact gradient is another one."""
    p = process("two turns")
    got, exact = p.expected(name, CHOSEN.get(name, {})), p.exact
    nearest = exact * (got @ exact) / (exact @ exact)
    assert distance(got, exact) > SEEN and distance(got, nearest) > SEEN


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
@pytest.mark.parametrize("where", ["two turns", "forked"])
def test_lambda_below_one_is_exact_only_with_exact_values(where, name):
    p, chosen = process(where), {"lam": 0.3, "whiten": False}
    assert distance(p.expected(name, chosen, values="exact"), p.exact) < EXACT
    assert distance(p.expected(name, chosen, values="any"), p.exact) > SEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("turn_rloo", {"gamma": 0.5}),
        ("turn_gae", {"gamma": 0.5}),
        ("turn_gae", {"whiten": True}),
        ("gae", {"whiten": True}),
        ("per_token", {"gamma": 0.0}),
    ],
)
def test_discounts_and_whitening_are_biased(name, chosen):
    p = process("two turns")
    assert distance(p.expected(name, chosen), p.exact) > SEEN


def test_only_a_sum_over_tokens_is_exact():
    """A mean over tokens divides by a length that the actions have chosen."""
    p = process("two turns")
    for mode in AGGREGATIONS:
        got = p.expected("turn_rloo", {}, mode=mode)
        scale = 4.0 if mode == "seq-mean-token-sum-norm" else 1.0
        assert (distance(scale * got, p.exact) < EXACT) == mode.startswith("seq-mean-token-sum"), mode


@pytest.mark.slow
def test_a_reward_that_two_branches_share_is_missed_by_credit_of_descendants():
    """The earlier branch is not paid for it. Outcome estimators, which pay every token for everything, stay exact."""
    p = process("shared")
    assert distance(p.expected("rloo", {}), p.exact) < EXACT
    for name in ("turn_rloo", "turn_gae", "remax", "per_token", "gae"):
        assert distance(p.expected(name, CHOSEN.get(name, {})), p.exact) > SEEN, name


@pytest.mark.slow
def test_branches_that_follow_each_other_are_exact_whatever_they_share():
    """With the turn before in time as parent, each turn answers for all that comes after it."""
    in_time = [replace(p, tokens=tuple(replace(t, parent=t.turn - 1) for t in p.tokens)) for p in forked(2.0)]
    p = Process(in_time)
    for name in UNBIASED:
        assert distance(p.expected(name, CHOSEN.get(name, {})), p.exact) < EXACT, name


def test_the_mean_of_all_turns_of_an_index_is_a_biased_baseline():
    """With the own return in the mean, the factor depends on how many others get so far; leaving it out is exact."""

    def own_in_the_mean(x: Samples):
        advantages, returns = ADVANTAGES["turn_rloo"].function(x)
        # Of a pair both get there, or the one that does is compared with itself.
        return torch.where(advantages == returns, 0.0, advantages / 2), returns

    p = process("two turns")
    got = p.expected(own_in_the_mean, {})
    nearest = p.exact * (got @ p.exact) / (p.exact @ p.exact)
    assert distance(got, p.exact) > SEEN and distance(got, nearest) > SEEN


def test_every_estimator_has_its_class_in_the_docs():
    chapter = re.split(r"^## ", METHODS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [c for c in chapter if c.startswith("Unbiased or not")]
    shown = {}
    for kind, names in re.findall(r"^- \*(\w+)\*,(.*?)(?=\n- \*|\n<!--)", text, re.MULTILINE | re.DOTALL):
        shown |= dict.fromkeys(re.findall(r"\[`(\w+)`\]", names), kind)
    assert shown == {name: row.gradient for name, row in ADVANTAGES.items()}


# ── trees against recursion ──────────────────────────────────────────────────

TREES = [
    ("turn_rloo", {}),
    ("turn_rloo", {"gamma": 0.6}),
    ("turn_gae", {"gamma": 0.9, "lam": 0.7, "critic_lam": 0.2}),
    ("gigpo", {"gamma": 0.8, "step_weight": 0.5}),
    ("gigpo", {"std": False}),
    ("gae", {"gamma": 0.9, "lam": 0.7, "critic_lam": 0.2, "whiten": False}),
    ("per_token", {"gamma": 0.8}),
    ("remax", {}),
    ("optimal_token_baseline", {}),
]
tree_seeds, tree_sizes = st.integers(0, 2**31), st.lists(st.integers(1, 4), min_size=1, max_size=3)


def trees(seed: int, sizes: list[int]) -> list[dict]:
    """Sequences whose turns form trees: several first turns, turns without a sampled token, turns in any order."""
    rng = torch.Generator().manual_seed(seed)
    seqs = sequences(seed, sizes)
    for s in seqs:
        n = len(s["mask"])
        turns = int(torch.randint(1, 6, (), generator=rng))
        parents = [int(torch.randint(-1, k, (), generator=rng)) if k else -1 for k in range(turns)]
        states = torch.randint(0, 3, (turns,), generator=rng)
        # Tokens of a turn stand together, those of several paths in the order of the paths.
        order = torch.randperm(turns, generator=rng)
        s["turn"] = order[torch.randint(0, turns, (n,), generator=rng).sort().values]
        there = set(s["turn"].tolist())
        for k in range(turns):  # parents that do not appear stand for those before them
            while parents[k] >= 0 and parents[k] not in there:
                parents[k] = parents[parents[k]]
        s["parent"], s["state"] = torch.tensor(parents)[s["turn"]], states[s["turn"]]
    return seqs


class Tree:
    """The sampled tokens of a sequence, numbered, with those that follow each, and the same of its turns."""

    def __init__(self, s: dict):
        self.places = s["mask"].nonzero().flatten().tolist()
        of = [int(s["turn"][i]) for i in self.places]
        self.turns = {k: [t for t, name in enumerate(of) if name == k] for k in sorted(set(of))}
        self.rewards = s["rewards"][s["mask"]].tolist()
        up = dict(zip(s["turn"].tolist(), s["parent"].tolist(), strict=True))

        def parent(turn: int) -> int:
            above = up[turn]
            while above >= 0 and above not in self.turns:
                above = up[above]
            return above

        self.parent = {k: parent(k) for k in self.turns}
        self.after = {
            tokens[0]: self.turns[self.parent[k]][-1] if self.parent[k] >= 0 else -1 for k, tokens in self.turns.items()
        }
        self.after |= {b: a for tokens in self.turns.values() for a, b in zip(tokens, tokens[1:], strict=False)}

    def go(self, rows: dict[int, float], after: dict[int, int], decay: float, at: int) -> float:
        """x + decay * the same of every row that follows."""
        return rows[at] + decay * sum(self.go(rows, after, decay, b) for b in rows if after[b] == at)

    def tokens_go(self, rows: list[float], decay: float) -> list[float]:
        return [self.go(dict(enumerate(rows)), self.after, decay, t) for t in range(len(rows))]

    def turns_go(self, rows: dict[int, float], decay: float) -> dict[int, float]:
        return {k: self.go(rows, self.parent, decay, k) for k in rows}

    def errors(self, rows: dict[int, float], values: dict[int, float], after: dict[int, int], gamma: float) -> dict:
        return {a: r + gamma * sum(values[b] for b in rows if after[b] == a) - values[a] for a, r in rows.items()}

    def turn_rewards(self) -> dict[int, float]:
        return {k: sum(self.rewards[t] for t in tokens) for k, tokens in self.turns.items()}

    def depth(self, after: dict[int, int], at: int) -> int:
        return 0 if after[at] < 0 else 1 + self.depth(after, after[at])

    def at_tokens(self, rows: dict[int, float]) -> list[float]:
        out = [0.0] * len(self.places)
        for k, tokens in self.turns.items():
            for t in tokens:
                out[t] = rows[k]
        return out


def ref_turn_rloo(seqs, made, gamma=1.0):
    returns = [m.turns_go(m.turn_rewards(), gamma) for m in made]
    rows = []
    for i, m in enumerate(made):
        own = {}
        for k, value in returns[i].items():
            depth = m.depth(m.parent, k)
            there = [
                other
                for j, o in enumerate(made)
                for turn, other in returns[j].items()
                if j != i and seqs[j]["group"] == seqs[i]["group"] and o.depth(o.parent, turn) == depth
            ]
            own[k] = value - (sum(there) / len(there) if there else 0.0)
        rows.append(m.at_tokens(own))
    return rows, [m.at_tokens(r) for m, r in zip(made, returns, strict=True)]


def ref_lambda(m: Tree, rows, values, after, gamma, lams) -> list[dict[int, float]]:
    errors = m.errors(rows, values, after, gamma)
    return [{k: m.go(errors, after, gamma * lam, k) for k in rows} for lam in lams]


def ref_turn_gae(seqs, made, gamma, lam, critic_lam):
    advantages, returns = [], []
    for s, m in zip(seqs, made, strict=True):
        values = {k: float(s["values"][m.places[tokens[0]]]) for k, tokens in m.turns.items()}
        policy, critic = ref_lambda(m, m.turn_rewards(), values, m.parent, gamma, (lam, critic_lam))
        advantages.append(m.at_tokens(policy))
        returns.append(m.at_tokens({k: critic[k] + values[k] for k in critic}))
    return advantages, returns


def ref_gae(seqs, made, gamma, lam, critic_lam, whiten):
    advantages, returns = [], []
    for s, m in zip(seqs, made, strict=True):
        values = dict(enumerate(s["values"][s["mask"]].tolist()))
        policy, critic = ref_lambda(m, dict(enumerate(m.rewards)), values, m.after, gamma, (lam, critic_lam))
        advantages.append([policy[t] for t in values])
        returns.append([critic[t] + values[t] for t in values])
    return advantages, returns


def ref_gigpo(seqs, made, gamma=0.95, step_weight=1.0, std=True, eps=1e-6):
    scores, rows = [sum(m.rewards) for m in made], [[0.0] * len(m.places) for m in made]
    for members in groups_of(seqs):
        for i, value in zip(members, ref_normalise([scores[i] for i in members], eps, std), strict=True):
            rows[i] = [value] * len(rows[i])
        met: dict[int, list] = {}
        for i in members:
            for k, value in made[i].turns_go(made[i].turn_rewards(), gamma).items():
                state = int(seqs[i]["state"][made[i].places[made[i].turns[k][0]]])
                met.setdefault(state, []).append((value, i, made[i].turns[k]))
        for turns in (turns for turns in met.values() if len(turns) > 1):
            for value, (_, i, tokens) in zip(ref_normalise([v for v, *_ in turns], eps, std), turns, strict=True):
                for t in tokens:
                    rows[i][t] += step_weight * value
    return rows, rows


def ref_per_token(seqs, made, gamma):
    rows = [m.tokens_go(m.rewards, gamma) for m in made]
    return rows, rows


def ref_remax(seqs, made):
    returns = [m.tokens_go(m.rewards, 1.0) for m in made]
    return [[v - s["baseline"] for v in row] for s, row in zip(seqs, returns, strict=True)], returns


def ref_optimal_token_baseline(seqs, made, eps=1e-8):
    returns, cells, energies = [m.tokens_go(m.rewards, 1.0) for m in made], {}, []
    for i, (s, m) in enumerate(zip(seqs, made, strict=True)):
        step = (1 - 2 * s["logp"].exp() + s["collision"])[s["mask"]].tolist()

        def spent(t, m=m, step=step):
            return step[t] + (spent(m.after[t], m, step) if m.after[t] >= 0 else 0.0)

        energies.append([spent(t) for t in range(len(step))])
        for t in range(len(step)):
            cells.setdefault((s["group"], m.depth(m.after, t)), []).append((i, t))
    rows = [list(row) for row in returns]
    for cell in (cell for cell in cells.values() if len(cell) > 1):
        weight = sum(energies[i][t] for i, t in cell) + eps
        baseline = sum(energies[i][t] * returns[i][t] for i, t in cell) / weight
        for i, t in cell:
            rows[i][t] -= baseline
    return rows, returns


TREE_REFERENCES = {
    "turn_rloo": ref_turn_rloo,
    "turn_gae": ref_turn_gae,
    "gigpo": ref_gigpo,
    "gae": ref_gae,
    "per_token": ref_per_token,
    "remax": ref_remax,
    "optimal_token_baseline": ref_optimal_token_baseline,
}


@pytest.mark.parametrize(("name", "chosen"), TREES)
@settings(max_examples=25, deadline=None)
@given(seed=tree_seeds, sizes=tree_sizes)
def test_credit_over_trees_matches_recursion(name, chosen, seed, sizes):
    seqs = trees(seed, sizes)
    x = samples(seqs, rubbish=math.nan)
    want = TREE_REFERENCES[name](seqs, [Tree(s) for s in seqs], **chosen)
    for got_T, rows in zip(ADVANTAGES[name].function(x, **chosen), want, strict=True):
        torch.testing.assert_close(got_T[x.mask], fp64([v for row in rows for v in row]), rtol=1e-9, atol=1e-9)
        assert got_T.shape == x.mask.shape and (got_T[~x.mask] == 0).all(), "a tool's tokens have no advantage"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen"), [*TREES, ("turn_gae", {"whiten": True}), ("prime", {}), ("grpo_process", {})]
)
@settings(max_examples=15, deadline=None)
@given(seed=tree_seeds, sizes=tree_sizes, ranks=st.integers(2, 3))
def test_layout_ranks_do_not_change_credit_over_trees(name, chosen, seed, sizes, ranks):
    seqs = trees(seed, sizes)
    place = torch.randint(0, ranks, (len(seqs),), generator=torch.Generator().manual_seed(seed)).tolist()
    world = Ranks([[i for i, r in enumerate(place) if r == rank] for rank in range(ranks)])
    got, x = world.run(name, seqs, chosen), samples(seqs)
    for k, whole_T in enumerate(ADVANTAGES[name].function(x, **chosen)):
        for i, both in enumerate(got):
            torch.testing.assert_close(both[k], whole_T[x.seq == i], rtol=1e-12, atol=1e-12)
    assert len(set(world.calls)) == 1


@settings(max_examples=20, deadline=None)
@given(seed=tree_seeds, sizes=tree_sizes)
def test_a_chain_is_the_tree_in_which_every_turn_follows_the_one_before(seed, sizes):
    seqs = sequences(seed, sizes)
    for s in seqs:
        s["turn"] = torch.unique(s["turn"], return_inverse=True)[1]
        s["parent"] = s["turn"] - 1
    x = samples(seqs)
    for name in ADVANTAGES:
        for a, b in zip(ADVANTAGES[name].function(x), ADVANTAGES[name].function(replace(x, parent=None)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


# ── by hand ──────────────────────────────────────────────────────────────────


def by_hand(**changes) -> Samples:
    """Two samples: turns 0, 1, 2 with 2 beside 1, and a turn 0 alone. Token 1 is a tool's."""
    fields = {
        "rewards": fp64([1, 0, 2, 4, 10]),
        "mask": torch.tensor([True, False, True, True, True]),
        "seq": torch.tensor([0, 0, 0, 0, 1]),
        "group": torch.tensor([5, 5]),
        "values": fp64([0.5, math.nan, 0.25, 1.0, 3.0]),
        "turn": torch.tensor([0, 1, 1, 2, 0]),
        "parent": torch.tensor([-1, 0, 0, 0, -1]),
    }
    return Samples(**fields | changes)


def test_turns_by_hand():
    turns = Turns.of(by_hand())
    assert (turns.of_S.tolist(), turns.seq_n.tolist(), turns.after_n.tolist()) == (
        [0, 1, 2, 3],
        [0, 0, 0, 1],
        [-1, 0, 0, -1],
    )
    assert depths(turns.after_n).tolist() == [0, 1, 1, 0] and tokens_follow(by_hand()).tolist() == [-1, 0, 0, -1]
    advantages, returns = ADVANTAGES["turn_rloo"].function(by_hand())
    assert returns.tolist() == [7, 0, 2, 4, 10] and advantages.tolist() == [7 - 10, 0, 2, 4, 10 - 7]
    advantages, returns = ADVANTAGES["turn_gae"].function(by_hand(), gamma=0.5, lam=0.5)
    errors = [1 + 0.5 * (0.25 + 1.0) - 0.5, 2 - 0.25, 4 - 1.0, 10 - 3.0]
    first = errors[0] + 0.25 * (errors[1] + errors[2])
    torch.testing.assert_close(advantages, fp64([first, 0, errors[1], errors[2], errors[3]]))
    torch.testing.assert_close(returns, fp64([first + 0.5, 0, 2, 4, 10]))
    alone = Samples(fp64([1, 5, 2, 9]), torch.ones(4).bool(), torch.arange(4), torch.tensor([0, 0, 0, 3]))
    want = ADVANTAGES["rloo"].function(alone)[:1] + (alone.rewards,)
    torch.testing.assert_close(ADVANTAGES["turn_rloo"].function(alone), want)
    in_a_row = by_hand(parent=torch.tensor([-1, 0, 0, 1, -1]))
    assert ADVANTAGES["turn_rloo"].function(in_a_row)[1].tolist() == [7, 0, 6, 4, 10]


def test_a_turn_without_a_sampled_token_is_passed_over():
    """Turn 1 was not sampled; turn 2, which follows it, follows turn 0 then."""
    x = by_hand(turn=torch.tensor([0, 1, 2, 3, 0]), parent=torch.tensor([-1, 0, 1, 2, -1]))
    assert Turns.of(x).after_n.tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turn": None}, "give turn, too"),
        ({"parent": torch.tensor([-1, 0, 0, 2, -1])}, r"an earlier turn, unlike in sequences \[0\]"),
        ({"parent": torch.tensor([-1, 0, 0, 0, -2])}, r"an earlier turn, unlike in sequences \[1\]"),
        ({"turn": torch.tensor([0, 1, 1, -1, 0])}, r"turn must be 0 or more .* in sequences \[0\]"),
        (
            {"turn": torch.tensor([0, 1, 1, 4, 0]), "parent": torch.tensor([-1, 0, 0, 3, -1])},
            "a turn of the same sequence",
        ),
        (
            {"turn": torch.tensor([0, 0, 0, 1, 9]), "parent": torch.tensor([-1, -1, -1, 0, 1])},
            r"same sequence, unlike in sequences \[1\]",
        ),
        (
            {"turn": torch.tensor([0, 1, 2, 2, 0]), "parent": torch.tensor([-1, 0, 0, 1, -1])},
            r"same parent, unlike in sequences \[0\]",
        ),
        ({"parent": torch.zeros(5)}, "parent must hold integers"),
        ({"parent": torch.zeros(4).long()}, r"parent must be \(5,\) like mask"),
        (
            {"parent": None, "turn": torch.tensor([0, 2, 2, 1, 0])},
            "without parent, turn must not decrease within a sequence",
        ),
    ],
)
def test_turns_that_fit_no_order_are_refused(changes, message):
    for name in ("turn_rloo", "turn_gae", "gigpo", "gae") if changes.get("parent") is not None else ("turn_rloo",):
        with pytest.raises(ValueError, match=message):
            ADVANTAGES[name].function(by_hand(**changes))


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("turn_rloo", {"gamma": 1.5}, "gamma must be"),
        ("turn_gae", {"gamma": -0.1}, "gamma must be"),
        ("turn_gae", {"lam": math.nan}, "lam must be"),
        ("turn_gae", {"critic_lam": 2.0}, "critic_lam must be"),
    ],
)
def test_settings_of_turn_estimators(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGES[name].function(by_hand(), **chosen)


def test_notebook_takes_trees():
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    turn, parent = torch.tensor([[0, 1, 1, 2], [0, 7, 7, 7]]), torch.tensor([[-1, 0, 0, 0], [-1, 9, 9, 9]])
    rewards = torch.tensor([[1.0, math.nan, 2, 4], [10, math.nan, 0, 0]])
    got, returns = compute_advantages("turn_rloo", rewards=rewards, mask=mask, group=[0, 0], turn=turn, parent=parent)
    assert got.tolist() == [[-3, 0, 2, 4], [3, 0, 0, 0]] and returns.tolist() == [[7, 0, 2, 4], [10, 0, 0, 0]]


# ── in a run ─────────────────────────────────────────────────────────────────


def batch_of_turns(turns: list[list[int]], rewards: list[float]):
    """Packs episodes of a prompt with an answer between turns of the given numbers of tokens."""
    episodes = []
    for sample, (sizes, reward) in enumerate(zip(turns, rewards, strict=True)):
        e = Episode(0, sample, 0, [prompt_segment([1, 2])], reward=reward)
        for k, size in enumerate(sizes):
            if k:
                e.add_observed([5], k)
            e.add_sampled([8] * size, [-1.0] * size, 0)
        e.finish = "stop"
        episodes.append(e)
    return from_episodes(episodes, turns=True)


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ([], 1.0),
        (["--shaping.reward-coef", "0.5"], 0.5),
        (["--shaping.reward-coef", "0"], 0.0),
        (["--shaping.normalize", "batch"], 1 / (1.0 + 1e-6)),
        (["--shaping.normalize", "running"], 1 / (1.0 + 1e-6)),
    ],
)
def test_rewards_of_turns_reach_the_estimator_in_the_units_of_the_reward(flags, unit):
    cfg = from_command_line(["--algo.advantage", "turn_rloo", *flags]).config
    algo, peers = compose(cfg), Peers(None, torch.device("cpu"))
    assert "turns" in algo.needs
    batch = batch_of_turns([[2, 1], [1]], [3.0, 1.0])
    last = [3, 5, 8]
    batch.token["turn_reward"] = torch.zeros(batch.n_tokens, dtype=torch.float64)
    batch.token["turn_reward"][last] = fp64([2.0, 0.25, 0.5])
    batch.seq["shaped"] = shape(batch, cfg, algo.state, peers)
    x = algo.samples(batch, "shaped", "values", peers)
    torch.testing.assert_close(x.scores, batch.seq["shaped"], rtol=0, atol=1e-12)
    torch.testing.assert_close(x.rewards[3], fp64(2.0 * unit))
    torch.testing.assert_close(x.rewards[5], batch.seq["shaped"][0] - 2.0 * unit)
    assert (x.rewards[[i for i in range(len(x.rewards)) if i not in last]] == 0).all()
    # A cost is another matter: what fell in the turns is no part of it.
    batch.seq["cost"] = fp64([7.0, 8.0])
    assert algo.samples(batch, "cost", "values", peers).rewards[last].tolist() == [0.0, 7.0, 8.0]


def test_a_batch_with_parents_gives_them_to_the_estimator():
    cfg = from_command_line(["--algo.advantage", "turn_gae"]).config
    algo, peers = compose(cfg), Peers(None, torch.device("cpu"))
    assert {"turns", "critic"} <= algo.needs
    batch = batch_of_turns([[1, 1, 1]], [1.0])
    batch.seq["shaped"] = batch.seq["reward"]
    assert algo.samples(batch, "shaped", "values", peers).parent[batch.token["mask"]].tolist() == [-1, 0, 1]
    del batch.token["parent"]
    assert algo.samples(batch, "shaped", "values", peers).parent is None
    batch.token["parent"] = torch.where(batch.token["turn"] == 0, -1, 0)
    batch.token["turn"][batch.token["turn"] > 0] = 3 - batch.token["turn"][batch.token["turn"] > 0]
    x = algo.samples(batch, "shaped", "values", peers)
    assert Turns.of(x).after_n.tolist() == [-1, 0, 0]
    assert x.rewards[x.mask].tolist() == [0.0, 1.0, 0.0], "the outcome stands on the turn that was made last"
