"""SFT on images as a user starts it: a random model learns the colours of drawings, the same on one rank and on two."""

import json

import pytest
from PIL import Image

from tests.e2e.runner import argv, metrics
from tests.e2e.warm import run, succeed
from tests.unit import vision_models as tiny

pytestmark = pytest.mark.timeout(240)
COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}


def drawings(folder):
    """Write rows that ask for the colour of a drawing, of unlike sizes, and some rows without images."""
    rows = []
    for number in range(40):
        colour = list(COLOURS)[number * 7 % 5 % 2]
        Image.new("RGB", (20 + number % 3 * 12, 24 + number % 4 * 8), COLOURS[colour]).save(folder / f"{number}.png")
        user = {"role": "user", "content": "<image>which?"}
        row = {"messages": [user, {"role": "assistant", "content": colour}], "images": [f"{number}.png"]}
        if number % 5 == 4:
            row = {"messages": [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]}
        rows.append(row)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_sft_on_images_learns_and_does_not_depend_on_the_number_of_ranks(family, tmp_path):
    model, rows = tiny.saved(family, tmp_path / "model"), drawings(tmp_path)
    flags = argv(
        f"--model.path {model} --model.dtype float32 --data.train {rows} --data.eval {rows} --data.rows-per-step 10 "
        "--run.steps 12 --optimizer.lr 5e-3 --eval.every 12 --tracking.trackers jsonl --data.images-column images "
        "--generate.every 12 --generate.prompts 4 --generate.max-new-tokens 6 --generate.temperature 0 "
        "--generate.engine hf"
    )
    found = {}
    for ranks in (1, 2):
        succeed([*flags, "--run.dir", str(tmp_path / f"run{ranks}")], module="spmdrl.sft", ranks=ranks)
        found[ranks] = metrics(tmp_path / f"run{ranks}")
    for one, two in zip(found[1], found[2], strict=True):
        for name in ("loss", "grad_norm"):
            assert one.get(name) == pytest.approx(two.get(name), rel=2e-4), (name, one, two)
    said = [json.loads(line) for line in (tmp_path / "run2" / "samples.jsonl").read_text().splitlines()]
    last = [row for row in said if row["step"] == 12]
    assert len(last) == 4 and sum(row["completion"].strip() == row["reference"].strip() for row in last) >= 3, last
    mark = "<image>" if family in tiny.TILED else "<|image_pad|>"
    assert any(mark in row["prompt"] for row in last) and not any(2 * mark in row["prompt"] for row in last)
    losses = [row["eval/loss"] for row in found[1] if "eval/loss" in row]
    assert losses[-1] < 0.3 * losses[0], losses


def test_numbers_of_a_reference_computed_ahead_are_found_by_the_images_of_a_row(tmp_path):
    """All rows have the same question, and many images have the same size, so only the images tell rows apart."""
    model, pairs = tiny.saved("qwen3_vl", tmp_path / "model"), []
    for line in drawings(tmp_path).read_text().splitlines():
        row = json.loads(line)
        if "images" in row:
            user, good = row["messages"]
            bad = good | {"content": "red" if good["content"] == "blue" else "blue"}
            pairs.append({"chosen": [user, good], "rejected": [user, bad], "images": row["images"]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    flags = argv(
        f"--model.path {model} --model.dtype float32 --data.train {file} --data.rows-per-step 8 --run.steps 3 "
        "--optimizer.lr 1e-3 --tracking.trackers jsonl"
    )
    found = {}
    for name, more in {"ahead": ["--reference.precompute"], "live": []}.items():
        succeed([*flags, *more, "--run.dir", str(tmp_path / name)], module="spmdrl.preference", ranks=2)
        found[name] = metrics(tmp_path / name)
    assert found["live"][0]["loss"] == pytest.approx(0.6931, abs=1e-4) and found["live"][-1]["loss"] < 0.6
    for live, ahead in zip(found["live"], found["ahead"], strict=True):
        assert live["loss"] == pytest.approx(ahead["loss"], rel=1e-5)


def test_rows_with_images_are_refused_where_nothing_reads_them(tmp_path):
    model, rows = tiny.saved("qwen2_5_vl", tmp_path / "model"), drawings(tmp_path)
    flags = f"--model.path {model} --model.dtype float32 --data.train {rows} --run.steps 1 --tracking.trackers jsonl"
    cases = {
        "--policy.backend megatron": "the batch has images, but this model does not read images, or not with this",
        "--sft.neftune 5": "--sft.neftune adds no noise to embeddings of images",
        "--model.path tiny": "the model reads text only",
    }
    for number, (more, problem) in enumerate(cases.items()):
        ended = run(
            [*argv(f"{flags} {more}"), "--run.dir", str(tmp_path / f"run{number}")], module="spmdrl.sft", ranks=1
        )
        assert ended.rc and problem in "\n".join(ended.err), ended.show()
