"""The recipes of agents: their scripts in short, and the data that they make.

One script and its stages start as a user starts them; those of the others are forked, which spares the imports.
"""

import importlib.util
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest

from spmdrl.env.builtin import Guess
from spmdrl.env.calculator import value_of
from spmdrl.env.search import Search
from tests.e2e import warm
from tests.e2e.runner import ROOT, metrics

RECIPES = ROOT / "recipes"


def load(recipe: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{recipe}_run", RECIPES / recipe / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(recipe: str, out, sft_steps: int, rl_steps: int) -> list[list[str]]:
    """Runs a recipe's script for seed 0; returns the cells of the rows of its table."""
    script = RECIPES / recipe / "run.py"
    words = ["--out", out, "--sft-steps", sft_steps, "--rl-steps", rl_steps, "--prompts", 4]
    if recipe == "guess":
        command = [*map(str, (sys.executable, script, *words))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
        assert ended.returncode == 0, ended.stderr + ended.stdout
        text = ended.stdout
    else:
        text = warm.recipe(script, *words)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| 0 \|.*$", text, re.M)]


def evaluated(run, name: str) -> list[str]:
    return [f"{row[name]:.3f}" for row in metrics(run) if name in row]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("recipe", "runs", "name"),
    [
        ("guess", ["rl"], "eval/score"),
        ("retool", ["calculator", "none"], "eval/accuracy"),
        ("search_r1", ["rl"], "eval/accuracy"),
    ],
)
def test_script_runs_its_stages_and_prints_what_their_logs_say(tmp_path, recipe, runs, name):
    rows = printed(recipe, tmp_path, 8, 2)
    assert len(rows) == len(runs)
    for row, run in zip(rows, runs, strict=True):
        folder = tmp_path / "seed_0" / run
        assert (folder / "checkpoints" / "latest" / "model" / "model.safetensors").is_file()
        assert row[-2:] == evaluated(folder, name) and all(0 <= float(cell) <= 1 for cell in row[-2:])


def test_guesses_are_of_the_game_and_half_of_the_games_listen():
    listening, rows = 0, list(load("guess").games(0))
    for row in rows:
        first, *messages = row["messages"]
        assert first == {"role": "user", "content": "guess 1-8:"} and messages[-1]["role"] == "assistant"
        low, high, within = 1, 8, True
        for said, told in zip(messages[::2], [*messages[1::2], None], strict=True):
            guess = int(said["content"])
            assert 1 <= guess <= 8
            within = within and low <= guess <= high
            if told:
                low, high = (guess + 1, high) if told["content"] == "higher" else (low, guess - 1)
        listening += within
    # Those that do not listen stay within the range at times.
    assert 0.5 < listening / len(rows) < 0.75


def test_halving_finds_every_number_in_four_guesses():
    for number in range(1, 9):
        game, low, high, reward = Guess(), 1, 8, None
        game.reset({"number": number}, 0)
        while reward is None:
            guess = (low + high) // 2
            text, reward, _ = game.step({"content": str(guess)})
            low, high = (guess + 1, high) if text == "higher" else (low, guess - 1)
        assert reward == 1.0


def test_demonstrations_of_products_call_the_tool_in_every_second_row():
    module = load("retool")
    train, held_out = module.products(0)
    assert len(held_out) == 256 and len(train) + len(held_out) == 8100
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    calls = 0
    for row in module.demonstrations(train, 0):
        asked, *called, answer = row["messages"]
        product = asked["content"].removesuffix("=")
        assert answer["content"] == str(value_of(product))
        if called:
            call, told = called
            assert call["tool_calls"] == [{"function": {"name": "calculate", "arguments": {"expression": product}}}]
            assert told == {"role": "tool", "content": answer["content"]}
            calls += 1
    assert 0.46 < calls / len(train) < 0.54


def test_the_corpus_answers_every_search_and_demonstrations_end_early(tmp_path):
    module = load("search_r1")
    world = module.make_world(0)
    train, held_out = module.questions(world)
    children = {row["prompt"].removesuffix("=").split(":")[-1] for row in train}
    assert not children & {row["prompt"].removesuffix("=").split(":")[-1] for row in held_out}
    file = module.write_rows(tmp_path / "corpus.jsonl", module.corpus(world))
    tool, ends = Search(str(file), results=1, cache=str(tmp_path / "index")), {}
    rows = {row["prompt"]: row["answer"] for row in train}
    shown = list(module.demonstrations(train, world, 0))
    for row in shown:
        asked, *between, answer = row["messages"]
        needed = asked["content"].count(":")
        if len(between) == 2 * needed:
            assert answer["content"] == rows[asked["content"]]
        ends.setdefault(needed, []).append(len(between) // 2)
    for each in shown[:200]:
        for call, told in zip(each["messages"][1:-1:2], each["messages"][2:-1:2], strict=True):
            assert tool.search(call["tool_calls"][0]["function"]["arguments"]["query"]) == told["content"]
    for needed, counts in ends.items():
        for count in range(needed + 1):
            assert counts.count(count) / len(counts) == pytest.approx(1 / (needed + 1), abs=0.03)


def test_words_of_the_base_have_tokens_of_their_own(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    module = load("retool")
    module.make_base(tmp_path / "base", 0, module.TEMPLATE, module.WORDS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    messages = [{"role": "user", "content": "12*34="}, module.calling("calculate", expression="12*34")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == f"<bos>{text}"
    assert len(tokens) == 1 + len("12*34=>") + len(module.WORDS) + len("12*34") + 1
    assert AutoConfig.from_pretrained(tmp_path / "base").vocab_size == len(tokenizer) == 47 + len(module.WORDS)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
