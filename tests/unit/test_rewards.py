"""Scores of responses, and the guarantee that no reward function can stop or mislead a run."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.config.builtin import REWARDS
from spmdrl.config.schema import RewardConfig, SandboxConfig
from spmdrl.rewards import route
from spmdrl.rewards.base import Reward, RewardError, RewardInput, as_reward, left_out
from spmdrl.rewards.forms import adapted
from spmdrl.rewards.load import QUICK, check_cost, check_ungraded, load_reward
from spmdrl.rewards.math import last_boxed, math_reward
from spmdrl.rewards.pool import PREFETCH, Pool
from spmdrl.rewards.text import divided
from spmdrl.workers import processes

REPO = Path(__file__).resolve().parents[2]
SHARED = REPO.parent / "shared" / "data"

USER_FILE = '''
import os, sys, time, subprocess
import numpy as np
from neighbour import OFFSET

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature; what it does is in the solution."""
    print("user print", solution_str)
    os.write(1, b"raw print\\n")
    if solution_str == "raise":
        raise KeyError("the row has no such thing")
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "die":
        os._exit(7)
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "kill":
        os.kill(os.getpid(), 9)
    if solution_str == "none":
        return None
    if solution_str == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", extra_info["mark"]])
        time.sleep(1000)
    if solution_str == "stdin":
        return float(sys.stdin.read() == "")
    if solution_str == "dict":
        return {"score": np.float32(0.5), "acc": True, "pred": "x", "length": 3, "odd": float("inf")}
    if solution_str == "args":
        return {"score": 1, "same": (data_source, ground_truth, extra_info) == ("src", [1, "ü"], {"k": {"n": None}})}
    if solution_str == "env":
        return float(not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(os.environ))
    if solution_str == "escapes":
        raise ValueError("\\x1b[2Jgone\\nand a second line")
    if solution_str == "mute":
        raise Mute
    if solution_str == "torch":
        return float("torch" in sys.modules)
    return float(len(solution_str)) + OFFSET

def plain(data_source, solution_str, ground_truth, extra_info):
    return True

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(solution_str))
    return 1.0

def wrong_names(prompt, response):
    return 1.0
'''


@pytest.fixture(scope="module")
def user_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "neighbour.py").write_text("OFFSET = 0.25\n")
    (folder / "mine.py").write_text(USER_FILE)
    return folder / "mine.py"


@pytest.fixture
def started():
    """Starts graders and closes them at the end of the test."""
    graders: list = []

    def start(**settings):
        graders.append(load_reward(RewardConfig(**settings), SandboxConfig()))
        return graders[-1]

    yield start
    for grader in graders:
        grader.close()


def item(solution: str, truth: object = "1", extra: dict | None = None) -> RewardInput:
    return RewardInput("src", solution, truth, extra or {})


def grade(grader, *items: RewardInput) -> list[Reward]:
    for i, one in enumerate(items):
        grader.submit(i, one)
    return [reward for _, reward in sorted(grader.drain(), key=lambda pair: pair[0])]


def ended(pid: int) -> bool:
    """True for a process that is gone, or only waits to be reaped by its adopter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


# -- quick rewards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "solution", "truth", "score"),
    [
        ("exact_match", " edcba\n", "edcba", 1),
        ("exact_match", "edcb", "edcba", 0),
        ("exact_match", "7", 7, 1),
        ("first_integer", " 7.", "7", 1),
        ("first_integer", " 7, not 8", "8", 0),
        ("first_integer", "It is -12", -12, 1),
        ("first_integer", "1,234 apples", 1234, 1),
        ("first_integer", "7.5", "7", 0),
        ("first_integer", "no number", "7", 0),
        ("gsm8k", "so #### 1,080", "long work\n#### 1080", 1),
        ("gsm8k", "so #### $72.00.", "#### 72", 1),
        ("gsm8k", "#### 5 no: #### 6", "#### 6", 1),
        ("gsm8k", "#### -3", "-3", 1),
        ("gsm8k", "it is 72", "#### 72", 0),
        ("gsm8k_flexible", "it is $72.", "#### 72", 1),
        ("gsm8k_flexible", "10-3", "#### 3", 1),
        ("gsm8k_flexible", "72 of 80", "#### 72", 0),
    ],
)
def test_quick_rewards(started, function, solution, truth, score):
    assert grade(started(function=function), item(solution, truth))[0].score == score


def test_gsm8k_parts(started):
    flexible_only, neither = grade(started(function="gsm8k"), item("it is 72", "#### 72"), item("?", "#### 72"))
    assert flexible_only == Reward(0.0, {"flexible": 1.0, "format": 0.0})
    assert neither == Reward(0.0, {"flexible": 0.0, "format": 0.0})


def test_every_gsm8k_answer_grades_itself(started):
    file = SHARED / "gsm8k" / "train.jsonl"
    if not file.is_file():
        pytest.skip(f"GSM8K is not at {file}")
    answers = [json.loads(line)["answer"] for line in file.open()]
    for function in ("gsm8k", "gsm8k_flexible"):
        rewards = grade(started(function=function), *(item(a, a) for a in answers))
        assert len(rewards) == 7473 and all(r.score == 1.0 for r in rewards)
    shifted = grade(started(function="gsm8k"), *(item(a + "1", a) for a in answers))
    assert sum(r.score for r in shifted) == 0


def test_quick_rewards_name_the_prompt_of_an_unreadable_truth(started):
    for function in ("first_integer", "gsm8k"):
        with pytest.raises(RewardError, match=f"{function} failed on prompt 12, sample 3: .*--data.answer-column"):
            started(function=function).submit((12, 3), item("7", "seven"))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "returned NoneType"),
        ("1", "returned str"),
        ((1.0, 2), "returned tuple"),
        ({"acc": 1}, 'without "score"'),
        ({"score": None}, "NoneType"),
        (math.nan, "not finite"),
        ({"score": -math.inf}, "not finite"),
        (Reward(1.0, {"score": 1.0}), "part named 'score'"),
    ],
)
def test_what_is_no_reward_is_refused(value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        as_reward(value)


def test_words_of_a_program_steer_no_terminal(caplog):
    """The reason that a sample is left out for may be what a program has written."""
    reward = left_out("code", (3, 1), "it said \x1b]0;title\x07\x1b[2J\u202e\nand more", 1)
    assert math.isnan(reward.score) and "and more" in reward.ungraded
    assert caplog.messages == [
        "reward function code could not grade prompt 3, sample 1, which is left out: it said  ]0;title  [2J  and more"
    ]


# -- math and reasoning-gym -------------------------------------------------------------------------------------------


def test_last_boxed():
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}} end}") == r"\frac{1}{\sqrt{2}}"
    assert last_boxed(r"\boxed{3} and \boxed{4") == "3"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed("none") is None


@pytest.mark.slow
def test_math_is_equal_in_value_and_stops_at_the_limit(started):
    cases = [
        (r"so \boxed{540}", "540", 1),
        ("work\nAnswer: $540$", "540", 1),
        ("Answer: 5\nAnswer: 541", "540", 0),
        (r"\boxed{\dfrac{1}{2}}", "0.5", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{10 = 1010_2}", "1010_2", 1),
        (r"\boxed{1010_2 = 10}", "10", 1),
        (r"\boxed{0.333}", r"\frac{1}{3}", 0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1),
        (r"\boxed{(1, 2)}", "(2, 1)", 0),
        (r"\boxed{7}", r"\boxed{7}", 1),
        ("the value is $\\frac{3}{4}$", "0.75", 1),
        ("I do not know", "3", 0),
        ("", "3", 0),
        (r"\boxed{" + "(" * 50, "3", 0),
    ]
    grader = started(function="math", timeout=3.0)
    rewards = grade(grader, *(item(s, t) for s, t, _ in cases), item(r"\boxed{9^{9^{9^{9}}}}", "7"))
    assert [r.score for r in rewards] == [*(s for _, _, s in cases), 0]
    assert grader.timeouts == 1
    assert rewards[0].parts == {"format": 1.0} and rewards[14].parts == {"format": 0.0}


MATH = {
    # How an answer line is written.
    ("540", 1.0): (
        *(
            "Answer: **540**",
            "Answer: **540**.",
            "**Answer: 540**",
            "**Answer:** 540",
            "**Answer**: 540",
            "Answer: *540*",
        ),
        *(
            "Answer: __540__",
            "Answer: `540`",
            "Answer: **$540$**",
            "Answer: $540$.",
            r"Answer: \(540\)",
            r"Answer: \[540\]",
        ),
        *(
            "**Answer:**\n540",
            "The answer is: **540**",
            r"\boxed{\mathbf{540}}",
            r"\boxed{\boxed{540}}",
            "Answer: $540",
        ),
        # The last side of a chain of equations.
        *(r"\boxed{x = 540}", r"\boxed{540 = 540}", r"\boxed{2 \cdot 270 = 540}", r"\boxed{n = 2 \cdot 270 = 540}"),
        *("Answer: x = 540", "Answer: $x = 540$", "Answer: $n$ = $540$", "Answer: **x = 540**", r"\boxed{AB = 540}"),
        *(r"\boxed{540 = 539 + 1}", r"\boxed{x \approx 540}", r"\boxed{x = y = 540}"),
        # Units.
        *(r"\boxed{540 \text{ cm}}", r"\boxed{540\,\text{cm}^2}", "Answer: 540 cm", r"\boxed{540\%}", r"\boxed{\$540}"),
        *(r"\boxed{45 \text{ ft} = 540 \text{ in}}", r"\boxed{540^\circ}"),
    ),
    ("540", 0.0): (
        *(
            r"\boxed{539 = 540}",
            r"\boxed{540 = 539}",
            r"\boxed{x = 539}",
            r"\boxed{2 \cdot 269 = 540}",
            "Answer: 539 = 540",
        ),
        *(r"\boxed{x = 539 = 540}", "Answer: **539**", r"\boxed{540, 541}", "Answer: 540 or 541", r"\boxed{x < 540}"),
        *(r"\boxed{x = 540, y = 2}", r"\boxed{539 + 2 = 540}", "Answer: 5*40"),
    ),
    # Thousands.
    ("1234", 1.0): (r"\boxed{1,234}", r"\boxed{1{,}234}", "Answer: 1,234", r"\boxed{1\,234}", "Answer: **1,234**"),
    ("1234", 0.0): ("Answer: 12,34", r"\boxed{1.234}"),
    ("-3", 1.0): ("Answer: **-3**", r"\boxed{x=-3}"),
    ("0.667", 1.0): (r"\boxed{\frac{2}{3} = 0.667}",),
    ("0.67", 0.0): (r"\boxed{\frac{1}{3} = 0.67}",),
    ("x=3", 1.0): (r"\boxed{x=3}", r"\boxed{3}"),
    ("x=3", 0.0): (r"\boxed{4=3}", r"\boxed{x=4}"),
    ("y = 2x + 1", 1.0): (r"\boxed{y = 2x + 1}", r"\boxed{2x + 1}"),
    ("y = 2x + 1", 0.0): (r"\boxed{y = 2x}",),
    ("x^2+y^2=1", 1.0): (r"\boxed{x^2+y^2=1}",),
    (r"x \leq 3", 1.0): (r"\boxed{x \le 3}",),
}
"""(truth, score) -> responses."""


def test_math_reads_emphasis_equations_units_and_thousands(started):
    cases = [(solution, truth, score) for (truth, score), all_ in MATH.items() for solution in all_]
    rewards = grade(started(function="math", timeout=10.0), *(item(s, t) for s, t, _ in cases))
    wrong = [(s, t, r.score) for (s, t, score), r in zip(cases, rewards, strict=True) if r.score != score]
    assert not wrong, wrong
    assert all(r.parts == {"format": 1.0} for r in rewards)


def test_reasoning_gym_grades_its_own_answers(started, tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from spmdrl.config.schema import DataConfig
    from spmdrl.data.prompts import load_prompts
    from tests.unit.chars import char_tokenizer

    grader = started(function="reasoning_gym")
    for task in ("spell_backward", "chain_sum", "rearc"):
        prompts = load_prompts(f"reasoning-gym:{task}?size=2", DataConfig(), char_tokenizer(), 100_000).prompts
        right = [RewardInput(p.data_source, f"<answer>{p.ground_truth}</answer>", None, p.extra) for p in prompts]
        wrong = [RewardInput(p.data_source, "hm", None, p.extra) for p in prompts]
        scores = [r.score for r in grade(grader, *right, *wrong)]
        assert scores[:2] == [1.0, 1.0] and max(scores[2:]) < 0.5, task
    with pytest.raises(RewardError, match="only grades prompts of --data.train reasoning-gym:<task>"):
        grade(grader, item("x"))


# -- auto: by data_source ----------------------------------------------------------------------------------------------


def of(source: str, solution: str, truth: object) -> RewardInput:
    return RewardInput(source, solution, truth, {})


def test_auto_grades_each_row_by_its_source(started):
    cases = [
        (of("openai/gsm8k", "#### 72", "72"), Reward(1.0, {"flexible": 1.0, "format": 1.0})),
        (of("lighteval/MATH", r"\boxed{2/4}", r"\frac{1}{2}"), Reward(0.0, {"format": 1.0})),
        (of("HuggingFaceH4/MATH-500", r"\boxed{1/2}", r"\frac{1}{2}"), Reward(1.0, {"format": 1.0})),
        (of("math_dapo", "Answer: 34", "34"), Reward(1.0, {"acc": 1.0, "format": 1.0})),
        (of("aime2024", "Answer: 35", "34"), Reward(-1.0, {"acc": 0.0, "format": 1.0})),
        (of("numina_olympiads", r"\boxed{2/4}", r"\frac{1}{2}"), Reward(1.0, {"format": 1.0})),
        (of("searchR1_nq", "<answer>The sea.</answer>", {"target": ["Sea"]}), Reward(1.0, {"format": 1.0})),
    ]
    rewards = grade(started(function="auto", timeout=20.0), *(one for one, _ in cases))
    assert rewards == [reward for _, reward in cases]


def test_auto_names_a_source_that_it_does_not_know(started):
    grader = started(function="auto")
    grader.submit((3, 1), of("my/sums", "1", "1"))
    says = (
        "auto failed on prompt 3, sample 1: .*'my/sums'; it has rewards for openai/gsm8k, .*numina_.*--reward.function"
    )
    with pytest.raises(RewardError, match=says):
        grader.drain()


def test_auto_looks_at_all_sources_before_the_first_row():
    cfg = RewardConfig(function="auto")
    with pytest.raises(ValueError, match="auto has no reward for data_source 'my/sums'"):
        load_reward(cfg, SandboxConfig(), True, {"openai/gsm8k", "my/sums"})
    with pytest.raises(ValueError, match="--sandbox.provider docker"):
        load_reward(cfg, SandboxConfig(provider="docker"), True, {"openai/gsm8k", "taco"})
    load_reward(cfg, SandboxConfig(provider="docker"), True, {"openai/gsm8k"}).close()


def test_every_source_of_auto_has_a_reward_that_its_name_says(monkeypatch):
    known = set(REWARDS)
    assert {*route.ROUTE.values(), *route.PREFIXES.values()} <= known - {"auto"}
    assert [route.reward_of(name) for name in ("math", "aime_2025", "numina_x", "searchR1_x", "taco")] == [
        *("math_dapo", "math_dapo", "math", "exact_match_qa", "code_partial")
    ]
    for name in ("", "Math", "openai/gsm8k2", "xaime"):
        with pytest.raises(ValueError, match="auto has no reward for data_source"):
            route.reward_of(name)
    monkeypatch.setitem(route.ROUTE, "odd", "nowhere")
    with pytest.raises(ValueError, match="data_source 'odd' needs the reward nowhere, which is not built in"):
        route.load("auto", {})(of("odd", "1", "1"))


def test_auto_loads_only_what_rows_need():
    code = (
        "import sys\n"
        "from spmdrl.rewards.base import RewardInput as I\n"
        "from spmdrl.rewards.forms import load_function\n"
        "auto = load_function('builtin:auto', {})\n"
        "assert auto(I('openai/gsm8k', '#### 7', '7')).score == 1\n"
        "assert not {'torch', 'sympy', 'math_verify', 'yaml', 'spmdrl.config.schema'} & set(sys.modules)\n"
        "assert auto(I('numina_x', r'\\boxed{7}', '7')).score == 1 and 'math_verify' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(REPO)})


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "math_verify":
            time.sleep(2.0)

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
def test_what_a_row_needs_is_loaded_off_its_clock(started, tmp_path, monkeypatch):
    """A symbolic grading has half the time that its import takes, also in the worker that follows a killed one."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grader = started(function="auto", timeout=1.0)
    rows = [of("numina_x", text, "7") for text in (r"\boxed{7}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7}", r"\boxed{6}")]
    begun = time.monotonic()
    assert [r.score for r in grade(grader, *rows)] == [1.0, 0.0, 1.0, 0.0]
    assert grader.timeouts == 1 and time.monotonic() - begun > 5, "two workers loaded slowly, one of them was killed"
    quick = [of("openai/gsm8k", f"#### {i}", "5") for i in range(3 * PREFETCH)]
    assert [r.score for r in grade(grader, *quick)] == [float(i == 5) for i in range(3 * PREFETCH)]


# -- user files in the pool -------------------------------------------------------------------------------------------


def test_user_file_has_verls_signature(user_file, started, monkeypatch, capfd):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    grader = started(function=str(user_file))
    solutions = ["abc", "dict", "args", "env", "stdin", "torch"]
    rewards = grade(grader, *(item(s, [1, "ü"], {"k": {"n": None}}) for s in solutions))
    assert rewards[0] == Reward(3.25) and [r.score for r in rewards[2:]] == [1.0, 1.0, 1.0, 0.0]
    assert rewards[1] == Reward(0.5, {"acc": 1.0, "length": 3.0}), "texts and infinite parts are left out"
    assert rewards[2].parts == {"same": 1.0}
    grader.close()
    out, err = capfd.readouterr()
    assert "user print abc" in err and "raw print" in err and out == "", "prints go to stderr"
    assert grade(started(function=f"{user_file}:plain"), item("x"))[0].score == 1.0


@pytest.mark.parametrize(
    ("solution", "says"),
    [
        ("escapes", r"failed on prompt 41, sample 2: ValueError:  \[2Jgone and a second line. Fix the function"),
        ("raise", r"mine.py failed on prompt 41, sample 2: KeyError: 'the row has no such thing'(?s:.*)mine.py"),
        ("nan", "failed on prompt 41, sample 2: ValueError: it returned the score nan"),
        ("none", "failed on prompt 41, sample 2: TypeError: it returned NoneType"),
        ("exit", "failed on prompt 41, sample 2: SystemExit"),
        (
            "mute",
            r"failed on prompt 41, sample 2: Mute, whose text could not be made \(RuntimeError\). Fix the function",
        ),
        ("die", "ended with exit code 7 while grading prompt 41, sample 2"),
        ("kill", "ended by signal SIGKILL .often: out of memory. while grading prompt 41, sample 2"),
    ],
)
def test_what_a_function_does_wrong_is_one_clear_error(user_file, started, solution, says):
    grader = started(function=str(user_file), workers=1)
    grader.submit((1, 0), item("fine"))
    grader.submit((41, 2), item(solution))
    grader.submit((50, 0), item("fine"))
    with pytest.raises(RewardError, match=says) as caught:
        grader.drain()
    assert "--reward.function" in str(caught.value)


TENSORS = """
import torch
MADE = {
    "scalar": torch.tensor(0.25), "one": torch.tensor([[0.5]]), "integer": torch.tensor(3), "truth": torch.tensor(True),
    "half": torch.tensor(0.75, dtype=torch.bfloat16), "graph": torch.tensor(2.0, requires_grad=True),
    "two": torch.tensor([1.0, 2.0]), "empty": torch.tensor([]), "nan": torch.tensor(float("nan")),
    "complex": torch.tensor(1j), "text": "0.5", "list": [0.5], "set": {0.5},
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return MADE[solution_str]

def parts(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": MADE[solution_str], "part": MADE[solution_str], "many": MADE["two"]}

def trl(completions, **_):
    return [MADE[each] for each in completions]

def batch(completions, **_):
    return torch.stack([MADE[each] for each in completions])
"""


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "mine.py"
    path.write_text(TENSORS)
    return path


@pytest.mark.slow
def test_a_tensor_of_one_number_is_that_number(tensors, started):
    """The file imports torch, as files of users do."""
    scores = {"scalar": 0.25, "one": 0.5, "integer": 3.0, "truth": 1.0, "half": 0.75, "graph": 2.0}
    items = [item(name) for name in scores]
    assert grade(started(function=str(tensors), workers=1), *items) == [Reward(score) for score in scores.values()]
    dicts = grade(started(function=f"{tensors}:parts", workers=1), *items)
    assert dicts == [Reward(score, {"part": score}) for score in scores.values()]
    assert grade(started(function=f"{tensors}:trl", workers=1), *items) == [Reward(x) for x in scores.values()]
    assert grade(started(function=f"{tensors}:batch", workers=1), item("scalar")) == [Reward(0.25)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solution", "says"),
    [
        ("two", r"returned Tensor of shape \(2,\), not a number"),
        ("empty", r"returned Tensor of shape \(0,\), not a number"),
        ("nan", "returned the score nan, which is not finite"),
        ("complex", "returned Tensor of shape .*, not a number"),
        ("text", "returned str, not a number"),
        ("list", "returned list, not a number"),
        ("set", "returned set, not a number"),
    ],
)
def test_another_tensor_or_type_is_named(tensors, started, solution, says):
    with pytest.raises(RewardError, match=f"failed on prompt 0: .*{says}"):
        grade(started(function=str(tensors), workers=1), item(solution))


def test_a_hang_is_killed_in_time_and_named(user_file, started):
    grader = started(function=str(user_file), timeout=0.5)
    grader.submit(3, item("fine"))
    grader.submit(4, item("hang"))
    start = time.monotonic()
    with pytest.raises(RewardError, match="longer than 0.5 s on prompt 4 .*--reward.timeout.*--reward.on-timeout zero"):
        grader.drain()
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_hang_may_score_zero_and_the_rest_is_graded(user_file, started):
    grader = started(function=str(user_file), timeout=1.0, on_timeout="zero", workers=2)
    rewards = grade(grader, *(item("hang" if i in (2, 9) else "abc") for i in range(3 * PREFETCH)))
    assert [r.score for r in rewards] == [0.0 if i in (2, 9) else 3.25 for i in range(3 * PREFETCH)]
    assert grader.timeouts == 2 and grader.pending == 0


@pytest.mark.slow
def test_time_is_the_workers_not_the_callers(user_file, started):
    """A caller that polls late changes nothing: quick gradings pass, one over the limit counts although it ended."""
    grader = started(function=f"{user_file}:slow", timeout=1.0, on_timeout="zero")
    for i, seconds in enumerate(("0", "0.4", "0.4", "0.4", "1.2", "0")):
        grader.submit(i, item(seconds))
    time.sleep(3)
    scores = {key: reward.score for key, reward in grader.drain()}
    assert scores == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0, 5: 1.0} and grader.timeouts == 1


def test_a_kill_reaches_the_childrens_processes(user_file, started):
    mark = f"spmdrl-test-{os.getpid()}"
    grader = started(function=str(user_file), timeout=1.0, on_timeout="zero")

    def alive() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (folder / "cmdline").read_bytes() and not ended(int(folder.name)):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    grader.submit(0, item("child", extra={"mark": mark}))
    assert wait_until(lambda: bool(alive()) or grader.poll() != []) and alive()
    grader.drain()
    assert wait_until(lambda: not alive())


@pytest.mark.slow
def test_poll_does_not_wait_and_large_texts_pass(user_file, started):
    grader = started(function=f"{user_file}:slow", workers=2)
    for i in range(4):
        grader.submit(i, item("0.5", extra={"long": "x" * 300_000}))
    assert grader.poll() == [], "none can be done yet, and it did not wait"
    got: list = []
    assert wait_until(lambda: got.extend(grader.poll()) or len(got) == 4)
    assert sorted(key for key, _ in got) == [0, 1, 2, 3]


def test_workers_die_with_their_parent(user_file):
    code = (
        "import sys, time\n"
        "from spmdrl.rewards.pool import Pool\n"
        "from spmdrl.rewards.base import RewardInput\n"
        f"p = Pool('{user_file}:compute_score', 2, 60.0, 'error')\n"
        "p.submit(0, RewardInput('s', 'hang', '1', {}))\n"
        "print(*(w.process.pid for w in p._processes.all), flush=True)\n"
        "time.sleep(100)\n"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(ended(p) for p in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: all(ended(p) for p in pids))


def test_close_ends_the_processes(user_file):
    pool = Pool(f"{user_file}:compute_score", 2, 5.0, "error")
    pids = [w.process.pid for w in pool._processes.all]
    pool.submit(0, item("hang"))
    pool.close()
    pool.close()
    assert all(ended(p) for p in pids)


def test_what_cannot_travel_is_refused(user_file, started):
    with pytest.raises(RewardError, match="prompt 6: .*cannot be written as JSON"):
        started(function=str(user_file)).submit(6, item("x", truth=object()))


# -- what is wrong with the setting is said at load --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def compute_score(:\n", "", r"bad.py:1: invalid syntax|bad.py:1: "),
        ("def other(): pass\n", "", r"no function 'compute_score' \(it has: other\)"),
        ("import nosuchmodule\n", "", "ModuleNotFoundError.*nosuchmodule.*bad.py:1"),
        ("import sys\nsys.exit(3)\n", "", "SystemExit.*bad.py:2"),
        ("import os\nos._exit(3)\n", "", "ended with exit code 3 while loading"),
        ("import time\ntime.sleep(1000)\n", "", "did not load within 2 s"),
        ("compute_score = 5\n", "", "no function 'compute_score'"),
        (USER_FILE.replace("from neighbour", "OFFSET = 1 #"), ":wrong_names", "keywords data_source, solution_str"),
    ],
)
def test_a_file_that_does_not_load_is_said_at_load(tmp_path, text, name, says, monkeypatch):
    if "sleep" in text:
        monkeypatch.setattr(processes, "START_SECONDS", 2.0)
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        load_reward(RewardConfig(function=f"{tmp_path / 'bad.py'}{name}"), SandboxConfig())
    assert "--reward.function" in str(caught.value) and not isinstance(caught.value, RewardError)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("exact_mach", "--reward.function 'exact_mach': did you mean 'exact_match'"),
        ("nosuch.py", "--reward.function.*no file"),
        ("nosuch.py:f", "--reward.function.*no file"),
        (f"{__file__}:", "not a function name"),
        ("some/where", "path/to/file.py"),
    ],
)
def test_an_unknown_reward_is_said_at_load(function, says):
    with pytest.raises(ValueError, match=says):
        load_reward(RewardConfig(function=function), SandboxConfig())


def test_auto_on_timeout_is_zero_for_ours_and_an_error_for_files(user_file, started):
    assert started(function="math")._on_timeout == "zero"
    assert started(function=str(user_file))._on_timeout == "error"
    with pytest.raises(ValueError, match="--reward.workers"):
        load_reward(RewardConfig(function=str(user_file), workers=0), SandboxConfig())


@pytest.mark.parametrize("on_timeout", ["auto", "zero"])
def test_cost_that_a_stopped_grading_would_not_have_is_refused(on_timeout):
    with pytest.raises(
        ValueError, match=f"--reward.on-timeout {on_timeout}: .* --safety.cost price .* set --reward.on-timeout error"
    ):
        check_cost(RewardConfig(function="math", on_timeout=on_timeout), "price")
    check_cost(RewardConfig(function="math", on_timeout="error"), "price")
    check_cost(RewardConfig(function="math"), "")
    check_cost(RewardConfig(function="gsm8k"), "format")


@pytest.mark.slow
def test_the_benchmark_of_rewards_runs():
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "rewards.py"
    done = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.rstrip().endswith("us")]) == 5
    assert "target pool-answers-per-second" in done.stdout


@pytest.mark.parametrize(
    ("prefill", "said", "function", "truth", "score"),
    [
        (r"The answer is \boxed{", "42}", "boxed", "42", 1.0),
        (r"The answer is \boxed{", "43}", "boxed", "42", 0.0),
        (r"So \boxed{\frac{1}{", "2}}", "boxed", r"\frac{1}{2}", 1.0),
        (r"So \boxed{\{1, \frac{1}{", r"3}\}}", "math", r"\{1, \frac{1}{3}\}", 1.0),
        (r"So \boxed{\frac{1}{2}} or \boxed{", "42}", "math", "42", 1.0),
        ("So 3 and 5 make\n#### ", "8", "gsm8k", "8", 1.0),
        ("Let us see.\nAnswer: ", "42", "math_dapo", "42", 1.0),
        ("<answer>", "Paris</answer>", "exact_match_qa", "Paris", 1.0),
        ("The sum of 3 and 5 is", " 8", "first_integer", "8", 1.0),
        ("The sum of 3 and 5 is", " eight", "gsm8k_flexible", "5", 0.0),
        (r"\boxed{42}", " it is", "boxed", "42", 0.0),
        ("It is", " so", "exact_match", "so", 1.0),
    ],
)
def test_a_start_of_the_reply_is_graded_from_the_mark_that_it_leaves_open(prefill, said, function, truth, score):
    before, mark = divided(prefill)
    item = RewardInput("", mark + said, truth, prefill=before)
    assert before + mark == prefill and item.reply == prefill + said
    assert (QUICK | {"math": math_reward})[function](item).score == score


def test_functions_in_files_read_the_whole_reply():
    item = RewardInput("", "7}", "7", prefill="so {")
    verl = adapted(lambda data_source, solution_str, ground_truth, extra_info: len(solution_str), "f", {})
    trl = adapted(lambda completions, **_: [len(completions[0])], "f", {})
    assert verl(item) == 6 and trl(item) == 6


def test_samples_without_a_reward_blame_the_environment_where_there_is_one():
    cfg = RewardConfig(function="environment")
    with pytest.raises(RewardError, match="5 of 10 samples of a step could not be graded by environment; that"):
        check_ungraded(5, 10, cfg, "a step")
    with pytest.raises(RewardError, match="environment failed, its first prompt is too long.*--rollout.max-pr"):
        check_ungraded(5, 10, cfg, "a step", env="e.py:E")
    with pytest.raises(
        RewardError, match="5 of 10 samples of a step of --env e.py:E are left out, the first because its"
    ):
        check_ungraded(5, 10, cfg, "a step", env="e.py:E", why="its prompt is too long: 9 tokens")
