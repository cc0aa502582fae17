"""`python -m spmdrl.rewards try`: what it says of rewards that are right, blind, or too kind."""

import json

import pytest

from spmdrl.rewards.__main__ import main

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
    assert "gsm8k on 12 rows" in out and "nothing is wrong with what was tried" in out
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
    assert "right answers get a score of 1 in 0.0% of the rows at best" in said(capsys)["problems"][0]


def test_a_reward_that_likes_everything(rows, tmp_path, capsys):
    kind = tmp_path / "kind.py"
    kind.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert main(flags(rows, kind, "--json")) == 1
    problems = said(capsys)["problems"]
    assert any("`nothing` get a score of 1" in each for each in problems)
    assert any("another row's, after ####` get a score of 1" in each for each in problems)


def test_a_reward_that_fails_names_the_answer(rows, tmp_path, capsys):
    fails = tmp_path / "fails.py"
    fails.write_text("def compute_score(data_source, solution_str, **_):\n    return 1.0 / len(solution_str.strip())\n")
    assert main(flags(rows, fails)) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "prompt 0" in error and "(the answer was nothing)" in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rows", "0"], "--rows 0: a number above 0"),
        (["--rows"], "--rows : a number above 0"),
        (["--reward.function", "gsm9k"], "did you mean 'gsm8k'"),
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
    assert "not graded" in out and "nothing is known of right answers" in out
