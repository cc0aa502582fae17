"""README's promises and its commands for users of verl and TRL hold as they are written."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e import runner
from tests.e2e.runner import ROOT, argv, metrics
from tests.e2e.warm import succeed

pytestmark = pytest.mark.timeout(240)
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = argv(
    "--rollout.engine hf --run.steps 1 --rollout.prompts-per-step 4 --rollout.samples-per-prompt 4 "
    "--rollout.max-new-tokens 8 --checkpoint.no-at-end --tracking.trackers jsonl"
)
LOSS = """
import torch
import torch.distributed as dist

def my_loss(inputs, **settings):
    answer = 6 * 7
    if dist.get_rank() == 1:
        breakpoint()
    return -inputs.advantages * torch.exp(inputs.logp - inputs.old_logp), {}
"""
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str.strip() == ground_truth), "split": float(extra_info["split"] == "train")}
"""
TRL_REWARDS = """
def accuracy(prompts, completions, solution, **kwargs):
    return [float(text.strip() == truth) for text, truth in zip(completions, solution)]

def short(completions, **kwargs):
    return [float(len(text) <= 5) for text in completions]
"""
WORDS = ("abcde", "fghij", "jihgf", "aabbc")


def flags_of(heading: str, folder: Path) -> list[str]:
    """Returns the flags of the command in a section of README, its files in this folder."""
    section = README.split(f"## {heading}", 1)[1].split("\n## ", 1)[0].replace("\\\n", " ")
    words = shlex.split(re.findall(r"^torchrun .*$", section, re.MULTILINE)[0])
    flags = words[words.index("spmdrl.train") + 1 :]
    assert any(word.startswith("my/") for word in flags), flags
    return [word.replace("my/model", "tiny").replace("my/", f"{folder}/") for word in flags]


def test_readme_a_debugger_opens_on_any_rank(tmp_path):
    """Under torchrun, on the second of two ranks; the first one waits and both end well."""
    (tmp_path / "loss.py").write_text(LOSS)
    flags = [*SMALL, "--algo.loss", f"{tmp_path / 'loss.py'}:my_loss", "--run.dir", tmp_path / "run"]
    ended = runner.succeed(flags, 120, ranks=2, stdin="p answer + 600\np inputs.logp.requires_grad\nc\n")
    shown = "\n".join(ended.out)
    assert "642" in shown and "True" in shown and "my_loss()" in shown, ended.show()
    assert len(metrics(tmp_path / "run")) == 1


def test_readme_command_for_users_of_verl(tmp_path):
    """A parquet file in verl's schema and a reward file with verl's signature, unchanged."""
    import datasets

    for name in ("train", "test"):
        rows = [
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": f"{word}="}],
                "ability": "spelling",
                "reward_model": {"style": "rule", "ground_truth": word[::-1]},
                "extra_info": {"split": name, "index": index},
            }
            for index, word in enumerate(WORDS)
        ]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "reward.py").write_text(VERL_REWARD)
    flags = flags_of("From verl", tmp_path)
    succeed([*flags, *SMALL, "--run.dir", tmp_path / "run"], 120, ranks=2)
    (row,) = metrics(tmp_path / "run")
    assert 0 < row["reward/mean"] < 1 and row["reward/part/split"] == 1 and "eval/accuracy" in row


def test_readme_command_for_users_of_trl(tmp_path):
    """A dataset's rows and two reward functions in TRL's form, unchanged."""
    rows = [{"prompt": f"{word}=", "solution": word[::-1]} for word in WORDS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(TRL_REWARDS)
    flags = flags_of("From TRL", tmp_path)
    succeed([*flags, *SMALL, "--run.dir", tmp_path / "run"], 120, ranks=2)
    (row,) = metrics(tmp_path / "run")
    assert 0 < row["reward/part/accuracy"] < 1 and 0 < row["reward/part/short"] <= 1
    assert row["reward/mean"] == pytest.approx(row["reward/part/accuracy"] + 0.1 * row["reward/part/short"])
