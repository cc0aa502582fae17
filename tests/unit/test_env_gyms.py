"""Environments of reasoning-gym, Gymnasium, old Gym, skyrl-gym and TextArena, unchanged, in this project's form."""

import functools
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from spmdrl.data.sources import read_source
from spmdrl.env.base import AssistantTurn, Opening, PoolSettings, Reply
from spmdrl.env.gyms import is_mine, wrap
from spmdrl.env.messages import opening, seed_of
from spmdrl.env.play import Play
from spmdrl.env.pool import Pool

GYMS = Path(__file__).resolve().parents[2] / ".venv-gyms" / "bin" / "python"
APART = pytest.mark.skipif(not GYMS.exists(), reason="./launch/install.sh --gyms has not run")
START = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Ready?"}]


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def played(env: Any, row: dict, texts: list[str], seed: int = 3) -> tuple:
    """Play texts until the end. Return the first messages and the answers."""
    begun, answers = env.reset(row, seed), []
    for text in texts:
        answers.append(env.step(said(text)))
        if answers[-1][2]:
            break
    env.close() if hasattr(env, "close") else None
    return begun, answers


# reasoning-gym


@pytest.fixture
def puzzles():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


def test_a_row_of_reasoning_gym_is_answered_until_it_is_right(puzzles):
    row = read_source("reasoning-gym:basic_arithmetic?size=3&seed=5", "prompt", "answer").rows[1]
    assert is_mine(None, "reasoning_gym:basic_arithmetic") and is_mine(None, "reasoning-gym:basic_arithmetic")
    env = wrap("reasoning_gym:basic_arithmetic", {"attempts": 4})
    right = f"I think <answer>{row['answer']}</answer>"
    begun, answers = played(env, row, ["<answer>no</answer>", "hm", right, right])
    assert begun is None, "the prompt is the row's"
    assert answers == [
        ("Your answer is not right. You have 3 attempts left.", None, False),
        ("Your answer is not right. You have 2 attempts left.", None, False),
        (None, None, True),
    ]
    assert env.reward() == {"score": 1.0, "first": 0.0, "attempts": 3.0, "format": pytest.approx(2 / 3)}


def test_attempts_end_and_the_best_or_the_last_counts(puzzles):
    """A part of the answer is worth a part of the score to reasoning-gym's own scorer: here 1/2 and 1/3."""
    row = {"task": "caesar_cipher", "config": {"size": 1, "seed": 0}, "entry": {"question": "?", "answer": "AB"}}
    texts = ["ABxx", "ABxxxx", "AB"]
    for keep, score in (("best", 0.5), ("last", 1 / 3)):
        env = wrap("reasoning-gym:caesar_cipher", {"attempts": 2, "keep": keep})
        _, answers = played(env, row, texts)
        assert answers == [("Your answer is not right. You have one attempt left.", None, False), (None, None, True)]
        expected = {"score": pytest.approx(score), "first": pytest.approx(0.5), "attempts": 2.0, "format": 0.0}
        assert env.reward() == expected
    assert wrap("reasoning-gym:caesar_cipher", {}).reward()["score"] == 0.0, "no attempt was made"


def test_puzzles_are_drawn_by_the_rows_seed_or_the_runs(puzzles):
    import reasoning_gym

    env = wrap("reasoning_gym:leg_counting", {"max_animals": 3})
    by_run = [env.reset({"prompt": START}, seed) for seed in (1, 2, 1)]
    assert by_run[0] == by_run[2] != by_run[1]
    by_row = [env.reset({"prompt": START, "seed": 1}, seed) for seed in (1, 2)]
    assert by_row == [by_run[0]] * 2
    entry = reasoning_gym.create_dataset("leg_counting", max_animals=3, size=1, seed=1)[0]
    assert by_run[0][0] == START[0] and by_run[0][1]["content"].startswith(f"Ready?\n\n{entry['question']}\n\n")
    assert env.step(said(f"<answer>{entry['answer']}</answer>")) == (None, None, True)


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_a_broken_puzzle_is_said(puzzles):
    """The scorer of prime_factorization reads numbers between its signs, and raises on anything else (0.1.25)."""
    row = read_source("reasoning-gym:prime_factorization?size=1", "prompt", "answer").rows[0]
    env = wrap("reasoning_gym:prime_factorization", {"attempts": 2})
    _, answers = played(env, row, ["<answer>two</answer>", row["answer"]])
    assert [each[2] for each in answers] == [False, True] and env.reward()["score"] == 1.0
    env.reset({**row, "entry": {**row["entry"], "answer": "two"}}, 0)
    with pytest.raises(ValueError, match="invalid literal"):
        env.step(said("<answer>two</answer>"))


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("reasoning_gym:leg_count", {}, "no task reasoning_gym:leg_count: did you mean 'leg_counting'"),
        ("reasoning_gym:leg_counting", {"attempts": 0}, "attempts must be a whole number of 1 or more, not 0"),
        ("reasoning_gym:leg_counting", {"attempts": True}, "attempts must be a whole number of 1 or more, not True"),
        ("reasoning_gym:leg_counting", {"keep": "all"}, "keep must be best or last, not 'all'"),
    ],
)
def test_puzzles_that_are_refused(puzzles, name, settings, message):
    with pytest.raises(ValueError, match=message):
        wrap(name, settings)


def test_rows_that_puzzles_refuse(puzzles):
    env = wrap("reasoning_gym:leg_counting", {"legs": 3})
    with pytest.raises(ValueError, match="refuses {'legs': 3}"):
        env.reset({}, 0)
    with pytest.raises(ValueError, match="got a row of the task other: name that task"):
        env.reset({"task": "other", "entry": {}, "config": {}}, 0)
    with pytest.raises(ValueError, match="the column seed of a row must hold a whole number, not '1'"):
        wrap("reasoning_gym:leg_counting", {}).reset({"seed": "1"}, 0)


def test_openings():
    assert opening({"prompt": "Go."}, "You see a door.") == [{"role": "user", "content": "Go.\n\nYou see a door."}]
    assert opening({}, "A") == [{"role": "user", "content": "A"}]
    assert opening({"prompt": START[:1]}, "A") == [START[0], {"role": "user", "content": "A"}]
    row = {"prompt": START}
    opening(row, "A")
    assert row["prompt"][1]["content"] == "Ready?", "the row stays as it was"
    assert seed_of({}, 2**40 + 5) == 5 and seed_of({"seed": -1}, 0) == 2**31 - 1


# Gymnasium


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="gymnasium is not installed")


def test_an_environment_of_gymnasiums_registry(gymnasium):
    """Frozen lake without slipping: the same numbers as Gymnasium itself gives for the same seed and moves."""
    name, settings = "gymnasium:FrozenLake-v1", {"render_mode": "ansi", "is_slippery": False}
    assert is_mine(None, name)
    env, own = wrap(name, settings), gymnasium.make("FrozenLake-v1", **settings)
    own.reset(seed=3)
    moves = [2, 2, 1, 1, 1, 2]
    begun, answers = played(env, {"prompt": START}, [f"I go {move}." for move in moves])
    assert begun == [START[0], {"role": "user", "content": "Ready?\n\n[S]FFF\nFHFH\nFFFH\nHFFG"}]
    for move, (text, reward, done) in zip(moves, answers, strict=True):
        _, its_reward, terminated, truncated, _ = own.step(move)
        assert (reward, done) == (its_reward, terminated or truncated)
        assert text.replace("[", "\x1b[41m").replace("]", "\x1b[0m") == own.render().strip("\n")
    assert answers[-1] == ("  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]", 1, True)


def test_messages_without_a_move_are_answered_without_a_step(gymnasium):
    env = wrap("gymnasium:FrozenLake-v1", {})
    assert env.reset({}, 0) == [{"role": "user", "content": "0"}]
    for text in ("", "north", "4", "2 or -1"):
        assert env.step(said(text)) == ("Answer with a whole number from 0 to 3.", 0.0, False)
    assert env.step({"role": "assistant", "content": None})[0].startswith("Answer with")


def test_seeds_and_time_limits_of_gymnasium(gymnasium):
    """Slips are drawn from the seed: equal seeds play alike, and the registry's limit of steps ends an episode."""
    name = "gymnasium:FrozenLake-v1"
    runs = [
        played(wrap(name, {"max_episode_steps": 5}), row, ["1"] * 9, seed)
        for row, seed in (({}, 1), ({}, 1), ({}, 2), ({}, 4), ({"seed": 1}, 8))
    ]
    assert runs[0] == runs[1] == runs[4]
    assert any(run != runs[0] for run in runs[2:4])
    assert all(run[1][-1][2] and len(run[1]) <= 5 for run in runs)


def test_a_text_environment_of_gymnasium(gymnasium):
    class Words(gymnasium.Env):
        """Wants a word with a letter drawn from the seed."""

        observation_space = gymnasium.spaces.Text(100)
        action_space = gymnasium.spaces.Text(100)

        def __init__(self, limit: int = 3):
            self.limit, self.closed = limit, False

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.letter = (options or {}).get("letter") or "abc"[int(self.np_random.integers(3))]
            self.said = 0
            return f"Say a word with {self.letter}.", {}

        def step(self, action):
            self.said += 1
            return (
                [{"role": "system", "content": "hm"}],
                self.np_random.random(),
                self.letter in action,
                self.said >= 2,
                {},
            )

        def close(self):
            self.closed = True

    assert is_mine(Words, "words.py:Words")
    env = wrap(Words, {"limit": 2})
    begun, answers = played(env, {"options": {"letter": "z"}}, ["no", "no"], 11)
    assert begun == [{"role": "user", "content": "Say a word with z."}]
    own = Words()
    own.reset(seed=11)
    own.np_random.random()
    assert [each[2] for each in answers] == [False, True], "the second is cut"
    assert answers[0][0] == [{"role": "system", "content": "hm"}]
    assert env._env.closed
    assert played(env, {"prompt": START}, ["abc"], 5)[1][0][1] == played(env, {}, ["abc"], 5)[1][0][1]
    with pytest.raises(ValueError, match=r"Words cannot be made with the settings {'size': 3} \(TypeError"):
        wrap(Words, {"size": 3})
    short = functools.partial(Words, limit=7)
    assert is_mine(short, "words.py:short") and wrap(short, {})._env.limit == 7


@pytest.mark.parametrize(
    "name, message",
    [
        ("gymnasium:NoSuchLake-v1", "cannot be made .*NoSuchLake"),
        ("gymnasium:Pendulum-v1", "takes actions of Box; only texts and whole numbers"),
    ],
)
def test_environments_of_gymnasium_that_are_refused(gymnasium, name, message):
    with pytest.raises(ValueError, match=message):
        wrap(name, {})


# Classes in the forms of Gymnasium and of Gym before 0.26, which inherit from nothing


class New:
    def reset(self, seed=None):
        self.number = random.Random(seed).randrange(100)
        return f"Up to {self.number}", {"a": 1}

    def step(self, action):
        return action.upper(), 0.5, False, action == "stop", {}


class Old:
    def seed(self, seed):
        self.number = random.Random(seed).randrange(100)

    def reset(self):
        return f"Up to {self.number}"

    def step(self, action):
        return action.upper(), 0.5, action == "stop", {}


class Ours:
    def reset(self, row, seed): ...
    def step(self, message): ...


class OursInShort:
    def reset(self): ...
    def step(self, message): ...


class OfTrl:
    def reset(self, **kwargs): ...
    def step(self, direction: str) -> str:
        """Go somewhere."""
        return direction


class Tools:
    def reset(self, seed=None): ...
    def look(self) -> str:
        """Look."""
        return ""


@pytest.mark.parametrize("kind", [New, Old])
def test_classes_in_gyms_form(kind):
    assert is_mine(kind, "a.py:A")
    number = random.Random(3).randrange(100)
    begun, answers = played(wrap(kind, {}), {}, ["go", "stop", "go"])
    assert begun == [{"role": "user", "content": f"Up to {number}"}]
    assert answers == [("GO", 0.5, False), ("STOP", 0.5, True)]


def test_other_classes_and_names_are_left_to_others():
    assert not any(is_mine(kind, "a.py:A") for kind in (Ours, OursInShort, OfTrl, Tools, New(), 3, int))
    assert not is_mine(None, "builtin:guess") and not is_mine(None, "a.yaml")


def test_results_of_step_that_are_refused():
    class Wrong(New):
        def step(self, action):
            return "text"

    env = wrap(Wrong, {})
    env.reset({}, 0)
    with pytest.raises(TypeError, match=r"step returned str; it must return \(observation, reward, terminated"):
        env.step(said("go"))


# skyrl-gym


@pytest.fixture
def skyrl():
    return pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed: it wants an environment of its own")


def test_an_environment_of_skyrl_gyms_registry(skyrl):
    name = "skyrl_gym:gsm8k_multi_turn"
    assert is_mine(None, name)
    env = wrap(name, {"max_turns": 3})
    row = {"prompt": START, "reward_spec": {"ground_truth": "72"}, "env_class": "gsm8k_multi_turn", "extra_info": {}}
    begun, answers = played(env, row, ["?", "#### 71", "#### 72", "#### 72"])
    assert begun == START
    assert [(each[1], each[2]) for each in answers] == [(0, False), (pytest.approx(0.2 / 3), False), (1.0, True)]
    assert all(each[0][0]["role"] == "user" for each in answers[:2]) and answers[2][0] is None
    assert env.reward() == {"score": 0.0, "steps": 3.0}
    with pytest.raises(AssertionError, match="ground_truth is required"):
        env.reset({"prompt": START}, 0)
    with pytest.raises(ValueError, match="skyrl_gym:nothing cannot be made"):
        wrap("skyrl_gym:nothing", {})


def test_a_class_of_skyrl_gym(skyrl):
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Count(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
            super().__init__()
            self.goal, self.word = extras["goal"], env_config.words.end
            self.max_turns = extras.get("max_turns", 5)

        def init(self, prompt):
            return [*prompt, {"role": "user", "content": f"Count to {self.goal}."}], {}

        def step(self, action):
            self.turns += 1
            done = self.word in action or self.turns >= self.max_turns
            seen = [] if done else [{"role": "user", "content": "on"}]
            return BaseTextEnvStepOutput(
                observations=seen, reward=float(self.turns == self.goal), done=done, metadata={}
            )

    assert is_mine(Count, "count.py:Count")
    env = wrap(Count, {"env_config": {"words": {"end": "stop"}}})
    begun, answers = played(env, {"prompt": START[:1], "goal": 2}, ["1", "2 stop"])
    assert begun == [START[0], {"role": "user", "content": "Count to 2."}]
    assert answers == [([{"role": "user", "content": "on"}], 0.0, False), (None, 1.0, True)]
    with pytest.raises(AttributeError, match="env_config has no words: give it in the environment's settings"):
        wrap(Count, {}).reset({"goal": 1}, 0)


# TextArena


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena", reason="textarena is not installed: it wants an environment of its own")


def test_a_game_of_textarena(textarena):
    """The game's own answers alone are observed, move after move, and its reward falls at the end."""
    assert is_mine(None, "textarena:GuessTheNumber-v0")
    env = wrap("textarena:GuessTheNumber-v0", {"max_number": 9})
    begun = env.reset({"prompt": START}, 5)
    assert begun[0] == START[0] and begun[1]["content"].startswith("Ready?\n\nYou are Player 0.")
    state = random.getstate()
    random.seed(5)
    number = random.randint(1, 9)
    random.setstate(state)
    for guess in range(1, number):
        assert env.step(said(f"{guess}")) == ("The target number is higher.", 0.0, False)
    text, reward, done = env.step(said(f"I say [{number}]."))
    assert (reward, done) == (1, True) and text.startswith("Congratulations")


def test_games_of_textarena_do_not_disturb_each_other(textarena):
    """2048 draws a tile at each move from the global generator: games side by side play as they do alone."""
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3

    def alone(seed):
        return played(wrap("textarena:2048-v0", {}), {}, moves, seed)

    first, second = alone(1), alone(2)
    assert first != second and first == alone(1)
    envs = [wrap("textarena:2048-v0", {}) for _ in range(2)]
    random.seed(0)
    expected = random.Random(0).random()
    begun = [env.reset({}, seed) for env, seed in zip(envs, (1, 2), strict=True)]
    answers = [[env.step(said(move)) for env in envs] for move in moves]
    assert random.random() == expected, "the caller's own numbers are its own"
    for i, (its_begun, its_answers) in enumerate((first, second)):
        assert begun[i] == its_begun and [each[i] for each in answers][: len(its_answers)] == its_answers


def test_games_of_textarena_that_are_refused(textarena):
    with pytest.raises(ValueError, match="cannot be made .*NoSuchGame"):
        wrap("textarena:NoSuchGame-v0", {})
    with pytest.raises(ValueError, match="only games of one player"):
        wrap("textarena:TicTacToe-v0", {}).reset({}, 0)


def test_an_invalid_move_is_told_and_the_second_ends_the_game(textarena):
    env = wrap("textarena:TowerOfHanoi-v0-raw", {})
    assert "A: [3, 2, 1]" in env.reset({}, 0)[0]["content"]
    text, reward, done = env.step(said("[A C]"))
    assert "You moved disk 1 from A to C." in text and "[A C]" not in text and (reward, done) == (0.0, False)
    assert "invalid move" in env.step(said("[5]"))[0]
    assert env.step(said("[5]"))[1:] == (0.0, True)


# In the processes of a pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool(1, PoolSettings(timeout_s=60))
    yield pool
    pool.shutdown()


def asked(pool: Pool, what: str, *given: Any) -> Reply:
    getattr(pool, what)(*given)
    deadline = time.monotonic() + 60
    while not (found := pool.poll(1.0)):
        assert time.monotonic() < deadline, "the pool does not answer"
    return found[0][1]


def text_of(reply: Reply) -> str:
    assert not reply.failure
    return " ".join(message["content"] for message in reply.messages)


def test_an_environment_of_gymnasium_in_a_pool(pool, gymnasium):
    """It cannot be saved, and replayed turns bring it to where it was."""
    name, settings = "gymnasium:FrozenLake-v1", {"render_mode": "ansi"}
    assert pool.check(name, settings)
    with pytest.raises(ValueError, match="NoSuchLake"):
        pool.check("gymnasium:NoSuchLake-v1", {})
    opening = Opening(name, {"prompt": "Go.", "seed": 4}, 1, settings)
    begun = asked(pool, "open", "a", opening)
    assert text_of(begun).startswith("Go.\n\n[S]FFF") and begun.tools == []
    turns = [AssistantTurn(move) for move in ("2", "none", "1")]
    answers = [asked(pool, "say", "a", turn) for turn in turns]
    assert answers[1].messages[0]["content"] == "Answer with a whole number from 0 to 3." and not answers[1].done
    assert pool.state("a") is None
    again = asked(pool, "open", "b", opening, turns[:2])
    assert again.replayed == [answer.messages for answer in answers[:2]]
    assert asked(pool, "say", "b", turns[2]).messages == answers[2].messages
    pool.close("a")
    pool.close("b")


def test_attempts_in_a_pool(pool, puzzles):
    """A row goes to the process as JSON, and the state of a puzzle comes back."""
    row = read_source("reasoning-gym:basic_arithmetic?size=1", "prompt", "answer").rows[0]
    opening = Opening("reasoning_gym:basic_arithmetic", row, 1, {"attempts": 3})
    assert text_of(asked(pool, "open", "a", opening)) == row["prompt"]
    assert "2 attempts left" in text_of(asked(pool, "say", "a", AssistantTurn("<answer>no</answer>")))
    state = pool.state("a")
    assert state == {"scores": [0.0], "tagged": 1}
    asked(pool, "open", "b", opening, [], state)
    assert asked(pool, "say", "b", AssistantTurn(row["answer"])).done
    score = asked(pool, "score", "b")
    assert (score.reward, score.parts) == (1.0, {"first": 0.0, "attempts": 2.0, "format": 0.5})
    pool.close("a")
    pool.close("b")


@pytest.mark.parametrize("reward, shown", [("float('nan')", "nan"), ("'much'", "much"), ("[1, 2]", r"\[1, 2\]")])
def test_rewards_of_a_gym_that_are_no_numbers(pool, tmp_path, reward, shown):
    """The episode is left out; the message names the environment."""
    file = tmp_path / "gym_of_mine.py"
    file.write_text(
        "class Mine:\n    def reset(self, seed=None):\n        return 'Go', {}\n\n"
        f"    def step(self, action):\n        return 'on', {reward}, False, False, {{}}\n"
    )
    assert text_of(asked(pool, "open", "a", Opening(f"{file}:Mine", {}, 1))) == "Go"
    failure = asked(pool, "say", "a", AssistantTurn("hm")).failure
    assert re.search(f"gym_of_mine.py:Mine .*gave the reward {shown}, which is not a finite number", failure)
    pool.close("a")


# Packages that are missing


@pytest.mark.parametrize(
    "name, package",
    [
        ("gymnasium:a", "gymnasium"),
        ("skyrl_gym:a", "skyrl-gym"),
        ("textarena:a", "textarena"),
        ("reasoning_gym:a", "reasoning-gym"),
    ],
)
def test_a_missing_package_is_named(name, package, monkeypatch):
    import builtins
    import importlib

    kept = builtins.__import__

    def missing(wanted, *more, **keywords):
        if wanted.partition(".")[0] == name.partition(":")[0]:
            raise ImportError(f"No module named {wanted!r}")
        return kept(wanted, *more, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=f"{name} needs the package: pip install .*{package}"):
        wrap(name, {})


# an interpreter of their own


@pytest.mark.slow
@APART
def test_gyms_with_requirements_of_their_own_pass_there():
    """The tests above that are skipped where the two packages are not installed."""
    chosen = ["-k", "skyrl or textarena or invalid_move", __file__]
    ended = subprocess.run(
        [GYMS, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0 and "8 passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout


@APART
def test_a_pool_runs_environments_by_another_interpreter():
    name, settings = "textarena:GuessTheNumber-v0", {"max_number": 9}
    with Play(name, settings, PoolSettings(python=str(GYMS))) as play:
        assert "Player 0" in play.open(seed=5).messages[-1]["content"]
        for guess in range(1, 10):
            reply = play.say(f"[{guess}]")
            if reply.done:
                break
        assert reply.reward == 1 and "Congratulations" in reply.messages[0]["content"]
    with pytest.raises(ValueError, match="textarena"):
        Play(name, settings)
