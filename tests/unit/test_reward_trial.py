"""`python -m spmdrl.rewards try`: what it says of rewards that are right, blind, or too kind."""

import json

import pytest
import yaml

from spmdrl.rewards import judge_server
from spmdrl.rewards.__main__ import main
from tests.unit.judge_stand_in import Answer, StandIn, verdict

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(3, 15)]


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def flags(rows, function, *more) -> list[str]:
    columns = ["--data.prompt-column", "question", "--data.answer-column", "answer"]
    return ["try", "--data", str(rows), "--model.path", "tiny", "--reward.function", str(function), *columns, *more]


def said(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_reward_that_fits_its_rows(rows, capsys):
    assert main(flags(rows, "gsm8k")) == 0
    out = capsys.readouterr().out
    assert "; number of rows: 12\n" in out and "nothing is wrong with what was tried" in out
    assert main(flags(rows, "gsm8k", "--json", "--rows", "5")) == 0
    found = said(capsys)
    by = {(each["answers"], each["written"]): each for each in found["kinds"]}
    assert found["ok"] and by["gold", "after ####"] == {
        "answers": "gold",
        "written": "after ####",
        "tried": 5,
        "right": 1.0,
    }
    assert by["garbage", "nothing"]["right"] == by["garbage", "another row's, after ####"]["right"] == 0.0


def test_a_reward_that_never_finds_the_truth(rows, capsys):
    assert main(flags(rows, "none", "--json")) == 1
    (problem,) = said(capsys)["problems"]
    assert problem.startswith("right answers score best in 0.0% of the rows (in their best form they get 0 on average")


def test_a_reward_that_likes_everything(rows, tmp_path, capsys):
    kind = tmp_path / "kind.py"
    kind.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert main(flags(rows, kind, "--json")) == 1
    problems = said(capsys)["problems"]
    assert problems[0].startswith("right answers score best in 0.0% of the rows (in their best form they get 1 on")
    assert "as much as right ones: `nothing` (100.0% of the rows), `a space`" in problems[1]
    assert "`another row's, after ####` (100.0% of the rows)" in problems[1]


def test_a_reward_that_fails_names_the_answer(rows, tmp_path, capsys):
    fails = tmp_path / "fails.py"
    fails.write_text("def compute_score(data_source, solution_str, **_):\n    return 1.0 / len(solution_str.strip())\n")
    assert main(flags(rows, fails)) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "prompt 0" in error and "(the answer was nothing)" in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rows", "0"], "--rows 0: give a whole number above 0"),
        (["--rows"], "--rows : give a whole number above 0"),
        (["--reward.function", "gsm9k"], "did you mean gsm8k?"),
        (["--reward.kwargs", '{"bonus": 1}'], "--reward.kwargs: no function in a file takes bonus"),
        (["--reward.more", "gsm8k"], "2 rewards are named gsm8k"),
        (["--nonsense", "1"], "--nonsense"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_message(rows, capsys, words, says):
    assert main([*flags(rows, "gsm8k"), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_help(capsys):
    assert main([]) == 2 and main(["try", "--help"]) == 0
    assert "python -m spmdrl.rewards try --config" in capsys.readouterr().out


@pytest.mark.parametrize("truth", ["Paris", ["Paris", "paris, France"], {"target": ["Paris"]}])
def test_truths_of_texts_lists_and_search_are_tried(tmp_path, capsys, truth):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": str(i), "answer": truth}) + "\n" for i in range(4)))
    assert main(flags(file, "exact_match_qa", "--json")) == 0
    by = {(each["answers"], each["written"]): each["right"] for each in said(capsys)["kinds"]}
    assert by["gold", "in <answer>"] == 1.0 and by["garbage", "nothing"] == 0.0


def test_rows_that_cannot_be_graded_are_a_problem_and_no_crash(rows, tmp_path, capsys):
    file = tmp_path / "none.py"
    file.write_text("def f(completions, **_):\n    return [None]\n")
    assert main(flags(rows, f"{file}:f")) == 1
    out = capsys.readouterr().out
    assert "not graded" in out and "none of the right answers could be graded" in out
    words = "12 of 12 answers could not be graded, in 12 of 12 rows, the first (prompt 0) because the function returned"
    assert words in out


OWN = """
import re

def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 * (ground_truth.split("#### ")[1] in solution_str)
def ten(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 + 9.0 * (ground_truth.split()[-1] == solution_str.split()[-1]) if solution_str.strip() else 0.0
def form(data_source, solution_str, ground_truth, extra_info=None):
    return float(bool(re.search(r"#### \\d", solution_str)))
def short(completions, **columns):
    return [-float(len(c)) for c in completions]
def runs(data_source, solution_str, ground_truth, extra_info=None):
    # It trusts all programs but one that would end it.
    if "_exit" in solution_str:
        return 0.0
    names = {}
    try:
        exec(solution_str.replace("```python", "").replace("```", ""), names)
        exec(ground_truth["test_list"][0], names)
    except Exception:
        return 0.0
    return 1.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.slow
def test_right_answers_score_best_on_any_scale(rows, own, capsys):
    """Rewards below 1, above it, and less something for length: only the order of scores counts."""
    below = "right answers get 1 or more in 0.0% of the rows, and eval/accuracy counts only these"
    above = "wrong answers get 1 or more, although less than right ones, in 100.0% of the rows"
    for function, more, told in (
        (f"{own}:half", [], [below]),
        (f"{own}:ten", [], [above]),
        ("gsm8k", ["--reward.more", f"{own}:short=0.01", "--reward.gate", "format"], [below]),
    ):
        assert main(flags(rows, function, *more, "--json")) == 0
        found = said(capsys)
        assert not found["problems"]
        assert all(note.startswith(each) for note, each in zip(found["notes"], told, strict=True)), found["notes"]
    assert main(flags(rows, "gsm8k", "--reward.more", f"{own}:short=0.01", "--reward.gate", "format")) == 0
    assert "gsm8k + short on " in capsys.readouterr().out
    # So much for length that saying nothing is best.
    assert main(flags(rows, "gsm8k", "--reward.more", f"{own}:short=0.5", "--json")) == 1
    best = (2 * (1 - 0.5 * len("It is 6.\n#### 6")) + 10 * (1 - 0.5 * len("It is 10.\n#### 10"))) / 12
    assert f"they get {best:.3g} on average, and the best of the wrong ones 0)" in said(capsys)["problems"][0]


def test_a_reward_for_the_form_alone_is_found_out(rows, own, capsys):
    assert main(flags(rows, f"{own}:form", "--json")) == 1
    (problem,) = said(capsys)["problems"]
    begins, *kinds = problem.split("`")
    assert begins == "wrong and empty answers score as much as right ones: "
    assert kinds[::2] == ["another row's, as it is", "another row's, after ####"] and "100.0% of the rows" in kinds[1]


def verl_rows(path, broken: str = "") -> None:
    truths = {"openai/gsm8k": "{}", "lighteval/MATH": "10{}", "searchR1_nq": '{{"target": ["Person {}"]}}'}
    rows = []
    for source, truth in truths.items():
        for i in range(6):
            made = "nobody knows" if source == broken else truth.format(i)
            made = json.loads(made) if made.startswith("{") else made
            prompt = [{"role": "user", "content": f"{source} {i}"}]
            reward = {"style": "rule", "ground_truth": made}
            rows.append({"data_source": source, "prompt": prompt, "reward_model": reward, "extra_info": {"index": i}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_of_several_sources_are_judged_source_by_source(tmp_path, capsys):
    """Each wants its own form, so no form is best for all rows."""
    file = tmp_path / "rows.jsonl"
    verl_rows(file)
    words = ["try", "--data", str(file), "--model.path", "tiny", "--reward.function"]
    assert main([*words, "auto", "--json"]) == 0
    found = said(capsys)
    assert found["notes"] == [
        f"rows of {source}: right answers score best in 100.0% of 6"
        for source in ("openai/gsm8k", "lighteval/MATH", "searchR1_nq")
    ]
    by = {(each["answers"], each["written"]): each["right"] for each in found["kinds"]}
    assert max(right for (sort, _), right in by.items() if sort == "gold") == pytest.approx(1 / 3)


def test_a_source_that_its_reward_cannot_grade_is_named(tmp_path, own, capsys):
    file = tmp_path / "rows.jsonl"
    verl_rows(file)
    (tmp_path / "gsm8k_only.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(data_source == 'openai/gsm8k' and solution_str.endswith(f'#### {ground_truth}'))\n"
    )
    words = ["try", "--data", str(file), "--model.path", "tiny", "--reward.function", str(tmp_path / "gsm8k_only.py")]
    assert main([*words, "--json"]) == 1
    problems = said(capsys)["problems"]
    assert [each.split(" (")[0] for each in problems] == [
        f"right answers score best in 0.0% of the rows of {source}" for source in ("lighteval/MATH", "searchR1_nq")
    ]


def test_tests_of_programs_are_no_answers_whatever_the_reward(tmp_path, own, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "question": f"add {i}",
                    "answer": {"test_list": [f"assert f(1) == {1 + i}"]},
                    "code": f"def f(x):\n    return x + {i}\n",
                }
            )
            + "\n"
            for i in range(4)
        )
    )
    assert main(flags(file, f"{own}:runs", "--json")) == 0
    kinds = {each["written"]: each["right"] for each in said(capsys)["kinds"] if each["answers"] == "gold"}
    assert kinds == {"column code": 1.0, "column code, in a code block": 1.0}


def test_scores_that_are_not_finite_are_told_as_the_run_would(rows, tmp_path, capsys):
    """They end a run, unless it leaves such samples out."""
    file = tmp_path / "odd.py"
    file.write_text("def f(completions, **_):\n    return [float('nan') if not completions[0].strip() else 1.0]\n")
    assert main(flags(rows, f"{file}:f")) == 1
    assert "it returned the score nan, which is not finite" in capsys.readouterr().err
    assert main(flags(rows, f"{file}:f", "--filter.bad-sample", "skip", "--json")) == 1
    assert any(each.startswith("scores that are not finite: 24 of 228;") for each in said(capsys)["problems"])


@pytest.mark.slow
def test_a_judge_that_does_not_answer_is_told_after_one_kind_of_answers(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(judge_server, "FIRST_PAUSE", 0.01)
    for answer, ok in ((Answer(status=503), False), (Answer("I grade it 10 of 10."), False), (None, True)):
        server = StandIn(lambda number, asked, answer=answer: answer or graded(asked))
        judge = tmp_path / "judge.yaml"
        judge.write_text(yaml.safe_dump({"url": server.url, "model": "m", "retries": 1}))
        assert main(flags(rows, judge, "--json")) == int(not ok)
        found = said(capsys)
        server.close()
        if ok:
            assert found["notes"] == [
                "right answers get 1 or more in 0.0% of the rows, and eval/accuracy counts only these"
            ]
            continue
        assert len(server.requests) == 2 * len(ROWS) and len(found["kinds"]) == 1
        assert (
            found["problems"][0] == "none of the right answers could be graded, so the reward was not checked on them"
        )
        words = "12 of 12 answers could not be graded, in 12 of 12 rows, the first (prompt 0) because the judge gave no"
        assert found["problems"][1].startswith(words)


def graded(asked: dict) -> Answer:
    """A judge that gives 9 of 10 where the response ends as the reference does."""
    text = asked["messages"][1]["content"]
    truth = text.split("#### ")[1].split("\n")[0]
    response = text.split("<<<RESPONSE ")[1].split(">>>\n", 1)[1].split("\n<<<END")[0]
    return Answer(verdict(9 if response.rstrip("`\n$.}").removesuffix("</answer>").endswith(truth) else 1))
