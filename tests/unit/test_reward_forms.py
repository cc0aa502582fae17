"""Functions of users in the forms of verl and TRL, and several rewards as one."""

import math
import time

import pytest

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.rewards import short_name, weighted
from spmdrl.config.schema import Config, RewardConfig, SandboxConfig
from spmdrl.rewards.base import Reward, RewardError, RewardInput
from spmdrl.rewards.combined_reward import CombinedReward, Term
from spmdrl.rewards.load import Direct, load_reward, scores_timeouts

FILE = """
import asyncio

def verl(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    assert len(solution_strs) == 1
    return [float(a == b) + bonus for a, b in zip(solution_strs, ground_truths)]

def trl(prompts, completions, answer, level, **columns):
    assert columns["ground_truth"] == columns["solution"] == answer and columns["data_source"] == ["src"]
    if level[0] == "hard":
        return [None]
    return [float(completion == a) + (prompt == "What?") for prompt, completion, a in zip(prompts, completions, answer)]

def trl_chat(completions, prompts=None):
    return [float(c[0]["role"] == "assistant" and c[0]["content"] == p[0]["content"])
            for c, p in zip(completions, prompts)]

loops = set()
async def later(data_source, solution_str, ground_truth, extra_info=None):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0.01)
    return {"score": float(solution_str == ground_truth), "loops": len(loops)}

async def trl_later(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]

class Called:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.5
called = Called()

import functools
async def half(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return bonus
partly = functools.partial(half, bonus=0.75)
def verl_too(data_source, solution_str, ground_truth, extra_info=None, completions=None): return 2.0
import time
def slow_one(completions, **_): time.sleep(0.1); return [0.0]
def slow_two(completions, **_): time.sleep(0.1); return [0.0]
def two(completions, **_): return [1.0, 2.0]
def number(completions, **_): return 1.0
def none(data_source, solution_str, ground_truth, extra_info=None): return None
def tagged(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "format": float("<a>" in solution_str)}
def short(completions, **_): return [-float(len(c)) for c in completions]
def batch_some(solution_strs, ground_truths, **rest):
    assert rest == {"data_sources": ["src"], "extra_infos": [{}], "bonus": 2}
    return [float(a == b) + rest["bonus"] for a, b in zip(solution_strs, ground_truths)]
def only_keywords(*, data_source, solution_str, ground_truth, extra_info, bonus): return bonus
def everything(**kwargs): return kwargs["bonus"] if set(kwargs) == {
    "data_source", "solution_str", "ground_truth", "extra_info", "bonus"} else 0.0
def trl_keywords(*, completions, level, bonus=0.0): return [bonus + float(level[0])]
def trl_everything(completions, **columns): return [float(columns["bonus"])]
def trl_ids(completions, completion_ids, **columns): return [1.0]
def trl_placed(prompts, completions, /, **columns): return [1.0]
def batch_more(data_sources, solution_strs, ground_truths, extra_infos, must): return [1.0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms") / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def start():
    graders: list = []

    def started(function, **settings):
        graders.append(load_reward(RewardConfig(function=str(function), **settings), SandboxConfig()))
        return graders[-1]

    yield started
    for grader in graders:
        grader.close()


def graded(grader, *solutions: str, truth="yes", prompt: str | list = "What?", **extra) -> list[Reward]:
    for i, solution in enumerate(solutions):
        grader.submit(i, RewardInput("src", solution, truth, extra, prompt))
    return [reward for _, reward in sorted(grader.drain(), key=lambda pair: pair[0])]


def test_verls_function_gets_reward_kwargs(file, start):
    plain = graded(start(f"{file}:verl"), "yes", "no!!")
    assert [(r.score, r.parts) for r in plain] == [(1.0, {"length": 3.0}), (0.0, {"length": 4.0})]
    assert graded(start(f"{file}:verl", kwargs='{"bonus": 0.25}'), "no")[0].score == 0.25
    assert [r.score for r in graded(start(f"{file}:verl_batch", kwargs='{"bonus": 1}'), "yes", "no")] == [2.0, 1.0]


def test_further_arguments_reach_functions_of_every_form(file, start):
    bonus = {"kwargs": '{"bonus": 2}'}
    assert [r.score for r in graded(start(f"{file}:batch_some", **bonus), "yes", "no")] == [3.0, 2.0]
    assert graded(start(f"{file}:only_keywords", **bonus), "x")[0].score == 2.0
    assert graded(start(f"{file}:everything", **bonus), "x")[0].score == 2.0
    assert graded(start(f"{file}:trl_keywords", **bonus), "x", level=5)[0].score == 7.0
    assert graded(start(f"{file}:trl_everything", **bonus), "x")[0].score == 2.0


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("everything", '{"solution_str": 1}', "--reward.kwargs solution_str: everything in"),
        ("batch_some", '{"extra_infos": 1}', "--reward.kwargs extra_infos: batch_some in"),
        ("trl_everything", '{"completions": 1}', "--reward.kwargs completions: trl_everything in"),
        ("trl_everything", '{"answer": 1}', "already receives an argument answer for each response; rename yours"),
        ("trl_keywords", '{"bonos": 1}', "has no such parameter (it has: completions, level, bonus)"),
        ("only_keywords", "", "missing a required argument: 'bonus'. Change its parameters; add **kwargs"),
        ("batch_more", "", "called with the keywords data_sources, solution_strs, ground_truths, extra_infos, unless"),
        ("verl_batch", '{"x": 1}', "and those of --reward.kwargs (x)"),
        ("trl_placed", "", "takes prompts, completions by position: remove the /"),
    ],
)
def test_functions_that_do_not_take_their_arguments_are_named_before_the_first_row(file, start, name, kwargs, words):
    with pytest.raises(ValueError) as caught:
        start(f"{file}:{name}", kwargs=kwargs)
    assert words in str(caught.value), caught.value


def test_rows_that_do_not_fit_the_parameters_of_trls_functions_are_named(file, start):
    with pytest.raises(RewardError, match="prompt 0: ValueError: --reward.kwargs level: the row has a column of this"):
        graded(start(f"{file}:trl_everything", kwargs='{"level": 1}'), "x", level=1)
    words = "it requires completion_ids, but the arguments for this row are ground_truth, answer, solution, level,"
    with pytest.raises(RewardError, match=words):
        graded(start(f"{file}:trl_ids"), "x", level=1)


def test_trls_functions_get_lists_and_columns(file, start, caplog):
    grader = start(f"{file}:trl")
    assert [r.score for r in graded(grader, "yes", "no", level="easy")] == [2.0, 1.0]
    assert not caplog.records
    nothing = graded(grader, "yes", level="hard")[0]
    assert math.isnan(nothing.score) and "does not apply" in nothing.ungraded and grader.ungraded == 1
    assert f"reward function {file}:trl could not grade prompt 0, which is left out: the function" in caplog.text
    # A column of the row is not overwritten by the truth.
    with pytest.raises(RewardError, match="AssertionError"):
        graded(grader, "yes", level="easy", answer="other")


def test_trls_functions_get_messages_where_the_prompt_has_them(file, start):
    chat = [{"role": "user", "content": "echo"}]
    assert [r.score for r in graded(start(f"{file}:trl_chat"), "echo", "what", prompt=chat)] == [1.0, 0.0]


def test_async_functions_are_awaited_in_one_loop(file, start):
    rewards = graded(start(f"{file}:later"), "yes", "no", "yes")
    assert [(r.score, r.parts["loops"]) for r in rewards] == [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)]
    assert graded(start(f"{file}:trl_later"), "four")[0].score == 4.0
    assert graded(start(f"{file}:called"), "four")[0].score == 0.5
    assert graded(start(f"{file}:partly"), "four")[0].score == 0.75
    assert graded(start(f"{file}:verl_too"), "four")[0].score == 2.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", "2 scores for one response: return a list of one"),
        ("number", "float for one response: return a list of one"),
        ("none", "NoneType, not a number"),
    ],
)
def test_another_number_of_scores_is_an_error(file, start, name, words):
    with pytest.raises(RewardError, match=words):
        graded(start(f"{file}:{name}"), "x")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kwargs": "bonus=1"}, "--reward.kwargs: is not valid JSON"),
        ({"kwargs": "[1]"}, "must be a JSON object"),
        ({"kwargs": '{"bonos": 1}'}, "bonos"),
        ({"more": ("gsm8k=much",)}, "--reward.more gsm8k=much: the form is function=weight"),
        ({"more": ("gsm8k=nan",)}, "the form is function=weight"),
        ({"more": ("=1",)}, "the form is function=weight"),
        ({"more": ("gsm9k",)}, "unknown --reward.more 'gsm9k': did you mean 'gsm8k'"),
        ({"more": ("nowhere.py=2",)}, "--reward.more 'nowhere.py': there is no file"),
        ({"more": ("gsm8k", "gsm8k=2")}, "2 rewards are named gsm8k"),
    ],
)
def test_bad_settings_are_named(file, start, settings, words):
    with pytest.raises(ValueError) as caught:
        start(f"{file}:verl", **settings)
    assert words in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"function": "gsm8k", "more": ("gsm8k=0.5",)},
            "--reward.more gsm8k: 2 rewards are named gsm8k, .* name it once",
        ),
        (
            {"function": "{file}:verl", "more": ("{other}:verl=2", "{file}:short")},
            "--reward.more .*other.py:verl: 2 rewards are named verl, .* rename a function or a file",
        ),
        ({"function": "gsm8k", "kwargs": '{"bonus": 1}'}, "--reward.kwargs: no function in a file takes bonus"),
    ],
)
def test_rewards_that_do_not_go_together_are_refused_before_anything_is_built(file, settings, words):
    other = file.parent / "other.py"
    other.write_text(FILE)

    def filled(value):
        return value.replace("{file}", str(file)).replace("{other}", str(other))

    given = {k: tuple(map(filled, v)) if isinstance(v, tuple) else filled(v) for k, v in settings.items()}
    with pytest.raises(ConfigError, match=f"1 setting to change:\n  {words}"):
        check(Config(reward=RewardConfig(**given)), 1)


def test_several_rewards_are_a_weighted_sum(file, start):
    grader = start(f"{file}:verl", more=(f"{file}:short=0.5", "exact_match", f"{file}:trl=10"))
    right, wrong = graded(grader, "yes", "no", level="hard")
    # TRL's function does not apply to the row, so it is neither in the sum nor among the parts.
    assert right.score == 1 + 0.5 * -3 + 1 and wrong.score == 0.5 * -2
    assert right.parts == {"verl": 1.0, "length": 3.0, "short": -3.0, "exact_match": 1.0}
    assert graded(grader, "yes", level="easy")[0].score == right.score + 10 * 2.0
    assert grader.pending == 0 and grader.timeouts == grader.ungraded == 0


def test_a_gate_that_does_not_hold_leaves_no_reward(file, start):
    grader = start(f"{file}:tagged", more=(f"{file}:short=0.1",), gate=("format",))
    held, shut = graded(grader, "<a>", "abc")
    assert held.score == pytest.approx(0.2) and shut.score == 0.0 and shut.parts["format"] == 0.0
    below = graded(start(f"{file}:tagged", more=(f"{file}:short",), gate=("format",)), "abc")[0]
    assert below.score == 0.5 - 3 and not below.shut, "a gate does not lift what is below 0"
    nothing = graded(start(f"{file}:tagged", gate=("format",)), "abc")[0]
    assert nothing.score == 0.0 and nothing.shut
    with pytest.raises(RewardError, match="--reward.gate shape: .* gave no such part .* the parts are format, tagged"):
        graded(start(f"{file}:tagged", gate=("shape",)), "abc")


class Late:
    """A grader that answers when it is told to."""

    wants_groups = on_engine = False
    timeouts = ungraded = 0

    def __init__(self, **answers: Reward):
        self.name, self.answers, self.asked, self.ready = "late", answers, [], False

    @property
    def pending(self):
        return len(self.asked)

    def submit(self, key, item):
        self.asked.append((key, self.answers[item.solution]))

    def poll(self):
        done, self.asked = (self.asked, []) if self.ready else ([], self.asked)
        return done

    def drain(self, stop=None):
        self.ready = True
        return self.poll()

    def close(self):
        pass


def test_parts_are_distinct_tokens_and_gates_of_absent_rewards_are_left_out():
    def of(**answers):
        late = Late(**answers)
        late.ready = True
        return late

    def one(*terms, gates=()):
        grader = CombinedReward([Term(name, each, 1.0) for name, each in terms], gates)
        grader.submit(1, RewardInput("", "a", ""))
        return dict(grader.drain())[1]

    tagged = of(a=Reward(0.5, {"format": 0.0}))
    with pytest.raises(RewardError, match="tagged has a part format, which is also the name of a reward"):
        one(("tagged", tagged), ("format", of(a=Reward(1.0))))
    first = of(a=Reward(0.5, {"tagged/format": 0.0}))
    with pytest.raises(RewardError, match="tagged has a part tagged/format, which is also a part of another reward"):
        one(("first", first), ("tagged", tagged))
    silent = of(a=Reward(0.0, applies=False))
    assert one(("gsm8k", of(a=Reward(1.0))), ("tagged", silent), gates=("tagged/format",)).score == 1.0
    stopped = of(a=Reward(0.0, timed_out=True))
    found = one(("gsm8k", of(a=Reward(1.0))), ("tagged", stopped), gates=("tagged/format",))
    assert found.score == 0.0 and found.timed_out


def graded_by(*terms: tuple[str, Reward, float], gates: tuple[str, ...] = ()) -> Reward:
    """What several rewards make of one response, of which each says something fixed."""
    made = []
    for name, reward, weight in terms:
        late = Late(a=reward)
        late.ready = True
        made.append(Term(name, late, weight))
    grader = CombinedReward(made, gates)
    grader.submit(1, RewardInput("", "a", ""))
    return dict(grader.drain())[1]


SILENT = Reward(0.0, applies=False)


def test_a_gate_is_left_out_only_if_its_own_reward_does_not_apply():
    """Another reward's silence excuses no gate that is misspelt."""
    gsm8k = ("gsm8k", Reward(1.0, {"format": 1.0}), 1.0)
    for gate in ("tagged", "tagged/format", "tagged/a/b"):
        assert graded_by(gsm8k, ("tagged", SILENT, 1.0), gates=(gate,)).score == 1.0
    assert graded_by(("gsm8k", SILENT, 1.0), ("short", Reward(0.5), 1.0), gates=("format",)).score == 0.5
    for gate in ("fromat", "tagged_too", "gsm8k/format"):
        with pytest.raises(RewardError, match=f"--reward.gate {gate}: .* the parts are format, gsm8k$"):
            graded_by(gsm8k, ("tagged", SILENT, 1.0), gates=(gate,))
    # Also behind a gate that is shut.
    shut = ("gsm8k", Reward(1.0, {"format": 0.0}), 1.0)
    with pytest.raises(RewardError, match="--reward.gate fromat"):
        graded_by(shut, gates=("format", "fromat"))


def test_a_grading_that_was_stopped_shuts_its_own_gates_alone():
    stopped = Reward(0.0, timed_out=True)
    gsm8k = ("gsm8k", Reward(1.0, {"format": 1.0}), 1.0)
    assert graded_by(gsm8k, ("tagged", stopped, 1.0), gates=("tagged/format",)).score == 0.0
    assert graded_by(gsm8k, ("tagged", stopped, 1.0), gates=("format",)).score == 1.0
    with pytest.raises(RewardError, match="--reward.gate fromat"):
        graded_by(gsm8k, ("tagged", stopped, 1.0), gates=("fromat",))


def test_rewards_of_weight_0_are_parts_and_no_score():
    """A row to which only such rewards apply has no score, which is not 0."""
    watched = ("length", Reward(-9.0), 0.0)
    found = graded_by(("gsm8k", Reward(1.0), 1.0), watched)
    assert found.score == 1.0 and found.parts == {"gsm8k": 1.0, "length": -9.0}
    alone = graded_by(("gsm8k", SILENT, 1.0), watched)
    assert math.isnan(alone.score) and alone.ungraded == "none of the rewards applies to the row"


def test_a_row_to_which_no_reward_applies_is_counted_and_named(caplog):
    late = Late(a=SILENT)
    late.ready = True
    grader = CombinedReward([Term("late", late, 1.0)])
    grader.submit((7, 2), RewardInput("", "a", ""))
    assert dict(grader.drain())[7, 2].ungraded and grader.ungraded == 1
    assert "reward function late could not grade prompt 7, sample 2, which is left out: none of the rew" in caplog.text


@pytest.mark.slow
def test_several_rewards_work_at_the_same_time(file, start):
    grader = start(f"{file}:verl", more=(f"{file}:slow_one=0", f"{file}:slow_two=0"))
    began = time.monotonic()
    graded(grader, *(["x"] * 12))
    assert time.monotonic() - began < 1.9, "one after the other they take 2.4 s"


def test_an_answer_waits_for_all_rewards():
    late = Late(a=Reward(1.0), b=Reward(math.nan, ungraded="no tests"), c=Reward(0.0, applies=False))
    one = Direct("one", lambda item: Reward(1.0))
    grader = CombinedReward([Term("one", one, 1.0), Term("late", late, 1.0)])
    for solution in "abc":
        grader.submit(solution, RewardInput("", solution, ""))
    assert grader.poll() == [] and grader.pending == 3
    late.ready = True
    rewards = dict(grader.poll())
    assert rewards["a"].score == 2.0 and rewards["c"].score == 1.0 and rewards["c"].parts == {"one": 1.0}
    assert math.isnan(rewards["b"].score) and rewards["b"].ungraded == "late: no tests"
    alone = CombinedReward([Term("late", late, 1.0)])
    alone.submit("c", RewardInput("", "c", ""))
    assert dict(alone.drain())["c"].ungraded == "none of the rewards applies to the row"


def test_names_and_weights():
    assert [short_name(x) for x in ("gsm8k", "a/b.py", "a/b.py:f")] == ["gsm8k", "b", "f"]
    assert weighted("a/b=c.py:f=0.5") == ("a/b=c.py:f", 0.5) and weighted("math") == ("math", 1.0)
    assert weighted("runs/lr=1e-5/r.py") == ("runs/lr=1e-5/r.py", 1.0)
    assert scores_timeouts(RewardConfig(function="gsm8k", more=("math=1",)))
    assert not scores_timeouts(RewardConfig(function="code", more=("gsm8k",)))
