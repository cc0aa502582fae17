"""recipes/nano/grpo.py, which shares no line with spmdrl, samples the same tokens and computes the same losses."""

import ast
import json
import random
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from spmdrl.config.schema import DataConfig
from spmdrl.data.prompts import load_prompts
from tests.e2e.runner import ROOT, argv, environment, metrics
from tests.e2e.warm import succeed

pytestmark = pytest.mark.timeout(300)
FOLDER = ROOT / "recipes" / "nano"
SCRIPT = FOLDER / "grpo.py"
FLAGS = argv(
    "--run.steps 10 --run.seed 3 --rollout.prompts-per-step 8 --rollout.samples-per-prompt 4 --algo.updates-per-step 2 "
    "--policy.max-tokens-per-microbatch 128 --optimizer.warmup-steps 3 --optimizer.schedule cosine"
)
"""Flags that both take: several updates a step, several micro-batches an update, a schedule."""
OF_SPMDRL = argv(
    "--rollout.engine hf --rollout.assignment static --rollout.max-prompt-tokens 16 --eval.every 0 "
    "--tracking.trackers jsonl --tracking.samples 1000 --checkpoint.no-at-end"
)


def documented(heading: str) -> list[str]:
    """Returns the words of the first torchrun command of a section of the recipe's page."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    return shlex.split(re.findall(r"^torchrun .*$", page, re.MULTILINE)[0])


def flags(folder: Path) -> list[str]:
    """Returns FLAGS with prompts of several lengths, in a file of this folder."""
    draw, rows = random.Random(1), []
    for _ in range(200):
        word = "".join(draw.choices("abcdefghij", k=draw.choice((3, 4, 5, 5, 5, 5, 6))))
        rows.append({"prompt": f"{word}=", "answer": word[::-1]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*FLAGS, "--data.train", str(folder / "rows.jsonl")]


def nano(folder: Path, ranks: int) -> tuple[list[dict], dict]:
    """Runs the documented command with other numbers; returns its metrics and its samples."""
    words = documented("Run it")
    assert words[:3] == ["torchrun", "--nproc-per-node", "2"] and words[3] == "recipes/nano/grpo.py"
    start = argv(f"-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --nproc-per-node {ranks}")
    command = [sys.executable, *start, *words[3:], *flags(folder), "--run.dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environment("nano"), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, samples(*folder.glob("samples_*.jsonl"))


def samples(*files: Path) -> dict[tuple[int, int, int], tuple[str, float]]:
    """Returns step, prompt and number of every sample -> its text and its reward."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(row["step"], row["index"], row["sample"]): (row["completion"], row["reward"]) for row in rows}


def test_nano_is_short_and_imports_nothing_of_ours():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert foreign == {"torch", "transformers"}
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 350


def test_parity_nano_has_the_prompts_of_the_demo():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "spmdrl" / "assets" / "tiny")
    theirs = runpy.run_path(str(SCRIPT))["read_prompts"]("", tokenizer)
    ours = load_prompts("builtin:reverse", DataConfig(), tokenizer, 512).prompts
    assert theirs == [(prompt.tokens, prompt.ground_truth) for prompt in ours]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> dict[int, tuple[list[dict], dict]]:
    """Metrics and samples of the recipe on 1 and on 2 ranks."""
    return {ranks: nano(tmp_path_factory.mktemp("nano"), ranks) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parity_nano_samples_and_learns_as_spmdrl_does(theirs, ranks, tmp_path):
    """After 10 steps losses differ by 2e-7 and norms by 3e-5 of their size: rounding, which AdamW makes larger.

    A first step with a gradient of rounding alone moves a weight as far as any other.
    """
    succeed([*flags(tmp_path), *OF_SPMDRL, "--run.dir", tmp_path / "run"], 120, ranks=ranks)
    rows, drawn = theirs[ranks]
    ours, told = metrics(tmp_path / "run"), samples(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in ours] == list(range(1, 11))
    # The first rank of a job writes its own samples down.
    assert len(told) == 10 * 8 * 4 / ranks and told == {key: drawn[key] for key in told}
    for mine, other in zip(ours, rows, strict=True):
        assert other["reward/mean"] == pytest.approx(mine["reward/mean"], abs=1e-12), mine["step"]
        assert other["response_length/mean"] == pytest.approx(mine["response_length/mean"], abs=1e-12), mine["step"]
        assert other["loss"] == pytest.approx(mine["loss"], abs=1e-6), mine["step"]
        assert other["clip_fraction"] == pytest.approx(mine["clip_fraction"], abs=1e-6), mine["step"]
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-3), mine["step"]
        assert max(mine["logp_diff/mean"], other["logp_diff/mean"]) < 1e-6, mine["step"]
    assert max(abs(row["loss"]) for row in ours) > 1e-3 and min(row["grad_norm"] for row in ours) > 0.1


def test_layout_nano_draws_the_same_samples_on_any_number_of_ranks(theirs):
    (one, drawn), (two, others) = theirs[1], theirs[2]
    assert len(drawn) == 10 * 8 * 4 and drawn == others
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], abs=1e-6)
