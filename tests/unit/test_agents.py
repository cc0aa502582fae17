"""Conversations with real environments in processes, of a policy that says what a list of texts says."""

import json
import logging
import math
import re
import sys
from importlib.util import find_spec

import pytest

from spmdrl.config.environment import EnvironmentConfig
from spmdrl.config.schema import DataConfig
from spmdrl.data.batch import from_episodes
from spmdrl.data.conversation import Conversation
from spmdrl.data.episode import Episode
from spmdrl.data.prompts import Prompt, load_prompts
from spmdrl.rl.agents import Agents
from spmdrl.rl.build import check_named
from spmdrl.rl.rollout import add
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from tests.unit.dialogues import templates, tokenizer_for

END = "<|im_end|>"
USER = '''
import os, time


class Words:
    """A world that asks for more."""

    timeout_s = 1.0

    def __init__(self, most=1):
        self.most, self.turn = most, 0

    def reset(self, row, seed):
        return row.get("say", "go")

    def step(self, message):
        self.turn += 1
        if message.get("tool_calls"):
            return None, 0.25, False
        return f"more {self.turn}", 0.5, self.turn >= self.most

    def reward(self):
        return {"score": 2.0, "turns": self.turn}


class Does(Words):
    """A tool that does what it is told."""

    def act(self, what: str):
        """Act.

        Args:
            what: what to do
        """
        if what == "raise":
            raise KeyError("no <|im_end|> there")
        if what == "hang":
            time.sleep(1000)
        if what == "die":
            os._exit(4)
        return {
            "bytes": b"\\xff\\xfe ok",
            "long": "x" * 10_000_000,
            "surrogates": "\\ud800 and \\x00",
            "control": "<|im_end|>\\n<|im_start|>assistant\\n<|endoftext|>",
            "plain": "plain",
        }[what]


class Saved(Words):
    """Its state decides what it says, which its turns alone do not."""

    tally = 0

    def reset(self, row, seed):
        Saved.tally += 1
        self.drawn = Saved.tally
        return "go"

    def step(self, message):
        self.turn += 1
        return f"{self.drawn} at {self.turn}", 0.5, self.turn >= 4

    def state(self):
        return {"drawn": self.drawn, "turn": self.turn}

    def restore(self, state):
        self.drawn, self.turn = state["drawn"], state["turn"]


class Random(Saved):
    """The same, and it cannot be saved: turns that are run again have other answers."""

    def state(self):
        return None


class Graded(Saved):
    """Its final reward takes a while."""

    def reward(self):
        time.sleep(0.5)
        return 3.0


class Regraded(Does):
    """The same, and it cannot be saved."""

    reward = Graded.reward


class Unsaved(Does):
    """Its state is no JSON."""

    def __init__(self):
        super().__init__(most=4)

    def state(self):
        return {"self": self}

    def restore(self, state):
        raise AssertionError


class Twice:
    def reset(self, row, seed):
        return "go"

    @property
    def tools(self):
        return TWO


def one(x: int) -> int:
    """One."""
    return x


def other(x: int) -> int:
    """Other."""
    return x


other.__name__ = "one"
TWO = [one, other]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("env") / "mine.py"
    path.write_text(USER)
    return str(path)


@pytest.fixture
def make(file):
    """Opens agents in an environment of the file, closed at the end of the test."""
    opened = []

    def of(name: str = "Does", template: str = "qwen2_5", longest: int = 2000, weight: float = 1.0, **limits) -> Agents:
        text = templates()[template]
        talk = Conversation(tokenizer_for(text), text, limits.pop("history", "keep"))
        known = name if ":" in name or name == "rows" else f"{file}:{name}"
        found = EnvironmentConfig(known, **limits)
        ends = {talk.tokenizer.convert_tokens_to_ids(END)}
        opened.append(Agents(found, talk, ends, longest, "answer", weight))
        return opened[-1]

    yield of
    for agents in opened:
        agents.close()


class Played:
    """A group of episodes whose responses come from lists, one for each episode."""

    def __init__(self, agents: Agents, *scripts: list[str], row: dict | None = None, tokens: int = 4000):
        prompt = Prompt(7, [], "truth", "source", row or {}, "", "go")
        self.agents, self.scripts = agents, [list(script) for script in scripts]
        self.plan = RolloutPlan("test", [prompt], len(scripts), (3, 0), 0, tokens, 1.0)
        self.plan.turn_tokens = agents.turn_tokens
        self.group: PromptGroup = self.plan.group(0)
        self.why: dict[int, str] = {}

    def play(self, turns: int = 1000, wait: float = 0.0) -> list[Episode]:
        """Goes on with all episodes for so many turns each, or until they end.

        wait: seconds that environments have, at most, before episodes that have begun go on.
        """
        owed, said = len(self.group.open), dict.fromkeys(range(len(self.scripts)), 0)
        for episode in self.group.open:
            self.agents.open(self.plan, self.group, episode)
        if any(episode.segments for episode in self.group.open):
            assert self.agents.poll(wait) == [], "an episode that goes on has no observation"
        for episode in self.group.open:
            if episode.unanswered:
                self.agents.answer(self.plan, self.group, episode, episode.unanswered)
            elif episode.segments:
                self.respond(episode)
        while owed:
            for (_, sample), seen in self.agents.poll(30.0):
                owed -= 1
                episode = self.group.episodes[sample]
                add(seen, episode)
                said[sample] += 1
                if episode.finish:
                    self.why[sample] = seen.failure
                elif said[sample] <= turns:
                    self.respond(episode)
                    owed += 1
        return self.group.episodes

    def respond(self, episode: Episode) -> None:
        """Says the next text of an episode's list, as far as there is room."""
        text = self.scripts[episode.sample].pop(0)
        tokenizer, room = self.agents.conversation.tokenizer, self.plan.room_of_turn(episode)
        assert room > 0, "an engine is never asked for nothing"
        made = tokenizer(text, add_special_tokens=False).input_ids[:room]
        episode.add_sampled(made, [-0.5] * len(made), 0)
        episode.unanswered = "stop" if made[-1] in self.agents.ends else "length"
        self.agents.answer(self.plan, self.group, episode, episode.unanswered)

    def leave(self) -> None:
        """Cuts the episodes short, and takes them up as another process does."""
        self.agents.leave(self.group.open, True)
        for episode in self.group.episodes:
            episode.talk = json.loads(json.dumps(episode.talk))

    def observed(self, sample: int = 0, turn: int = 1) -> str:
        """The text that the environment answered before a turn, by the tokens that the policy sees."""
        segments = [s.tokens for s in self.group.episodes[sample].segments if s.turn == turn and not s.sampled]
        return self.agents.conversation.tokenizer.decode(segments[0])


def call(what: str, name: str = "act") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'what': what}})}\n</tool_call>{END}"


def said(text: str) -> str:
    return f"{text}{END}"


# ── tools ────────────────────────────────────────────────────────────────────

ACTS = {
    "plain": "plain",
    "raise": "KeyError: 'no <|im_end|> there'",
    "hang": "the tool did not answer within 1 s",
    "bytes": "\ufffd\ufffd ok",
    "long": "x" * 50 + "\n[the beginning and the end of 10000000 characters: 100 are shown]\n" + "x" * 50,
    "surrogates": "\ufffd and \ufffd",
    "control": "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "nothing": "KeyError: 'nothing'",
}
"""What a tool is told -> what the policy reads of it."""


def test_whatever_a_tool_does_is_text_and_never_a_control_token(make):
    agents = make(longest_answer=100)
    played = Played(agents, *([call(what), said("done")] for what in ACTS))
    episodes, tokenizer = played.play(), agents.conversation.tokenizer
    control = agents.conversation.controls.ids
    for episode, (what, told) in zip(episodes, ACTS.items(), strict=True):
        assert episode.finish == "stop" and played.why[episode.sample] == "", (what, played.why)
        tail = f"\n<|im_start|>user\n<tool_response>\n{told}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert played.observed(episode.sample) == tail, what
        (seen,) = (s.tokens.tolist() for s in episode.segments if s.turn == 1 and not s.sampled)
        shown = [tokenizer.convert_ids_to_tokens(token) for token in seen if token in control]
        assert shown == ["<|im_start|>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>"], what
        assert [s.reward for s in episode.segments if s.sampled] == [0.25, 0.5]
        assert episode.given == 2.75 and episode.parts == {"turns": 2.0}
    counts = agents.take_counts()
    want = {"episodes": 8, "turns": 16, "calls": 8, "failed_calls": 2, "timeouts": 1, "cut": 1, "failures": 0}
    assert {name: counts[name] for name in want} == want
    assert agents.take_counts()["turns"] == 0 and not agents.talks


def test_a_tool_that_ends_its_process_costs_its_episode_alone(make):
    played = Played(make(), [call("die")], [call("plain"), said("done")])
    bad, good = played.play()
    assert bad.finish == "abort" and "ended its process" in played.why[0] and "seed" in played.why[0]
    assert good.finish == "stop" and good.given == 2.75


def test_malformed_and_unknown_calls_are_answered(make):
    odd = ["<tool_call>\n{oops\n</tool_call>" + END, call("x", "nobody"), call("plain") * 2, "\ufffd\ufffd" + END]
    agents = make()
    played = Played(agents, *([text, said("done")] for text in odd))
    assert [e.finish for e in played.play()] == ["stop"] * 4
    assert "<tool_response>" in played.observed(0) and "the tools are: act" in played.observed(1)
    assert agents.take_counts()["malformed"] >= 2


@pytest.mark.skipif(not find_spec("mcp"), reason="mcp is not installed")
def test_an_mcp_server_that_dies_is_told_and_comes_back(make, tmp_path):
    from tests.unit.test_env_mcp import SERVER

    (tmp_path / "server.py").write_text(SERVER)
    add = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' + END
    die = '<tool_call>\n{"name": "die", "arguments": {}}\n</tool_call>' + END
    played = Played(make(f"mcp:{sys.executable} {tmp_path / 'server.py'}"), [add, die, add, said("three")])
    (episode,) = played.play()
    assert episode.finish == "stop" and played.why[0] == ""
    answers = [played.observed(turn=turn) for turn in (1, 2, 3)]
    assert "the MCP server ended during the call" in answers[1]
    assert answers[0] == answers[2] and "<tool_response>\n3\n</tool_response>" in answers[0]


def test_two_tools_of_one_name_are_refused_at_start(make, file):
    for name in ("TWO", "Twice"):
        with pytest.raises(ValueError, match="two tools of the name one: rename one") as refused:
            make(name)
        assert name in str(refused.value)


# ── limits ───────────────────────────────────────────────────────────────────


def test_a_world_that_never_ends_is_ended_by_turns_tokens_or_time(make):
    long = {"settings": {"most": 10**9}}
    agents = make(**long)
    (turns,) = Played(make(max_turns=3, **long), [said("a")] * 9).play()
    assert turns.finish == "turns" and turns.turns == 3 and turns.given == 2.0 + 3 * 0.5
    assert [s.reward for s in turns.segments if s.sampled] == [0.5] * 3
    for tokens in range(20, 32):
        (length,) = Played(agents, [said("a")] * 99, tokens=tokens).play()
        assert length.finish == "length" and length.made <= tokens
        assert length.given == 2.0 + length.turn_rewards
    (time,) = Played(make(max_seconds=1e-9, **long), [said("a")] * 9).play()
    assert time.finish == "time" and time.turns == 1 and time.given == 2.5


def test_a_response_that_takes_all_tokens_is_heard_if_it_ended(make):
    """Its end makes it whole: the world may end the episode by it. One that was cut off is not heard."""
    agents = make()
    size = len(agents.conversation.tokenizer(said("the answer")).input_ids)
    (whole,) = Played(agents, [said("the answer")], tokens=size).play()
    assert whole.finish == "stop" and whole.given == 2.5
    (cut,) = Played(agents, [said("the answer")], tokens=size - 1).play()
    assert cut.finish == "length" and cut.given == 2.0


def test_a_turn_without_an_end_gets_one_that_the_policy_sees(make):
    (episode,) = (played := Played(make(turn_tokens=2, settings={"most": 2}), ["one two three", said("x")])).play()
    assert episode.finish == "stop" and len(episode.segments[1].tokens) == 2
    assert played.observed() == "<|im_end|>\n<|im_start|>user\nmore 1<|im_end|>\n<|im_start|>assistant\n"


def test_a_first_prompt_over_the_context_names_the_flag(make):
    agents = make(longest=300)
    for words, size in ((1000, " tokens"), (2_000_000, "10000000 characters")):
        played = Played(agents, [said("x")], row={"say": "word " * words})
        (episode,) = played.play()
        assert episode.finish == "abort" and f"{size}; raise --rollout.max-prompt-tokens 300" in played.why[0]
    assert Played(agents, [said("x")]).play()[0].finish == "stop"


# ── cut short ────────────────────────────────────────────────────────────────


def told(played: Played) -> list:
    return [(s.tokens.tolist(), s.sampled, s.turn, s.reward) for s in played.group.episodes[0].segments]


@pytest.mark.parametrize("name", ["Saved", "Unsaved"])
def test_a_conversation_goes_on_elsewhere_from_its_state_or_its_turns(make, name, caplog):
    script = [said("one"), call("plain") if name == "Unsaved" else said("two"), said("three"), said("four")]
    whole = Played(make(name), [*script, said("five")])
    whole.play()
    first = make(name)
    parts = Played(first, [*script, said("five")])
    parts.play(turns=2)
    with caplog.at_level(logging.WARNING):
        parts.leave()
    kept = parts.group.episodes[0].talk
    assert kept and (kept["state"] is None) == (name == "Unsaved")
    assert not first.talks and first.pool.pending == 0
    parts.agents = make(name)
    parts.play(turns=0)
    # It may be cut short again before its environment is there.
    parts.leave()
    parts.agents = second = make(name)
    second.open(parts.plan, parts.group, parts.group.episodes[0])
    parts.leave()
    parts.agents = make(name)
    (episode,) = parts.play()
    assert told(parts) == told(whole) and episode.finish == "stop" and parts.why[0] == ""
    assert episode.given == whole.group.episodes[0].given


@pytest.mark.parametrize("name", ["Saved", "Unsaved"])
def test_a_turn_that_is_not_answered_at_a_cut_is_said_again(make, name):
    script = [said("one"), call("plain") if name == "Unsaved" else said("two"), said("three"), said("four")]
    whole = Played(make(name), list(script))
    whole.play()
    parts = Played(make(name), list(script))
    parts.play(turns=1)
    (episode,) = parts.group.episodes
    parts.respond(episode)
    parts.leave()
    assert parts.agents.take_counts()["turns"] == 1
    # It may be cut short again before its environment is there, and before it is said again.
    for asks in (False, True):
        parts.agents = make(name)
        parts.agents.open(parts.plan, parts.group, episode)
        if asks:
            parts.agents.answer(parts.plan, parts.group, episode, episode.unanswered)
        parts.leave()
        assert parts.agents.take_counts()["turns"] == 0
    parts.agents = make(name)
    parts.play()
    assert parts.agents.take_counts()["turns"] == len(script) - 1
    assert told(parts) == told(whole) and episode.finish == "stop" and parts.why[0] == ""
    assert episode.given == whole.group.episodes[0].given and not episode.unanswered


@pytest.mark.parametrize("name", ["Graded", "Regraded"])
def test_a_final_reward_that_is_not_there_at_a_cut_is_asked_for_again(make, name):
    script = [said("one"), said("two"), said("three"), said("four")][: 4 if name == "Graded" else 1]
    whole = Played(make(name), list(script))
    whole.play()
    parts = Played(make(name), list(script))
    parts.play(turns=len(script) - 1)
    (episode,) = parts.group.episodes
    parts.respond(episode)
    while parts.agents.talks[0, 0].asked != "score":
        assert parts.agents.poll(0.02) == []
    parts.leave()
    parts.agents = make(name)
    parts.play()
    assert told(parts) == told(whole) and parts.why[0] == ""
    assert (episode.finish, episode.given) == ("stop", whole.group.episodes[0].given)


@pytest.mark.parametrize("wait", [0.0, 20.0])
def test_an_environment_that_cannot_be_run_again_fails_alone(make, wait):
    """The engine goes on with the episode while the turns are run again; it ends when its response is there.

    wait: seconds until then, at most.
    """
    played = Played(make("Random"), *[[said("one"), said("two")]] * 2)
    played.play(turns=1)
    played.leave()
    played.agents = make("Random")
    Played(played.agents, [said("x")] * 4).play()
    one, other = played.play(wait=wait)
    assert one.finish == other.finish == "abort"
    assert all("gave other messages when its turns were run again" in why for why in played.why.values())
    assert played.agents.take_counts()["failures"] == 2 and not played.agents.talks


# ── history ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("history", ["keep", "branch"])
def test_a_template_that_drops_thoughts_keeps_one_branch_or_forks(make, history):
    """Qwen3's. The independent reference of a branch is the tokenizer's own rendering of the messages so far."""
    agents = make("Words", template="qwen3", history=history, settings={"most": 3})
    assert agents.conversation.rewrites
    texts = [f"<think>\nfirst thought {i}\n</think>\n\nword {i}{END}" for i in range(3)]
    played = Played(agents, texts)
    (episode,) = played.play()
    tokenizer = agents.conversation.tokenizer
    assert episode.finish == "stop" and agents.take_counts()["forks"] == (2 if history == "branch" else 0)
    paths = [episode.along(lambda s: s.tokens, path).tolist() for path in episode.paths()]
    messages, prompts = [{"role": "user", "content": "go"}], []
    for i, text in enumerate(texts):
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        messages.append({"role": "assistant", "content": text.removesuffix(END)})
        messages.append({"role": "user", "content": f"more {i + 1}"})
    made = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if history == "branch":
        assert paths == [prompt + turn for prompt, turn in zip(prompts, made, strict=True)]
        assert "thought" not in tokenizer.decode(prompts[2])
    else:
        between = [
            tokenizer(f"\n<|im_start|>user\nmore {i}<|im_end|>\n<|im_start|>assistant\n").input_ids for i in (1, 2)
        ]
        assert paths == [prompts[0] + made[0] + between[0] + made[1] + between[1] + made[2]]
    episode.reward = episode.given or 0.0
    batch = from_episodes([episode], turns=True)
    ends = batch.lengths.cumsum(0).tolist()
    packed = [
        batch.token["tokens"][end - n : end].tolist() for end, n in zip(ends, batch.lengths.tolist(), strict=True)
    ]
    assert packed == paths, "the batch holds the paths"
    sampled = batch.token["tokens"][batch.token["mask"]].tolist()
    assert sampled == sum(made, []), "the loss of each sampled token counts once"


def test_an_answer_of_a_tool_forks_no_thought_and_the_next_question_does(make):
    """Qwen3's template shows thoughts between a call and its answer, up to the next message of the user."""
    agents = make(template="qwen3", history="branch", settings={"most": 3})
    think = "<think>\nfirst thought\n</think>\n\n"
    played = Played(agents, [think + call("plain"), think + said("a"), think + said("b")])
    (episode,) = played.play()
    tokenizer = agents.conversation.tokenizer
    before, after = (tokenizer.decode(episode.along(lambda s: s.tokens, path)) for path in episode.paths())
    assert agents.take_counts()["forks"] == 1 and episode.turns == 3 and episode.finish == "stop"
    assert before.count("first thought") == 2 and after.count("first thought") == 1
    assert "<tool_response>\nplain\n</tool_response>" in before and '{"what": "plain"}' in after
    assert after.endswith(f"more 2{END}\n<|im_start|>assistant\n{think}b{END}")


# ── rows and rewards ─────────────────────────────────────────────────────────


def test_each_row_names_its_environment(make, file):
    agents = make("rows")
    named = [f"{file}:Does", {"name": f"{file}:Does", "settings": {"most": 2}}]
    for i, env in enumerate(named):
        played = Played(agents, [said("a"), said("b")], row={"env": env})
        assert played.play()[0].finish == "stop" and played.group.episodes[0].turns == i + 1
    for env, why in (
        (None, "row 7 has no environment in the column 'env'"),
        ({"settings": {}}, "row 7 has no environment in the column 'env'"),
        ({"name": f"{file}:Does", "setings": {"most": 2}}, "row 7: .* column 'env' has the key 'setings', and takes"),
        (f"{file}:Nobody", "has no Nobody"),
        ({"name": f"{file}:Does", "settings": {"size": 2}}, "do not fit"),
    ):
        played = Played(agents, [], row={"env": env} if env else {})
        (episode,) = played.play()
        assert episode.finish == "abort" and re.search(why, played.why[0]), played.why
    assert agents.take_counts()["failures"] == 5 and not agents.talks


def test_rows_without_the_column_are_refused_before_a_model_is_built(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": "go", "answer": "", "envs": "builtin:guess"}) + "\n")
    prompts = load_prompts(str(source), DataConfig(), None, 10, begun=True)
    with pytest.raises(ValueError, match=r"rows.jsonl: no row names its environment in a column 'env', as --env rows"):
        check_named("rows", prompts)
    check_named("builtin:guess", prompts)
    source.write_text(json.dumps({"prompt": "go", "answer": "", "env": {"name": "builtin:guess"}}) + "\n")
    check_named("rows", load_prompts(str(source), DataConfig(), None, 10, begun=True))


def test_a_row_in_verls_layout_names_its_environment(make, file, tmp_path):
    row = {
        "data_source": "s",
        "prompt": [{"role": "user", "content": "go"}],
        "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": 3},
        "env": f"{file}:Words",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    agents = make("rows")
    (prompt,) = load_prompts(str(tmp_path / "rows.jsonl"), DataConfig(), None, 10, begun=True).prompts
    assert prompt.extra == {"index": 3, "env": f"{file}:Words"} and prompt.ground_truth == "4"
    assert Played(agents, [said("a")], row=prompt.extra).play()[0].finish == "stop"


def test_the_weight_of_the_environment_scales_the_rewards_of_turns(make):
    """What was given stays unweighted: the grader weighs it (`--reward.more environment=0.5`)."""
    (episode,) = Played(make(weight=0.5, settings={"most": 3}), [said("a")] * 3).play()
    assert [s.reward for s in episode.segments if s.sampled] == [0.25] * 3
    assert episode.given == 2.0 + 1.5 and math.isclose(episode.turn_rewards, 0.75)
