"""Episodes that branch: an append-only tree, its paths in a batch, and everything that counts an episode once."""

import dataclasses
import random

import pytest
import torch

from spmdrl.algos.aggregate import AGGREGATIONS, Totals, count_totals, token_weights
from spmdrl.checkpoint import treefile
from spmdrl.config.learning import FilterConfig
from spmdrl.config.schema import Config
from spmdrl.data.batch import concatenate
from spmdrl.data.episode import Episode, Segment, prompt_segment
from spmdrl.data.pack import from_episodes, parents, to_episodes
from spmdrl.data.segment import NONE, PREVIOUS
from spmdrl.data.step_batch import ReplayBuffer, copies
from spmdrl.rl.compose import compose
from spmdrl.rl.describe import describe, sample_row
from spmdrl.rl.score import shape
from spmdrl.rl.trees import Images, episode_tree
from spmdrl.rl.trees import episode as episode_from
from spmdrl.spmd.exchange import lexsort
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics
from tests.ranks.cases import branching_batch, synthetic_batch

ALONE = Peers(None, torch.device("cpu"))


def begun(prompt=(1, 2, 3, 4), **more) -> Episode:
    return Episode(7, 0, 0, [prompt_segment(list(prompt))], "stop", **more)


def forked() -> Episode:
    """A response, an answer and a response; then the history without the first response; then from its middle."""
    e = begun()
    e.add_sampled([10, 11, 12], [-1.0, -2.0, -3.0], 5)
    e.add_reward(0.25)
    e.add_observed([20, 21], 9)
    e.add_sampled([13], [-4.0], 6)
    e.add_reward(0.5)
    assert e.fork([1, 2, 3, 4, 20, 22], 8) == 4
    e.add_sampled([14, 15], [-5.0, -6.0], 6)
    e.add_observed([23], 3, after=e.cut(5, e.paths()[0]))
    e.add_sampled([16], [-7.0], 7)
    e.reward = 1.75
    return e


def test_a_branch_begins_where_it_is_asked_for():
    e = forked()
    told = [(s.tokens.tolist(), s.sampled, s.turn, s.after, s.reward) for s in e.segments]
    assert told == [
        ([1, 2, 3, 4], False, 0, PREVIOUS, 0),
        # The response was cut where the last branch leaves it; its reward stays behind.
        ([10], True, 0, PREVIOUS, 0),
        ([11, 12], True, 0, PREVIOUS, 0.25),
        ([20, 21], False, 1, PREVIOUS, 0),
        ([13], True, 1, PREVIOUS, 0.5),
        ([20, 22], False, 2, 0, 0),
        ([14, 15], True, 2, PREVIOUS, 0),
        ([23], False, 3, 1, 0),
        ([16], True, 3, PREVIOUS, 0),
    ]
    assert e.paths() == [[0, 1, 2, 3, 4], [0, 5, 6], [0, 1, 7, 8]]
    # In time the second branch follows the turn before it; on its path, the third one follows the first turn.
    assert parents(e) == [-1, 0, 1, 0]
    assert (e.turns, e.generated, e.opening, e.version, e.response, e.turn_rewards) == (4, 12, 1, 5, [16], 0.75)


def test_columns_speak_of_the_path_that_is_being_continued():
    e = forked()
    assert e.tokens.tolist() == [1, 2, 3, 4, 10, 23, 16] and len(e) == 7
    assert e.mask.tolist() == [False] * 4 + [True, False, True]
    assert e.rollout_logp.tolist() == [0, 0, 0, 0, -1, 0, -7] and e.versions.tolist() == [0, 0, 0, 0, 5, 0, 7]
    assert e.segments[1].logp.tolist() == [-1.0] and e.segments[2].logp.tolist() == [-2.0, -3.0]
    # A state that nobody names is the path, whatever else the tree holds.
    e.add_observed([30], after=e.cut(5))
    again = begun()
    again.add_sampled([10], [-1.0], 0)
    again.add_observed([30])
    assert e.segments[-1].state == again.segments[-1].state


def test_a_fork_shares_as_much_as_some_path_has():
    e = forked()
    before = len(e.segments)
    # The first path up to its answer's first token, which is observed anew as the last one never is shared.
    assert e.fork([1, 2, 3, 4, 10, 11, 12, 20]) == 7
    assert e.tokens.tolist() == [1, 2, 3, 4, 10, 11, 12, 20]
    assert len(e.segments) == before + 1
    # Inside the prompt: it is two segments then, and still the prompt.
    assert e.fork([1, 2, 9]) == 2 and e.opening == 2 and e.tokens.tolist() == [1, 2, 9]
    assert [s.tokens.tolist() for s in e.segments[:2]] == [[1, 2], [3, 4]] and e.paths()[0][:2] == [0, 1]
    # A prompt of its own begins another tree.
    assert e.fork([50, 51]) == 0 and e.segments[-1].after == NONE and e.tokens.tolist() == [50, 51]
    e.add_sampled([60], [-1.0], 8)
    # One that continues the path only adds to it.
    paths = len(e.paths())
    assert e.fork([50, 51, 60, 61]) == 3 and e.segments[-1].after == PREVIOUS and len(e.paths()) == paths
    assert e.tokens.tolist() == [50, 51, 60, 61]


def columns_of(e: Episode, path: list[int]) -> tuple[list[int], list[bool]]:
    sampled = e.along(lambda s: torch.full((len(s),), s.sampled), path)
    return e.along(lambda s: s.tokens, path).tolist(), sampled.tolist()


def begins(whole: list, part: list) -> bool:
    return whole[: len(part)] == part


def grown(seed: int) -> tuple[Episode, list[tuple[list[int], list[bool]]]]:
    """A random tree, and as lists what stood on the current path whenever it was left."""
    rng = random.Random(seed)
    e = begun([rng.randrange(3) for _ in range(4)])
    current = ([int(t) for t in e.tokens], [False] * 4)
    leaves: list[tuple[list[int], list[bool]]] = []
    for _ in range(rng.randrange(2, 9)):
        n = rng.randrange(1, 4)
        new = [rng.randrange(3) for _ in range(n)]
        e.add_sampled(new, [-1.0] * n, 1)
        current = (current[0] + new, current[1] + [True] * n)
        kind = rng.randrange(3)
        seen = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        if kind == 0:
            e.add_observed(seen, 0)
            current = (current[0] + seen, current[1] + [False] * len(seen))
            continue
        leaves.append(current)
        if kind == 1:
            tokens, mask = rng.choice(leaves)
            at = rng.randrange(1, len(tokens) + 1)
            all_paths = [(p, *columns_of(e, p)) for p in e.paths()]
            path = next(p for p, x, sampled in all_paths if begins(x, tokens) and begins(sampled, mask))
            e.add_observed(seen, 0, after=e.cut(at, path))
            current = (tokens[:at] + seen, mask[:at] + [False] * len(seen))
        else:
            prompt = current[0][: rng.randrange(0, len(current[0]))] + seen
            shared = e.fork(prompt, 0)
            held = e.mask.tolist()
            assert e.tokens.tolist() == prompt and not any(held[shared:])
            current = (prompt, held)
    if not e.segments[-1].sampled:
        e.add_sampled([0], [-1.0], 1)
        current = (current[0] + [0], current[1] + [True])
    return e, [*leaves, current]


@pytest.mark.parametrize("seed", range(40))
def test_paths_are_what_was_written(seed):
    e, want = grown(seed)
    paths = e.paths()
    columns = [columns_of(e, p) for p in paths]
    for left, mask in want:
        assert any(begins(tokens, left) and begins(sampled, mask) for tokens, sampled in columns)
    assert columns[-1] == want[-1] == (e.tokens.tolist(), e.mask.tolist())
    tokens = [x for x, _ in columns]
    # In the batch every sampled token counts once, and the paths come back as they were.
    batch = from_episodes([e], turns=True, turn_rewards=True)
    assert [x.tolist() for x in batch.token["tokens"].split(batch.lengths.tolist())] == tokens
    assert int(batch.token["mask"].sum()) == sum(len(s) for s in e.segments if s.sampled)
    (back,) = to_episodes(batch)
    assert [back.along(lambda s: s.tokens, p).tolist() for p in back.paths()] == tokens
    again = from_episodes([back])
    assert torch.equal(again.token["mask"], batch.token["mask"])
    assert torch.equal(again.token["rollout_logp"], batch.token["rollout_logp"])


def test_a_batch_has_a_sequence_for_each_path():
    other = begun()
    other.sample = 1
    other.add_sampled([30], [-0.5], 6)
    batch = from_episodes([other, forked()], turns=True, turn_rewards=True)
    assert batch.lengths.tolist() == [10, 8, 7, 5]
    assert [batch.seq[k].tolist() for k in ("sample", "path", "paths")] == [[0, 0, 0, 1], [0, 1, 2, 0], [3, 3, 3, 1]]
    rows = {name: [x.tolist() for x in x_T.split(batch.lengths.tolist())] for name, x_T in batch.token.items()}
    assert rows["mask"][0] == [False] * 4 + [True] * 3 + [False] * 2 + [True]
    assert rows["mask"][2] == [False] * 6 + [True], "the token that the first path has is not under the mask again"
    assert rows["rollout_logp"][2] == [0] * 6 + [-7] and rows["version"][2] == [0] * 6 + [7]
    assert rows["turn"] == [[0] * 7 + [1] * 3, [0] * 4 + [2] * 4, [0] * 5 + [3] * 2, [0] * 5]
    assert rows["state"][0] == [0] * 7 + [9] * 3
    assert rows["parent"] == [[-1] * 7 + [0] * 3, [-1] * 4 + [1] * 4, [-1] * 5 + [0] * 2, [-1] * 5]
    assert rows["turn_reward"][0] == [0] * 6 + [0.25, 0, 0, 0.5] and not any(rows["turn_reward"][2])
    assert batch.begins.tolist() == [True, False, False, True] and batch.firsts.tolist() == [0, 3]
    assert batch.lasts.tolist() == [2, 3] and batch.episode.tolist() == [0, 0, 0, 1] and batch.branches
    assert batch.sampled_per_episode.tolist() == [7, 1] and batch.of_last(batch.lengths).tolist() == [7, 7, 7, 5]
    ones = torch.ones(batch.n_tokens)
    assert batch.sum_episodes(ones).tolist() == [7, 7, 7, 1] and batch.sum_tokens(ones).tolist() == [4, 2, 1, 1]
    # Without branches nothing but the two numbers is added.
    plain = from_episodes(synthetic_batch())
    assert not plain.branches and torch.equal(plain.episode_index, plain.seq_index)
    empty = from_episodes([], turns=True, turn_rewards=True)
    assert empty.columns == batch.columns and not len(empty.firsts) and not len(empty.lasts)


def test_files_hold_trees_and_older_ones_are_read(tmp_path):
    e = forked()
    treefile.write(tmp_path / "tree", episode_tree(e, Images()))
    back = episode_from(treefile.read(tmp_path / "tree"), Images())
    assert back.paths() == e.paths() and parents(back) == parents(e) and back.turn_rewards == e.turn_rewards
    for name in ("turn", "state", "parent", "turn_reward", "mask", "rollout_logp", "tokens"):
        one, other = (from_episodes([x], turns=True, turn_rewards=True).token[name] for x in (e, back))
        assert torch.equal(one, other), name
    plain = begun()
    plain.add_sampled([10], [-1.0], 2)
    tree = episode_tree(plain, Images())
    known = ("tokens", "logp", "version", "turn", "state")
    old = tree | {"segments": [{name: s[name] for name in known} for s in tree["segments"]]}
    treefile.write(tmp_path / "old", old)
    assert episode_from(treefile.read(tmp_path / "old"), Images()).paths() == [[0, 1]]


def test_experts_are_kept_for_every_token_once():
    e = begun([1, 2])
    e.add_sampled([3, 4], [-1.0, -1.0], 0)
    told = torch.tensor([[5], [6], [7]], dtype=torch.int16)
    e.add_experts(told)
    assert torch.equal(e.experts, told)
    e.fork([1, 2, 9])
    e.add_sampled([8], [-1.0], 0)
    # The prompt ran again by other weights: what it was sampled by counts.
    e.add_experts(torch.tensor([[50], [60], [70]], dtype=torch.int16))
    assert e.experts.flatten().tolist() == [5, 6, 7, -1, 70]
    batch = from_episodes([e], experts_width=1)
    assert batch.token["experts"].flatten().tolist() == [5, 6, 7, -1, 5, 6, 70, -1]


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda e: e.fork([]), "a prompt needs one token or more"),
        (lambda e: e.fork([1, -2]), "none of them negative"),
        (lambda e: e.add_observed([1], after=99), "must follow one of the segments 0 to 8; it follows 99"),
        (lambda e: e.add_observed([1], after=-1), "must follow one of the segments"),
        (lambda e: e.add_observed([1], parent=4), "must follow one of the turns 0 to 3; it follows 4"),
        (lambda e: e.cut(0), "can be cut after token 1 to 7, not after 0"),
        (lambda e: e.cut(8), "can be cut after token 1 to 7, not after 8"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(act, says):
    e = forked()
    segments = list(e.segments)
    with pytest.raises(ValueError, match=says):
        act(e)
    assert len(e.segments) == len(segments) and all(a is b for a, b in zip(e.segments, segments, strict=True))


# ── an episode is counted once ───────────────────────────────────────────────


def flat(e: Episode) -> Episode:
    """The same sampled tokens, rewards and turns in one path: to whoever counts, the same episode."""
    segments = [Segment(s.tokens, s.logp, s.version, s.turn, s.state, reward=s.reward) for s in e.segments]
    return dataclasses.replace(e, segments=segments)


@pytest.fixture
def both():
    """A batch of branching episodes, and one of the same episodes without branches."""
    episodes = branching_batch(6, 3)
    assert len({len(e.paths()) for e in episodes}) == 4
    return [from_episodes(x, turns=True, turn_rewards=True) for x in (episodes, [flat(e) for e in episodes])]


def under_mask(batch, x_T):
    return x_T[batch.token["mask"]]


def same(batches, columns) -> None:
    """The sampled tokens have the same numbers; they stand in the same order where branches end in that order."""
    one, other = (under_mask(b, c) for b, c in zip(batches, columns, strict=True))
    keys = [under_mask(b, b.token["rollout_logp"]) for b in batches]
    orders = [torch.argsort(k, stable=True) for k in keys]
    torch.testing.assert_close(one[orders[0]], other[orders[1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo"])
def test_groups_compare_episodes(both, advantage):
    cfg = Config()
    cfg.algo.advantage = advantage
    algo = compose(cfg)
    found = []
    for batch in both:
        batch.seq["shaped"] = shape(batch, cfg, algo.state, ALONE)
        algo.advantages(batch, ALONE)
        found.append(batch.token["advantages"])
    same(both, found)
    assert both[0].seq["advantage"][both[0].firsts].tolist() == pytest.approx(both[1].seq["advantage"].tolist())
    assert found[0].abs().max() > 0.01


def test_rewards_of_turns_stand_where_the_turns_end(both):
    cfg = Config()
    algo = compose(cfg)
    for batch in both:
        batch.seq["shaped"] = shape(batch, cfg, algo.state, ALONE)
    samples = [algo.samples(batch, "shaped", "values", ALONE) for batch in both]
    same(both, [x.rewards for x in samples])
    assert torch.equal(samples[0].parent, both[0].token["parent"])
    for x, batch in zip(samples, both, strict=True):
        torch.testing.assert_close(x.scores, batch.seq["reward"][batch.firsts], rtol=0, atol=1e-12)
    # The outcome is the rest of the reward, on the last token; without the column all of it is.
    e = branching_batch(6, 3)[0]
    first = samples[0].rewards[samples[0].seq == 0][samples[0].mask[samples[0].seq == 0]]
    assert first[-1] == pytest.approx(e.reward - e.turn_rewards + e.segments[-1].reward)
    whole = from_episodes(branching_batch(6, 3))
    whole.seq["shaped"] = whole.seq["reward"]
    x = algo.samples(whole, "shaped", "values", ALONE)
    assert int((x.rewards != 0).sum()) == int((whole.seq["reward"][whole.firsts] != 0).sum())


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_means_over_sequences_are_means_over_episodes(both, mode):
    weights = []
    for batch in both:
        mask, episode = batch.token["mask"], batch.episode_index
        totals = count_totals(mask, episode)
        assert totals == Totals(float(mask.sum()), 18.0)
        weights.append(token_weights(mode, mask, episode, totals, 16.0))
    same(both, weights)


def test_shaping_and_metrics_count_an_episode_once(both):
    cfg = Config()
    shaping = dict(normalize="running", overlong_buffer=8, length_penalty="group", length_coef=0.5)
    cfg = dataclasses.replace(cfg, shaping=dataclasses.replace(cfg.shaping, **shaping))
    cfg.rollout.max_new_tokens = 16
    shaped, told = [], []
    for batch in both:
        state = compose(cfg).state
        shaped.append(shape(batch, cfg, state, ALONE)[batch.firsts])
        stats = Metrics()
        batch.seq["advantage"] = batch.seq["reward"] - 0.5
        describe(stats, batch)
        told.append({k: v for k, v in stats.reduce(lambda x, op: x).items() if k != "tokens"} | state)
    torch.testing.assert_close(*shaped, rtol=1e-12, atol=1e-12)
    assert told[0] == pytest.approx(told[1]) and "response_length/mean" in told[0]


def test_replay_draws_whole_episodes_and_counts_copies_apart():
    batch = from_episodes(branching_batch(2, 3))
    batch.seq["seed"] = torch.zeros(len(batch), dtype=torch.int64)
    twice = copies(batch, torch.tensor([2, 0, 1, 3, 1, 0]))
    assert len(twice.firsts) == 7 and twice.seq["sample"][twice.firsts].tolist() == [0, 0, 2, 0, 0, 0, 1]
    counts = twice.identity["paths"][twice.firsts].tolist()
    assert torch.bincount(twice.episode).tolist() == counts
    assert len({tuple(row) for row in twice.keys.tolist()}) == len(twice)
    # As they come back from an exchange, sorted by their keys.
    assert torch.equal(lexsort(twice.keys), torch.arange(len(twice)))
    buffer = ReplayBuffer(FilterConfig(resample="pow", replay_steps=1), 2)
    mixed = buffer.mix(batch, 0, 0, ALONE)
    assert len(mixed.firsts) == 6
    mixed = buffer.mix(batch, 0, 1, ALONE)
    assert len(mixed.firsts) == 6 and len(concatenate(mixed, mixed)) == 2 * len(mixed)


def test_a_sample_shows_its_branches():
    row = sample_row(1, forked(), lambda tokens, **_: " ".join(map(str, tokens)))
    assert row["prompt"] == "1 2 3 4" and row["completion"].startswith("10 11 12 20")
    assert [s.get("after") for s in row["segments"]] == [None] * 5 + [0, None, 1, None]
