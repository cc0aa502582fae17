"""Episodes with environments in processes of their own, through a whole run: layouts, resume, failures, evaluation."""

import json
import math
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from spmdrl.config.dump import to_yaml
from spmdrl.tools.replay import replay
from spmdrl.train import train
from tests.ranks.cases import full_weights
from tests.ranks.demo import Interrupted, demo, metrics, open_demo, untimed
from tests.ranks.harness import run_ranks
from tests.ranks.test_placement import split, split_demo

WORLDS = Path(__file__).with_name("worlds.py")
TALK = (
    "{%- for m in messages -%}{{ '>' + m['content'] + '<eos>' if m['role'] == 'assistant' else m['content'] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}>{%- endif -%}"
)
"""A chat template for the demo's tokenizer."""


def sections(folder: Path, world: str, limits: str = "", **more) -> dict:
    """Settings of a run in one of the worlds; limits: further lines of its file."""
    file = folder / f"{world}.yaml"
    file.write_text(f"environment: {WORLDS}:{world}\nturn_tokens: 3\n{limits}\n")
    base = {
        "env": str(file),
        "data": {"train": "builtin:episodes", "eval": "builtin:episodes:eval", "chat_template": TALK, "limit": 64},
        "reward": {"function": "environment"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 40, "max_prompt_tokens": 16},
        "algo": {"advantage": "turn_rloo", "updates_per_step": 1, "kl_coef": 0.0},
        "eval": {"every": 0},
        "run": {"steps": 3},
    }
    return {k: v | more.get(k, {}) if isinstance(v, dict) else v for k, v in base.items()} | {
        k: v for k, v in more.items() if k not in base
    }


def rows_of(run, step: int = 0) -> list:
    """Returns a step's episodes on this rank, as plain values."""
    with run.memory.rollout_phase():
        done = run.experience(step)
    return [
        (
            *(e.position, e.sample, e.finish, e.reward, e.given, sorted(e.parts.items())),
            [(s.tokens.tolist(), s.sampled, s.turn, s.reward) for s in e.segments],
        )
        for e in done.episodes
    ]


def sampled(world, folder: str, settings: dict) -> list:
    run = open_demo(world, folder, settings)
    rows = rows_of(run)
    run.close()
    return rows


def trained(world, folder: str, settings: dict, stop_after: int = 0):
    run = open_demo(world, folder, settings, stop_after)
    with suppress(Interrupted):
        train(run)
    weights = full_weights(run.models.policy)
    run.close()
    return weights


def test_layout_conversations_rewards_and_weights_are_the_same_on_one_rank_and_two(tmp_path):
    settings = sections(tmp_path, "Echoes", model={"path": "tiny", "dtype": "float64"})
    ((one),) = run_ranks(sampled, 1, str(tmp_path / "one"), settings)
    two = run_ranks(sampled, 2, str(tmp_path / "two"), settings)
    assert sorted(one) == sorted(row for rows in two for row in rows) and len(one) == 16
    groups = {}
    for position, _, finish, reward, given, parts, segments in one:
        assert finish == "stop" and len(segments) == 6 and parts == [("odd", 1.0)]
        turns = [s for s in segments if s[1]]
        assert reward == given == pytest.approx(1.0 + sum(r for *_, r in turns))
        assert {r for *_, r in turns} <= {0.0, 0.25}
        groups.setdefault(position, set()).add(tuple(segments[0][0]))
    assert all(len(begins) == 1 for begins in groups.values()), "a group's samples begin alike"
    a = run_ranks(trained, 1, str(tmp_path / "a"), settings)[0]
    b = run_ranks(trained, 2, str(tmp_path / "b"), settings)[0]
    for name, tensor in a.items():
        assert (tensor - b[name]).abs().max() <= 1e-6, name
    told = metrics(tmp_path / "a")[-1]
    assert told["env/turns"] == 3 and told["env/failures"] == 0 and told["time/env_answer"] > 0


def branched(world, folder: str, settings: dict) -> list:
    """Returns the texts of each episode's paths, and of the last one the last observation with its state."""
    run = open_demo(world, folder, settings)
    with run.memory.rollout_phase():
        done = run.experience(0)
    rows = []
    for e in done.episodes:
        texts = [run.tokenizer.decode(e.along(lambda s: s.tokens, path)) for path in e.paths()]
        *_, seen, _ = e.segments
        rows.append((e.position, e.sample, e.reward, texts, run.tokenizer.decode(seen.tokens), seen.state))
    run.close()
    return rows


def test_layout_a_history_of_the_environment_begins_a_branch_on_one_rank_and_two(tmp_path):
    """So it does in an engine of two ranks. The states are the environment's, as GiGPO reads them."""
    model, algo = {"path": "tiny", "dtype": "float64"}, {"advantage": "gigpo"}
    settings = sections(tmp_path, "Sums", "settings: {turns: 4}", model=model, algo=algo)
    ((one),) = run_ranks(branched, 1, str(tmp_path / "one"), settings)
    two = run_ranks(branched, 2, str(tmp_path / "two"), settings)
    assert sorted(one) == sorted(row for rows in two for row in rows) and len(one) == 16
    states = set()
    for position, _, _, (before, after), seen, state in one:
        assert re.fullmatch(r"sum:>(.)<eos>\1.=>.*", after) and before.startswith("say:>") and "sum:" not in before
        states.add((position, seen[-4], state))
    assert 4 < len(states) == len({row[:2] for row in states}) == len({row[::2] for row in states})
    shared = settings | {"rollout": settings["rollout"] | {"tp": 2}}
    of_two, none = run_ranks(branched, 2, str(tmp_path / "tp"), shared, rollout_tp=2)
    assert sorted(of_two) == sorted(one) and not none
    a = run_ranks(trained, 1, str(tmp_path / "a"), settings)[0]
    b = run_ranks(trained, 2, str(tmp_path / "b"), settings)[0]
    for name, tensor in a.items():
        assert (tensor - b[name]).abs().max() <= 1e-6, name
    assert [row["env/forks"] for row in metrics(tmp_path / "a")] == [16.0] * 3


@pytest.mark.parametrize("world", ["Echoes", "Counts", "Sums"])
def test_resume_in_the_middle_of_episodes_is_equal_to_the_bit(tmp_path, world):
    """Groups are cut short with turns behind them; the world goes on from its state, or from its turns run again."""
    more = {"rollout": {"oversample": 1.5, "partial_steps": 2}, "checkpoint": {"every": 1, "at_end": False}}
    settings = sections(tmp_path, world, "settings: {turns: 4, uneven: true}", **more)
    settings["run"] = {"steps": 4, "deterministic": True}
    settings["algo"]["advantage"] = "gigpo" if world == "Sums" else "turn_rloo"
    whole = run_ranks(trained, 2, str(tmp_path / "whole"), settings)
    run_ranks(trained, 2, str(tmp_path / "parts"), settings, 2)
    after = run_ranks(trained, 2, str(tmp_path / "parts"), settings)
    assert all(torch.equal(whole[0][name], after[0][name]) for name in whole[0])
    assert untimed(metrics(tmp_path / "whole")) == untimed(metrics(tmp_path / "parts"))
    cut = [row["rollout/cut_prompts"] for row in metrics(tmp_path / "whole")]
    tokens = [row["rollout/cut_tokens"] for row in metrics(tmp_path / "whole")]
    assert max(cut) > 0 and max(tokens) > 0, "groups were carried over with tokens"


@pytest.mark.parametrize("world", ["Breaks", "Slow"])
def test_a_world_that_breaks_or_hangs_costs_its_own_episodes_alone(tmp_path, world):
    settings = sections(tmp_path, world, reward={"function": "environment", "max_ungraded": 1.0})
    ((rows),) = run_ranks(sampled, 1, str(tmp_path / "run"), settings)
    assert 4 <= len(rows) < 16 and len(rows) % 4 == 0
    assert all(finish == "stop" and math.isfinite(reward) for _, _, finish, reward, *_ in rows)


def test_an_engine_of_two_ranks_hears_what_its_first_rank_hears(tmp_path):
    one = run_ranks(sampled, 1, str(tmp_path / "one"), sections(tmp_path, "Counts"))[0]
    shared = sections(tmp_path, "Counts", rollout={"tp": 2})
    two = run_ranks(sampled, 2, str(tmp_path / "two"), shared, rollout_tp=2)
    assert sorted(one) == sorted(row for rows in two for row in rows) and len(two[1]) == 0


def test_limits_on_turns_and_tokens_end_episodes_with_their_reason(tmp_path):
    turns = run_ranks(sampled, 1, str(tmp_path / "a"), sections(tmp_path, "Echoes", "max_turns: 2"))[0]
    assert {row[2] for row in turns} == {"turns"} and {len(row[6]) for row in turns} == {4}
    assert all(row[4] == pytest.approx(0.5 + sum(s[3] for s in row[6])) for row in turns), (
        "the final reward was asked for"
    )
    length = run_ranks(sampled, 1, str(tmp_path / "b"), sections(tmp_path, "Echoes", rollout={"max_new_tokens": 9}))[0]
    assert {row[2] for row in length} == {"length"}
    assert all(sum(len(s[0]) for s in row[6][1:]) <= 9 for row in length)
    late = run_ranks(sampled, 1, str(tmp_path / "c"), sections(tmp_path, "Echoes", "max_seconds: 0.000001"))[0]
    assert {row[2] for row in late} == {"time"}


def evaluated(world, folder: str, settings: dict) -> dict:
    run = open_demo(world, folder, settings)
    train(run)
    run.close()
    return {}


SHOWN = {"eval": {"every": 1, "prompts": 8}, "tracking": {"trackers": ("jsonl",), "samples": 2}, "run": {"steps": 1}}


def check_shown(folder: Path) -> None:
    """Two lines of the step and two of each evaluation, before and after it, with the rewards of their turns."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [row.get("evaluation", False) for row in rows] == [True] * 2 + [False] * 2 + [True] * 2
    assert all([s["turn"] for s in row["segments"]] == [0, 0, 1, 1, 2, 2] and row["step"] == 1 for row in rows)
    for row in rows:
        assert row["reward"] == pytest.approx(1.0 + sum(s.get("reward", 0.0) for s in row["segments"]))
    assert any("reward" in s for row in rows for s in row["segments"])


def test_evaluations_and_samples_show_whole_conversations(tmp_path):
    run_ranks(evaluated, 1, str(tmp_path / "run"), sections(tmp_path, "Echoes", **SHOWN))
    told = metrics(tmp_path / "run")[-1]
    assert told["eval/score"] > 1 and told["eval/turns"] == 3
    check_shown(tmp_path / "run")


def test_a_rank_that_does_not_sample_shows_whole_conversations_too(tmp_path):
    run_ranks(split_demo, 2, str(tmp_path / "run"), split(1), sections(tmp_path, "Echoes", **SHOWN))
    check_shown(tmp_path / "run")


NAN = """
import torch
from spmdrl.algos.losses import ppo

def broken(x, clip_low=None, clip_high=None, dual_clip=None):
    per_token, stats = ppo(x)
    return per_token * torch.nan, stats
"""


def replayed(world, place: str) -> list[str]:
    return list(replay(Path(place)))


def test_a_replay_shows_conversations_turn_by_turn(tmp_path):
    (tmp_path / "loss.py").write_text(NAN)
    algo = {"advantage": "turn_rloo", "updates_per_step": 1, "kl_coef": 0.0, "loss": f"{tmp_path}/loss.py:broken"}
    settings = sections(tmp_path, "Echoes", algo=algo, run={"steps": 1})
    run_ranks(evaluated, 1, str(tmp_path / "run"), settings)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(demo(str(tmp_path / "run"), **settings)))
    [lines] = run_ranks(replayed, 1, str(tmp_path / "run" / "spikes" / "step_000001"))
    begin = next(i for i, line in enumerate(lines) if "|dlogp|" in line) + 1
    shown = [lines[at : at + 7] for at in range(begin, len(lines), 7)]
    assert len(shown) == 8, lines
    for head, *turns in shown:
        words = [line.split() for line in turns]
        kinds = ["observed", "sampled"] * 3
        assert [line[:3] for line in words] == [["turn", str(i // 2), kinds[i]] for i in range(6)]
        earned = sum(float(line[-1]) for line in words if "reward" in line)
        assert float(head.split()[5]) == pytest.approx(1.0 + earned)
    assert any("reward 0.25" in line for line in lines)
    (tmp_path / "Echoes.yaml").unlink()
    [again] = run_ranks(replayed, 1, str(tmp_path / "run" / "spikes" / "step_000001"))
    assert again[begin - 1].startswith("calls    not shown: --env") and again[begin + 1 :] == lines[begin:]


def test_rewards_of_the_environment_are_weighed_among_others(tmp_path):
    """The other reward grades the last response alone; rewards of turns are weighed where they fell."""
    other = tmp_path / "other.py"
    other.write_text("def length(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.125\n")
    reward = {"function": f"{other}:length", "more": ("environment=0.5",)}
    one = run_ranks(sampled, 1, str(tmp_path / "run"), sections(tmp_path, "Echoes", reward=reward))[0]
    assert len(one) == 16 and any(given > 1 for *_, given, _, _ in one)
    for _, _, _, reward, given, parts, segments in one:
        turns = sum(r for *_, r in segments)
        assert given == 1.0 + 2 * turns and reward == pytest.approx(0.125 + 0.5 * given)
        assert dict(parts) == {"length": 0.125, "environment": given, "environment/odd": 1.0}


def test_a_gate_that_takes_the_reward_takes_those_of_the_turns(tmp_path):
    """Else the last turn would be charged for what the others earned."""
    reward = {"function": "environment", "gate": ("odd",)}
    settings = sections(tmp_path, "Echoes", "settings: {turns: 2, uneven: true}", reward=reward)
    (rows,) = run_ranks(sampled, 1, str(tmp_path / "run"), settings)
    shut = [row for row in rows if dict(row[5])["odd"] == 0]
    held = [row for row in rows if dict(row[5])["odd"] == 1]
    assert any(given > 0.5 for _, _, _, _, given, _, _ in shut), "turns earned something"
    assert all(reward == 0 and not any(r for *_, r in segments) for _, _, _, reward, _, _, segments in shut)
    assert held and all(reward == given == 1 + sum(r for *_, r in s) for _, _, _, reward, given, _, s in held)


def opened_before_the_first_response(world, folder: str, settings: dict) -> tuple[int, int, int]:
    """Returns the engine's places, the conversations that were opened before a response ended, and all that ended."""
    run = open_demo(world, folder, settings)
    environment, opened, ended = run.sampler.environment, [], []
    open_, answer = environment.open, environment.answer
    environment.open = lambda plan, group, episode: (opened.append(not ended), open_(plan, group, episode))
    environment.answer = lambda *response: (ended.append(1), answer(*response))
    rows = rows_of(run)
    places = run.sampler.engine.capacity
    run.close()
    return places, sum(opened), len(rows)


def test_conversations_are_opened_ahead_of_the_engine_but_no_more_than_it_has_places(tmp_path):
    """The others are left to engines that end earlier."""
    settings = sections(
        tmp_path, "Echoes", rollout={"max_sequences": 4, "samples_per_prompt": 2, "prompts_per_step": 8}
    )
    ((places, opened, ended),) = run_ranks(opened_before_the_first_response, 1, str(tmp_path / "run"), settings)
    assert (places, ended) == (4, 16) and places < opened <= 2 * places
