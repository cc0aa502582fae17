"""Tools and environments in the forms that TRL documents, unchanged: `tools=` lists and `environment_factory=` classes.

https://huggingface.co/docs/trl/grpo_trainer#agent-training and https://huggingface.co/docs/trl/openenv describe them.
What TRL makes of each is taken from TRL and transformers themselves.
"""

import inspect
import time

import pytest

from spmdrl.env.base import AssistantTurn, Call, Opening, PoolSettings, Reply
from spmdrl.env.forms import load
from spmdrl.env.pool import Pool

USER_FILE = '''
import functools
import time


def multiply(a: int, b: int) -> int:
    """
    Multiplies two whole numbers.

    Args:
        a: One number.
        b: The other number,
            which may be negative.

    Returns:
        Their product.
    """
    return a * b


async def async_add(a: int, b: int = 2) -> int:
    """
    Adds two whole numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return a + b


def pick(letter: str, weights: list[float], deep: dict | None = None) -> dict:
    """
    Picks something.

    Args:
        letter: A letter. (choices: ["a", "b"])
        weights: How much each counts.
        deep: More.
    """
    return {"letter": letter, "sum": sum(weights)}


tools = [multiply, async_add, pick]


class Counter:
    """Draws its own task, and returns the prompt."""

    def reset(self, **kwargs) -> str | None:
        self.given = kwargs
        self.counter, self.target = 0, 4
        return f"Count up to {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Adds to the counter.

        Args:
            step: How much is added.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def columns(self) -> str:
        """Names the columns of the row."""
        return " ".join(sorted(self.given))

    def _hidden(self):
        """Is no tool."""


class OfRows(Counter):
    """Gets its task from the row."""

    def reset(self, target, **kwargs) -> None:
        self.given = {"target": target, **kwargs}
        self.counter, self.target = 0, target


class Narrow(Counter):
    def reset(self, target: int) -> None:
        self.counter, self.target = 0, target


class Judged(OfRows):
    """Its reward is asked for by an async function; one tool is async, one a property that must not be read."""

    async def get_reward(self) -> float:
        return 0.25

    async def double(self) -> int:
        """Doubles the counter."""
        self.counter *= 2
        return self.counter

    @property
    def page(self):
        raise RuntimeError("nothing is open")


class Notes:
    def reset(self, **kwargs):
        self.words = []

    def note(self, word: str, seconds: float = 0.0) -> str:
        """
        Notes a word.

        Args:
            word: The word.
            seconds: How long this takes.
        """
        time.sleep(seconds)
        self.words.append(word)
        return " ".join(self.words)


class Words:
    """Keeps its reward as an attribute, which a reward function reads, and says by an exception that it is over."""

    def __init__(self):
        self.reward, self.done = 0.0, False

    def reset(self, **kwargs) -> str | None:
        self.reward, self.done = 0.0, False
        return " Five letters."

    def guess(self, guess: str) -> str:
        """
        Guesses a word.

        Args:
            guess: The word, as '[abcde]'.

        Returns:
            The answer of the game.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == "[crane]"
        self.reward = float(self.done)
        return "right" if self.done else "wrong"


class Blocks(OfRows):
    """Its observation is a list of blocks, as content of messages may be."""

    def reset(self, **kwargs):
        return [{"type": "text", "text": " Look"}, {"type": "text", "text": " around."}]


class Pictures(OfRows):
    def reset(self, **kwargs):
        return [{"type": "image", "image": object()}]


class Bad(OfRows):
    def reset(self, **kwargs):
        return 3


class Nan(OfRows):
    def get_reward(self):
        return float("nan")


class Text(OfRows):
    def get_reward(self):
        return "all of it"


class Data:
    def reset(self, data, seed):
        self.data = data

    def look(self) -> str:
        """Look."""
        return self.data["x"]


class Scored(Data):
    def reward(self):
        return 1.0


short_words = functools.partial(Words)
nothing = []
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture(scope="module")
def pool():
    pool = Pool(1, PoolSettings())
    yield pool
    pool.shutdown()


def reply(pool: Pool) -> Reply:
    deadline = time.monotonic() + 60
    while not (found := pool.poll(1.0)):
        assert time.monotonic() < deadline, "the pool does not answer"
    assert len(found) == 1
    return found[0][1]


def opened(pool: Pool, file, name: str, row: dict, turns: list[list[tuple[str, dict]]]) -> tuple[Reply, list, Reply]:
    """Open an environment, make calls in turns, and ask for the reward. Return the replies."""
    key = (name, time.monotonic())
    pool.open(key, Opening(f"{file}:{name}", row, 7))
    begun = reply(pool)
    assert not begun.failure, begun.failure
    answers = []
    for calls in turns:
        pool.say(
            key, AssistantTurn("", [Call(tool, arguments, f"call{i}") for i, (tool, arguments) in enumerate(calls)])
        )
        answers.append(reply(pool))
        assert not answers[-1].failure
    pool.score(key)
    score = reply(pool)
    pool.close(key)
    return begun, answers, score


def texts(answers: list[Reply]) -> list[list[str]]:
    return [[message["content"] for message in answer.messages] for answer in answers]


def test_a_list_of_tools_has_the_schemas_that_trl_renders(pool, file):
    """TRL hands functions to the chat template, which transformers' get_json_schema describes."""
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    expected = [chat.get_json_schema(function) for function in load(f"{file}:tools").make({}).tools]
    for schema in expected:
        schema["function"].pop("return", None)  # what a tool returns is not shown to models
    turns = [
        [("multiply", {"a": 6, "b": -7}), ("async_add", {"a": 1}), ("async_add", {"a": 1, "b": 1})],
        [("pick", {"letter": "a", "weights": [0.5, 1]}), ("pick", {"letter": "z", "weights": []})],
        [("divide", {})],
        [],
    ]
    begun, answers, score = opened(pool, file, "tools", {"prompt": "Compute."}, turns)
    assert begun.tools == expected
    assert begun.messages == [{"role": "user", "content": "Compute."}]
    said = texts(answers)
    assert said[0] == ["-42", "3", "2"]
    assert said[1][0] == '{"letter": "a", "sum": 1.5}' and "must be one of" in said[1][1]
    assert "there is no tool 'divide'" in said[2][0]
    assert [answer.done for answer in answers] == [False, False, False, True]
    assert score.reward is None


def test_a_single_function_and_a_bad_list(pool, file):
    begun, answers, _ = opened(pool, file, "multiply", {"prompt": "?"}, [[("multiply", {"a": 2, "b": 3})]])
    assert len(begun.tools) == 1 and texts(answers) == [["6"]]
    with pytest.raises(ValueError, match="empty list"):
        load(f"{file}:nothing")


def tools_by_trl(file, name: str) -> set[str]:
    """The names of an environment's tools by the rule of trl.GRPOTrainer: public functions of its class but two."""
    kind = type(load(f"{file}:{name}").make({}).environment)
    members = inspect.getmembers(kind, predicate=inspect.isfunction)
    return {each for each, _ in members if not each.startswith("_") and each not in ("reset", "get_reward")}


def names(begun: Reply) -> set[str]:
    return {tool["function"]["name"] for tool in begun.tools}


def test_an_environment_that_draws_its_task_and_scores_itself(pool, file):
    turns = [[("increment", {"step": 1})], [("increment", {"step": "3"})], []]
    begun, answers, score = opened(pool, file, "Counter", {"level": 2}, turns)
    assert begun.messages == [{"role": "user", "content": "Count up to 4."}], "its text is the prompt"
    assert names(begun) == tools_by_trl(file, "Counter") == {"increment", "columns"}
    assert texts(answers)[:2] == [["1"], ["4"]] and answers[-1].done
    assert score.reward == 1.0


def test_an_environment_of_a_datasets_rows(pool, file):
    row = {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Count to 3."}], "target": 3}
    turns = [[("increment", {"step": 2}), ("columns", {})]]
    begun, answers, score = opened(pool, file, "OfRows", row, turns)
    assert texts(answers) == [["2", "prompt target"]], "TRL hands over the whole row, by keywords"
    assert begun.messages == row["prompt"] and score.reward == 0.0
    _, _, score = opened(pool, file, "Narrow", row, [[("increment", {"step": 3})]])
    assert score.reward == 1.0, "a reset without **kwargs gets the columns that it names"


def test_async_tools_and_rewards_and_properties(pool, file):
    row = {"prompt": "Go.", "target": 4}
    begun, answers, score = opened(pool, file, "Judged", row, [[("increment", {"step": 2})], [("double", {})]])
    assert names(begun) == tools_by_trl(file, "Judged")
    assert texts(answers) == [["2"], ["4"]] and score.reward == 0.25


def test_calls_of_one_turn_are_made_in_their_order(pool, file):
    """TRL makes calls of plain methods one after another, so that they find the same environment each time."""
    turn = [("note", {"word": "a", "seconds": 0.1}), ("note", {"word": "b", "seconds": 0}), ("note", {"word": "c"})]
    _, answers, _ = opened(pool, file, "Notes", {"prompt": "?"}, [turn])
    assert texts(answers) == [["a", "a b", "a b c"]]


@pytest.mark.parametrize("name", ["Words", "short_words"])
def test_a_game_that_keeps_its_reward_and_ends_by_an_exception(pool, file, name):
    row = {"prompt": [{"role": "user", "content": "Guess the word."}]}
    turns = [[("guess", {"guess": word})] for word in ("[about]", "[crane]", "[again]")]
    begun, answers, score = opened(pool, file, name, row, turns)
    assert begun.messages == [{"role": "user", "content": "Guess the word. Five letters."}], "appended, as in TRL"
    assert texts(answers) == [["wrong"], ["right"], ["ValueError: Game over."]]
    assert answers[2].counts["failed_calls"] == 1 and not answers[2].done
    assert score.reward == 1.0


def test_observations_of_blocks(pool, file):
    for content in ("Stop.", [{"type": "text", "text": "Stop."}]):
        begun, _, _ = opened(pool, file, "Blocks", {"prompt": [{"role": "user", "content": content}]}, [])
        assert begun.messages == [{"role": "user", "content": "Stop. Look around."}]


@pytest.mark.parametrize(
    "name, message", [("Pictures", "image"), ("Bad", "reset must return a text, parts or None, and returned int")]
)
def test_observations_that_fail(pool, file, name, message):
    pool.open("bad", Opening(f"{file}:{name}", {"prompt": "?", "target": 1}, 7))
    assert message in reply(pool).failure
    pool.close("bad")


def test_a_reset_with_another_name_for_the_row_is_named(pool, file):
    pool.open("data", Opening(f"{file}:Data", {"prompt": "?", "x": "1"}, 7))
    failure = reply(pool).failure
    assert r"its reset(data, seed) looks like TRL's" in failure
    assert "has no column data (it has prompt, x)" in failure and failure.endswith("reset(self, row, seed)")
    pool.close("data")
    with pytest.raises(ValueError, match=r"Scored is called as def reset\(self, row, seed\): missing .*'data'"):
        load(f"{file}:Scored")


@pytest.mark.parametrize("name, message", [("Nan", "not finite"), ("Text", "it returned str, not a number")])
def test_rewards_that_fail(pool, file, name, message):
    _, _, score = opened(pool, file, name, {"prompt": "?", "target": 1}, [])
    assert message in score.failure
