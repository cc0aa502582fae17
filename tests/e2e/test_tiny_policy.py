"""The script that makes the shipped policy: its rows, and its warm start by `spmdrl.sft`."""

import importlib.util

import pytest
import torch
import yaml
from transformers import Qwen2ForCausalLM

from spmdrl.data.builtin import builtin_rows
from tests.e2e.runner import ROOT, metrics

HELD_OUT = [row["prompt"].removesuffix("=") for row in builtin_rows("reverse", held_out=True)]


def load():
    spec = importlib.util.spec_from_file_location("make", ROOT / "recipes" / "tiny_policy" / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_copies_and_reversed_words_and_none_is_of_the_evaluation():
    rows = load().demonstrations(HELD_OUT, 0, 20_000)
    words = [row["prompt"].removesuffix("=") for row in rows]
    assert len(rows) == 20_000 and not set(words) & set(HELD_OUT)
    copied = [row["completion"] == word for word, row in zip(words, rows, strict=True)]
    right = [row["completion"] == word[::-1] for word, row in zip(words, rows, strict=True)]
    assert all(a or b for a, b in zip(copied, right, strict=True))
    assert 0.59 < sum(copied) / len(rows) < 0.63, "60%, and the palindromes"
    assert rows == load().demonstrations(HELD_OUT, 0, 20_000) != load().demonstrations(HELD_OUT, 1, 20_000)


@pytest.mark.timeout(120)
def test_warm_start_goes_through_the_rows_once_and_trains_each_answer_and_its_end(tmp_path):
    make = load()
    make.WARMUP = 1
    torch.manual_seed(0)
    start = make.make_model()
    start.save_pretrained(tmp_path / "start")
    make.make_tokenizer().save_pretrained(tmp_path / "start")
    made = make.warm_start(tmp_path, make.demonstrations(HELD_OUT, 0, 4 * 64), 0)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["data/rows"] == 64 and row["tokens/all"] == 64 * 13 and row["tokens/trained"] == 64 * 6
        assert row["data/refused"] == row["data/truncated"] == 0
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert tuple(settings["optimizer"]["betas"]) == (0.9, 0.95) and settings["optimizer"]["weight_decay"] == 0
    assert [row["lr"] for row in rows] == pytest.approx([make.LR * share for share in (1, 1, 1, 0.5)])
    assert settings["data"]["shuffle"] is False
    # An untrained model gives each of 47 tokens about the same probability: log 47 is 3.85.
    assert 3.7 < rows[0]["loss"] < 4.0 and rows[-1]["loss"] < rows[0]["loss"] - 0.1
    model = Qwen2ForCausalLM.from_pretrained(made)
    assert model.dtype == torch.float32
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    # Each update is about the learning rate at most.
    assert 0.5 < moved / (make.LR * 3.5) < 1.05, moved
