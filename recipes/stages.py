"""Functions for recipes with several stages: make a small base model, run the stages, read their metrics."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "spmdrl" / "assets" / "tiny"
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}>{{ m['content'] }}"
    "{%- for call in m['tool_calls'] or [] -%}<tool_call>{{ call['function']['name'] }}"
    "{%- for key, value in call['function']['arguments'].items() -%}"
    "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>"
    "{%- endfor -%}</tool_call>{%- endfor -%}<eos>"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}>{%- endif -%}"
)
"""Chat template: a response is between `>` and the end token, with its tool calls in the format of GLM."""
MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Markers around the parts of a tool call."""


def make_base(folder: Path, seed: int, template: str = "", words: Sequence[str] = ()) -> None:
    """Write a model with the architecture of the shipped policy and random weights, and its tokenizer.

    template: a chat template for the tokenizer. words: texts that become tokens, in addition to the 43 characters.
    """
    torch.manual_seed(seed)
    shutil.copytree(SHIPPED, folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    config = AutoConfig.from_pretrained(SHIPPED)
    size, config.vocab_size = config.vocab_size, config.vocab_size + len(words)
    if words:
        tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text())
        ids = dict(zip(words, range(size, config.vocab_size), strict=True))
        tokenizer["model"]["vocab"] |= ids
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"] += [{"id": i, "content": word} | plain for word, i in ids.items() if len(word) > 1]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def calling(name: str, **arguments: str) -> dict:
    """Return a message of the assistant that calls a tool."""
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def write_rows(file: Path, rows: Iterable[dict]) -> Path:
    """Write rows as .jsonl, and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def start(job: str, ranks: int, *flags: object) -> None:
    """Run `spmdrl.JOB` on some ranks, and print its command. Its output is written to RUN_FOLDER.log."""
    words = [str(flag) for flag in flags]
    log = Path(words[words.index("--run.dir") + 1]).with_suffix(".log")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = ["-m", *torchrun, f"spmdrl.{job}", *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    print(f"python {' '.join(command)}", flush=True)
    with log.open("w") as console:
        environment = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run([sys.executable, *command], env=environment, stdout=console, stderr=console)
    if ended.returncode:
        raise SystemExit(f"spmdrl.{job} failed:\n{log.read_text()[-3000:]}")


def evaluations(run: Path, name: str = "eval/accuracy") -> list[str]:
    """Return the values of a metric of a run in the order of its steps, formatted for a table."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [f"{row[name]:.3f}" for row in rows if name in row]


def trained(run: Path) -> Path:
    """Return the folder of the model that a run saved last."""
    return run / "checkpoints" / "latest" / "model"


OneSeed = Callable[[Path, int, int, list[str], list[str]], list[list[str]]]
"""(folder, seed, ranks, further flags of SFT, further flags of RL) -> rows of the table, each a list of cells."""


def run_seeds(about: str | None, out: str, ranks: int, head: Sequence[str], one_seed: OneSeed) -> None:
    """Run a recipe for each seed of the command line, and print a table of the results.

    about: help of the recipe. out, ranks: defaults of the flags. head: head of the table, without the column `seed`.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--sft-steps", type=int, help="number of steps of SFT, for a shorter run")
    parser.add_argument("--rl-steps", type=int, help="number of steps of RL (at least 2), for a shorter run")
    parser.add_argument(
        "--prompts", type=int, help="number of prompts in a step of RL and in an evaluation, for a shorter run"
    )
    args = parser.parse_args()
    sft = ["--run.steps", str(args.sft_steps)] if args.sft_steps else []
    rl = ["--run.steps", str(args.rl_steps), "--eval.every", str(args.rl_steps)] if args.rl_steps else []
    if args.prompts:
        rl += ["--rollout.prompts-per-step", str(args.prompts), "--eval.prompts", str(args.prompts)]
    rows = []
    for seed in args.seeds:
        folder = (args.out / f"seed_{seed}").resolve()
        if folder.exists():
            raise SystemExit(f"{folder} exists: remove it, or set another folder with --out")
        folder.mkdir(parents=True)
        rows += [[str(seed), *cells] for cells in one_seed(folder, seed, args.ranks, sft, rl)]
    columns = ["seed", *head]
    print()
    for cells in [columns, ["---"] * len(columns), *rows]:
        print(f"| {' | '.join(cells)} |")
