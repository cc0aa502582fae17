"""The recipe r1_zero_small: its script in short, and its format reward."""

import importlib.util
import json
import re

import pytest
import yaml
from safetensors.torch import load_file

from spmdrl.data.builtin import builtin_rows
from tests.e2e.runner import ROOT, metrics
from tests.e2e.warm import recipe

RECIPE = ROOT / "recipes" / "r1_zero_small"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, RECIPE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(180)
def test_script_trains_on_from_the_weights_of_sft_and_prints_accuracies(tmp_path):
    """An update moves a weight by about the learning rate at most, so that two steps of RL stay near their start."""
    printed = recipe(RECIPE / "run.py", "--out", tmp_path, "--ranks", 1, "--sft-steps", 12, "--rl-steps", 2)
    out = tmp_path / "seed_0"

    def weights(run: str) -> dict:
        return load_file(out / run / "model.safetensors")

    base, sft = weights("base"), weights("sft/checkpoints/latest/model")
    settings = yaml.safe_load((out / "rl" / "config.yaml").read_text())
    updates = 2 * settings["algo"]["updates_per_step"]
    reach = 1.01 * updates * settings["optimizer"]["lr"]
    far = max((sft[name] - base[name]).abs().max().item() for name in base)
    assert far > 2 * reach, "SFT went farther than RL can"
    for run, begun in (("rl", sft), ("zero", base)):
        went = weights(f"{run}/checkpoints/latest/model")
        assert went.keys() == begun.keys()
        assert max((went[name] - begun[name]).abs().max().item() for name in begun) <= reach, run
    # Printed accuracies are those of the runs' logs.
    seen = {
        run: [row["eval/accuracy"] for row in metrics(out / run) if "eval/accuracy" in row] for run in ("rl", "zero")
    }
    (line,) = re.findall(r"^\| 0 \|.*$", printed, re.MULTILINE)
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    first, *later = seen["rl"]
    assert later and cells == [
        f"{seen['zero'][0]:.3f}",
        f"{first:.3f}",
        ", ".join(f"{a:.3f}" for a in later),
        f"{seen['zero'][-1]:.3f}",
    ]


def test_half_of_the_demonstrations_are_wrong_and_none_is_of_the_evaluation(tmp_path):
    load("run").make_demonstrations(tmp_path / "rows.jsonl", 0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    words = [row["prompt"].removesuffix("=") for row in rows]
    right = [row["completion"] == word[::-1] for word, row in zip(words, rows, strict=True)]
    copied = [row["completion"] == word for word, row in zip(words, rows, strict=True)]
    assert len(rows) == 4096 and all(a or b for a, b in zip(right, copied, strict=True))
    assert 0.46 < sum(right) / len(rows) < 0.54
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in builtin_rows("reverse", held_out=True)}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2 + 2\nis 4</think>\n\\boxed{4}", 1.0),
        ("2 + 2 is 4</think> <answer>4</answer>", 1.0),  # the chat template opens the thought
        ("<think>2 + 2 is 4</think>", 0.0),
        ("<think>2 + 2 is 4</think> \n", 0.0),
        ("<think>2 + 2 is 4", 0.0),
        ("4", 0.0),
        ("<think></think>4", 0.0),
        ("<think>a</think>b<think>c</think>4", 0.0),
        ("4 <think>a</think> 4", 0.0),
    ],
)
def test_format_is_a_thought_and_an_answer_behind_it(text, score):
    assert load("thought").compute_score("", text, "4", {}) == score
