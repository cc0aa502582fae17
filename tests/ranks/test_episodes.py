"""Episodes of several turns, in an environment of the rank's own process that answers at once.

It answers a response by tokens, so that everything on the way of an episode is seen with turns in it: requests, seeds,
observations, columns, advantages, samples, partial rollouts, checkpoints.
"""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from spmdrl.algos.samples import Samples
from spmdrl.algos.turns import gigpo
from spmdrl.data.episode import STATES, Episode, Segment, prompt_segment, segments_of
from spmdrl.data.pack import from_episodes, to_episodes
from spmdrl.data.prompts import Prompt
from spmdrl.rl.environment import Environment, Observation
from spmdrl.rl.trees import Images, experience, group
from spmdrl.train import train
from tests.ranks.cases import full_weights
from tests.ranks.demo import Interrupted, metrics, open_demo, untimed
from tests.ranks.harness import run_ranks

TURNS = 3
SECTIONS = {
    "rollout": {"max_new_tokens": 30, "samples_per_prompt": 4, "prompts_per_step": 4},
    "algo": {"preset": "gigpo", "advantage": "gigpo", "updates_per_step": 1, "kl_coef": 0.0},
    "eval": {"every": 0},
    "run": {"steps": 3},
}


class Echo(Environment):
    """Two answers, of the response's first token and the turn; the state is that token, or the whole episode."""

    def __init__(self, states: bool = True):
        super().__init__()
        self.states = states

    def reply(self, prompt: Prompt, episode: Episode) -> Observation | None:
        if episode.turns == TURNS:
            return None
        first = episode.response[0]
        return Observation([3 + episode.turns, first, 9], first if self.states else None)


def with_echo(world, folder: str, sections: dict, stop_after: int = 0):
    run = open_demo(world, folder, sections, stop_after)
    if run.sampler:
        run.sampler.environment = Echo()
    return run


def sampled(world, folder: str, sections: dict) -> list:
    """Returns the first step's episodes on this rank, as plain values, and the columns of their batch."""
    run = with_echo(world, folder, sections)
    with run.memory.rollout_phase():
        done = run.experience(0)
    with run.memory.training_phase():
        batch = run.method.pack(done.episodes, 0)
        logp_T, _ = run.models.policy.logprobs(batch, 1.0)
    mask_T = batch.token["mask"]
    gap = (logp_T.double() - batch.token["rollout_logp"].double())[mask_T].abs().max().item()
    run.close()
    rows = [
        (e.position, e.sample, e.finish, [(s.tokens.tolist(), s.sampled, s.turn, s.state) for s in e.segments])
        for e in done.episodes
    ]
    return rows, gap, {name: batch.token[name].tolist() for name in ("turn", "state")}, batch.seq["turns"].tolist()


def test_layout_episodes_of_several_turns_are_the_same_on_any_number_of_ranks(tmp_path):
    sections = SECTIONS | {"model": {"path": "tiny", "dtype": "float64"}}
    ((one, gap, columns, turns),) = run_ranks(sampled, 1, str(tmp_path / "one"), sections)
    two = run_ranks(sampled, 2, str(tmp_path / "two"), sections)
    assert sorted(one) == sorted(row for rows, *_ in two for row in rows) and len(one) == 16
    assert max(gap, *(rank[1] for rank in two)) < 1e-6, "the trainer's logp of what was sampled, after observations"
    assert set(turns) == {TURNS} and len(columns["turn"]) == len(columns["state"])
    for _, _, finish, segments in one:
        kinds = [is_sampled for _, is_sampled, _, _ in segments]
        assert kinds == [False, True] * (len(segments) // 2), "prompt, response, observation, response, ..."
        assert [turn for _, _, turn, _ in segments] == [i // 2 for i in range(len(segments))]
        for (before, *_), (seen, *_, state) in zip(segments[1::2], segments[2::2], strict=False):
            assert seen[1:] == [before[0], 9] and state == before[0]
        made = sum(len(tokens) for tokens, *_ in segments[1:])
        assert made <= 30 and (finish == "length" or len(segments) == 2 * TURNS)


def test_batch_keeps_turns_and_states_and_gigpo_compares_turns_of_one_state():
    def made(sample: int, states: list[int], reward: float) -> Episode:
        e = Episode(7, sample, 0, [prompt_segment([1, 2])], reward=reward)
        for turn, state in enumerate(states):
            if turn:
                e.add_observed([5], state)
            e.add_sampled([8, 9], [-1.0, -2.0], 3)
        e.finish = "stop"
        return e

    batch = from_episodes([made(0, [0, 4], 1.0), made(1, [0, 4], 0.0), made(2, [0, 6], 0.0)], turns=True)
    assert batch.token["turn"].tolist() == [0, 0, 0, 0, 1, 1, 1] * 3
    assert batch.token["state"].tolist() == [0] * 4 + [4] * 3 + [0] * 4 + [4] * 3 + [0] * 4 + [6] * 3
    assert batch.seq["turns"].tolist() == [2, 2, 2] and batch.token["version"].tolist() == [0, 0, 3, 3, 0, 3, 3] * 3
    last = batch.cu_seqlens[1:].long() - 1
    rewards_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    rewards_T[last] = batch.seq["reward"]
    x = Samples(
        rewards=rewards_T,
        mask=batch.token["mask"],
        seq=batch.seq_index,
        group=batch.seq["position"],
        turn=batch.token["turn"],
        state=batch.token["state"],
    )
    advantages_T, _ = gigpo(x, gamma=0.5, step_weight=1.0, std=False)
    # Of the episode: 1 - 1/3, 0 - 1/3. Of the first turns, all of state 0: 0.5 - 1/6, -1/6. Of state 4: 1 - 1/2, -1/2;
    # state 6 was met once.
    first, second = [2 / 3 + 1 / 3, -1 / 3 - 1 / 6, -1 / 3 - 1 / 6], [2 / 3 + 1 / 2, -1 / 3 - 1 / 2, -1 / 3]
    want = [[0, 0, a, a, 0, b, b] for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(advantages_T.view(3, 7), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)
    back = to_episodes(batch)
    assert [[(s.tokens.tolist(), s.version, s.turn) for s in e.segments] for e in back] == [
        [([1, 2], 0, 0), ([8, 9], 3, 0), ([5], 0, 1), ([8, 9], 3, 1)]
    ] * 3


def test_a_state_that_no_environment_names_is_the_episode_so_far():
    def state(tokens: list[int], observed: list[int]) -> int:
        e = Episode(0, 0, 0, [prompt_segment([1])])
        e.add_sampled(tokens, [0.0] * len(tokens), 0)
        e.add_observed(observed)
        return e.segments[-1].state

    assert state([2, 3], [4]) == state([2, 3], [4]) != state([2], [3, 4, 4]) != state([3, 2], [4])
    assert 0 < state([2], [5]) < 2**52


def test_segments_are_cut_where_mask_or_version_changes():
    tokens, mask = torch.arange(8), torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]).bool()
    versions = torch.tensor([0, 0, 1, 1, 2, 0, 2, 2])
    cut = segments_of(tokens, mask, mask * -0.5, versions)
    assert [(s.tokens.tolist(), s.sampled, s.version, s.turn) for s in cut] == [
        ([0, 1], False, 0, 0),
        ([2, 3], True, 1, 0),
        ([4], True, 2, 0),
        ([5], False, 0, 1),
        ([6, 7], True, 2, 1),
    ]
    assert Episode(0, 0, 0, cut).version == 1 and Episode(0, 0, 0, cut).response == [6, 7]


PARTIAL = SECTIONS | {
    "rollout": SECTIONS["rollout"] | {"oversample": 2.0, "partial_steps": 1, "max_sequences": 64},
    "checkpoint": {"every": 1, "keep": 9},
    "run": {"steps": 4},
}


def echoed(world, folder: str, stop_after: int = 0) -> dict | None:
    """Trains with the mock; returns weights on rank 0."""
    run = with_echo(world, folder, PARTIAL, stop_after)
    if run.checkpoints.start_step:
        carried = [e for g in run.sampler.carried for e in g.open]
        assert world.rank or any(e.turns > 1 for e in carried), "stopped in the middle of an episode"
    with suppress(Interrupted):
        train(run)
    run.close()
    weights = full_weights(run.models.policy)
    return weights if world.is_first else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_in_the_middle_of_episodes_is_bit_equal(ranks, tmp_path):
    whole = run_ranks(echoed, ranks, str(tmp_path / "whole"))[0]
    run_ranks(echoed, ranks, str(tmp_path / "broken"), 1)
    broken = run_ranks(echoed, ranks, str(tmp_path / "broken"))[0]
    assert whole.keys() == broken.keys() and all(torch.equal(whole[n], broken[n]) for n in whole)
    assert untimed(metrics(tmp_path / "whole")) == untimed(metrics(tmp_path / "broken"))
    rows = [json.loads(line) for line in Path(tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    turns = [[s["turn"] for s in row["segments"]] for row in rows if "segments" in row]
    assert any(2 in t for t in turns), "samples show their turns"
    versions = [{s["version"] for s in row["segments"] if "version" in s} for row in rows if "segments" in row]
    assert any(len(v) > 1 for v in versions), "and what was carried from step to step"


# ── checkpoints of before segments ───────────────────────────────────────────


def test_resume_reads_groups_and_steps_that_were_held_as_columns():
    prompt = Prompt(4, [1, 2], "", "", {}, "")
    versions, logp = torch.tensor([3, 3, 5]), torch.tensor([-0.5, -0.25, -2.0], dtype=torch.float64)
    part = {"tokens": torch.tensor([7, 8, 9]), "logp": logp, "versions": versions, "experts": None, "finish": ""}
    none = {"tokens": torch.zeros(0).long(), "logp": torch.zeros(0), "versions": torch.zeros(0).long()}
    tree = {"position": 11, "prompt": 4, "born": 2, "parts": {"1": none | {"experts": None, "finish": ""}, "0": part}}
    g = group(tree, {4: prompt}, Images())
    assert (g.position, g.born, [e.sample for e in g.episodes], g.done) == (11, 2, [0, 1], False)
    assert g.episodes[0].tokens.tolist() == [1, 2, 7, 8, 9] and g.episodes[0].versions.tolist() == [0, 0, 3, 3, 5]
    assert g.episodes[0].rollout_logp.tolist() == [0, 0, -0.5, -0.25, -2.0]
    assert [s.tokens.tolist() for s in g.episodes[1].segments] == [[1, 2]]
    mask = torch.tensor([False, True, True])
    columns = {"tokens": torch.arange(3), "mask": mask, "rollout_logp": mask * -1.0, "versions": mask * 6}
    row = {"prompt": 1, "sample": 0, "position": 2, "version": 6, "finish": "length", "turns": 1, "reward": 0.5}
    row |= {"parts": {"a": 1.0}, "timed_out": False, "baseline": 0.25, "experts": None, "extras": {}} | columns
    done = experience({"trajectories": [row], "drawn": 3, "bad_samples": 1, "stats": []}, Images())
    (e,) = done.episodes
    assert (e.version, e.finish, e.reward, e.parts, e.baseline) == (6, "length", 0.5, {"a": 1.0}, 0.25)
    assert e.segments[0].tokens.tolist() == [0] and isinstance(e.segments[1], Segment) and done.drawn == 3


@pytest.mark.parametrize(("tokens", "state"), [([], None), ([-1], 2), ([5], -1), ([5], STATES)])
def test_an_observation_that_no_column_can_hold_is_refused(tokens, state):
    episode = Episode(0, 0, 0, [prompt_segment([1, 2])])
    episode.add_sampled([3], [-0.5], 0)
    with pytest.raises(ValueError, match="an observation needs one token|the number of a state must be from 0"):
        episode.add_observed(tokens, state)
    assert episode.turns == 1
