"""docs/agents.md and conversations.md: their files play, their commands run, and their tables are the code's."""

import io
import json
import re
import shlex
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from spmdrl.config.environment import DECIDE, EnvironmentConfig, read_environment
from spmdrl.config.load import from_command_line
from spmdrl.data.conversation import Conversation
from spmdrl.env.__main__ import main
from spmdrl.env.forms import PARTS
from spmdrl.env.gyms import PACKAGES
from spmdrl.env.play import Play
from spmdrl.env.terminal import by_hand
from spmdrl.rl.agents import Agents
from spmdrl.rl.environment import COUNTS
from tests.e2e.runner import ROOT, argv, metrics
from tests.e2e.warm import succeed
from tests.unit.dialogues import templates, tokenizer_for
from tests.unit.test_docs_algorithms import parts, table

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
CONVERSATIONS = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")
CHAPTERS = parts(PAGE, 2)
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
PLAYED = re.findall(r"<!-- played: (\S+), ([^\n]+) -->\n```\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line) for line in re.findall(r"^(?:torchrun|python) .*-m spmdrl.*$", PAGE, re.MULTILINE)]
SMALL = "--rollout.engine hf --run.device cpu --run.steps 2 --tracking.trackers jsonl"


def rows(name: str) -> list[list[str]]:
    """Returns the rows of a marked table."""
    return table(re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGE + CONVERSATIONS, re.DOTALL)[0])


def test_files_play_as_the_page_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = ROOT / "recipes" / "agents"
    assert {f"recipes/agents/{path.name}": path.read_text(encoding="utf-8") for path in folder.glob("*.py")} == FILES
    assert [len(text.splitlines()) <= 40 for text in FILES.values()] == [True, True]
    assert [name.split(":")[0] for name, *_ in PLAYED] == list(FILES)
    for name, row, shown in PLAYED:
        typed = iter(re.findall(r"^> (.*)$", shown, re.MULTILINE))
        out: list[str] = []

        def read(prompt: str, typed=typed, out=out) -> str:
            out.append(prompt + next(typed))
            return out[-1].removeprefix(prompt)

        with Play(name) as play:
            by_hand(play, json.loads(row), 0, read, out.append)
        assert out[1:] == shown.splitlines(), "the first entry is the help"


def test_command_that_plays_by_hand(monkeypatch, capsys):
    (command,) = [words for words in COMMANDS if words[:4] == ["python", "-m", "spmdrl.env", "try"]]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("edcba\n"))
    assert main(command[3:]) == 0
    assert "final reward 0 (tries 1)" in capsys.readouterr().out


@pytest.mark.timeout(240)
def test_command_of_the_recipe_trains(tmp_path):
    (command,) = [words for words in COMMANDS if "recipes/agents/demo.yaml" in words]
    flags = [*command[command.index("spmdrl.train") + 1 :], *argv(SMALL), "--run.dir", str(tmp_path / "run")]
    flags += argv("--rollout.prompts-per-step 4 --eval.every 2 --eval.prompts 16 --tracking.samples 4")
    succeed(flags, 200, ranks=2)
    told = metrics(tmp_path / "run")
    assert len(told) == 2 and all(row["env/failures"] == 0 and 1 <= row["env/turns"] <= 3 for row in told)
    sums = {f"env/{name}" for name in ("episodes", "whole_turns", "whole_calls", "seconds", "idle")}
    assert {f"env/{name}" for name in COUNTS} - set(told[0]) == sums
    assert 1 <= told[-1]["reward/part/tries"] <= 3 and 0 < told[0]["eval/score"] <= 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for row in samples:
        assert row["finish"] in ("stop", "length") and row["prompt"].startswith("<bos>")
        assert row["reward"] == sum(each.get("reward", 0.0) for each in row.get("segments", ())) or row["reward"] == 1


def test_an_evaluation_of_the_recipe_leaves_conversations(tmp_path):
    """Another one does not add to them."""
    flags = ["--config", "recipes/agents/demo.yaml", *argv("--rollout.engine hf --run.device cpu --eval.prompts 8")]
    for _ in range(2):
        ended = succeed([*flags, "--run.dir", str(tmp_path / "run")], 100, module="spmdrl.evaluate")
    assert 1 <= json.loads(ended.out[-1])["eval/turns"] <= 3, ended.show()
    samples = [json.loads(line) for line in (tmp_path / "run-eval" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and all(row["evaluation"] and len(row["segments"]) >= 2 for row in samples)


@pytest.mark.timeout(240)
def test_tools_of_the_page_train_a_model_with_a_chat_template(tmp_path):
    """An untrained model with SmolLM2's tokenizer and Qwen2.5's template: the tools stand in its prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    (command,) = [words for words in COMMANDS if "recipes/agents/tools.py:TOOLS" in words]
    flags = command[command.index("spmdrl.train") + 1 :]
    loaded = from_command_line(flags)
    assert loaded.config.env == "recipes/agents/tools.py:TOOLS" and loaded.config.reward.function == "gsm8k"
    tokenizer = tokenizer_for(templates()["qwen2_5"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=end, bos_token_id=None, pad_token_id=end, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"What do {n} plums cost?", "answer": ""}) + "\n" for n in range(9)))
    flags = [*argv(SMALL), "--env", "recipes/agents/tools.py:TOOLS", "--reward.function", "environment"]
    flags += ["--model.path", str(tmp_path / "model"), "--data.train", str(data), "--eval.every", "0"]
    flags += ["--run.dir", str(tmp_path / "run"), "--tracking.samples", "1"]
    flags += argv("--rollout.prompts-per-step 2 --rollout.samples-per-prompt 2 --rollout.max-new-tokens 8")
    ended = succeed(flags, 200)
    assert any("tools stock, price; calls in the format hermes" in line for line in ended.out), ended.show()
    assert all(row["env/turns"] == 1 and row["env/failures"] == 0 for row in metrics(tmp_path / "run"))
    (sample, *_) = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert "Look up how many pieces of a fruit" in sample["prompt"] and "plums" in sample["prompt"]


def test_tables_hold_every_setting_and_form(tmp_path):
    default = {f.name: "" if f.default in (MISSING, "") else str(f.default) for f in fields(EnvironmentConfig)}
    default["settings"] = "none"
    assert {row[0].strip("`"): row[1] for row in rows("settings")} == default
    members = "".join(row[0] for row in table(CHAPTERS["An environment in forty lines"]))
    assert all(f"`{name}(" in members for name in PARTS)
    takes = "".join(row[0] for row in table(CHAPTERS["What --env takes"]))
    assert all(f"`{name}:" in takes for name in PACKAGES)
    told = "".join(row[0] for row in table(CHAPTERS["Metrics and samples"]))
    counts = ("turns", "calls", "failed_calls", "malformed", "timeouts", "cut", "forks", "failures")
    assert set(counts) <= set(COUNTS) and set(re.findall(r"`env/(\w+)`", told)) == set(counts)
    kept = re.sub(r"\s+", " ", CHAPTERS["Settings"])
    assert f"other values of {', '.join(f'`{name}`' for name in DECIDE[:-1])} and `{DECIDE[-1]}`" in kept
    for i, text in enumerate(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)):
        file = tmp_path / f"{i}.yaml"
        file.write_text(text)
        assert read_environment(str(file)).environment in [name for name, *_ in PLAYED]


def test_commands_of_the_page_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [words[words.index("spmdrl.train") + 1 :] for words in COMMANDS if "spmdrl.train" in words]
    assert len(found) == 2 and all(from_command_line(flags).config.env for flags in found)
    assert all(Path(word).exists() for flags in found for word in flags if word.endswith(".yaml"))


def test_the_example_of_a_history_plays(tmp_path):
    ((name, code),) = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", CONVERSATIONS, re.DOTALL)
    (tmp_path / name).write_text(code)
    assert len(code.splitlines()) <= 40
    with Play(f"{tmp_path / name}:Notes") as play:
        opened = play.open({"pages": ["one", "two"]})
        assert [m["content"] for m in opened.messages] == ["Take notes of page 1: one"]
        told = play.say("n1")
        text = "Your note so far: n1\nTake notes of page 2: two"
        assert told.anew and told.messages == [{"role": "user", "content": text}]
        assert told.state_key not in ("", opened.state_key) and play.say("n2").done


def test_a_form_of_calls_that_does_not_exist_is_refused_at_the_start():
    template = templates()["qwen2_5"]
    conversation = Conversation(tokenizer_for(template), template)
    with pytest.raises(ValueError, match="calls 'xml'.*take auto or one of hermes"):
        Agents(EnvironmentConfig("builtin:guess", calls="xml"), conversation, set(), 9, "answer", 1.0)
