"""Runs fixed-seed jobs on two states of this project and compares all that they leave: nothing may differ by a bit.

    python -m tests.long.same_numbers REF [--only NAME ...]     this tree against a git ref: a commit, a tag, a branch

For changes that must not change a number: files that move, names, a design. Jobs are real ones, started with torchrun
and `--deterministic`; compared are metrics.jsonl but for what the clock and the memory say, samples.jsonl, and the
hashes of the last checkpoint's weights, moments, generators and counters. Both trees use this tree's environment and
its kernels.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._models import REWARD, tiny_mixture
from tests.builds import no_vllm
from tests.e2e.kills import differences
from tests.e2e.runner import ROOT, argv, metrics, succeed
from tests.ranks.cases import small_model

STEPS = 3
COMMON = argv(
    f"--deterministic --run.steps {STEPS} --run.seed 5 --optimizer.lr 3e-4 --eval.every 2 --data.limit 64 "
    "--policy.max_tokens_per_microbatch 256 --tracking.trackers jsonl --run.timeout 120 --checkpoint.every 2"
)
SAMPLING = (
    "--rollout.prompts_per_step 8 --rollout.samples_per_prompt 4 --rollout.max_prompt_tokens 16 "
    "--rollout.max_new_tokens 8 --rollout.assignment static --eval.prompts 16 "
)
ROWS = "--data.rows_per_step 16 --data.max_tokens 128 --eval.rows 16 "
ANSWERS = "--generate.every 2 --generate.max_new_tokens 16 --generate.engine hf "
KINDS = {
    "train": SAMPLING + "--algo.updates_per_step 2",
    "distill": SAMPLING,
    "online_preference": SAMPLING,
    "sft": ROWS + ANSWERS,
    "preference": ROWS + ANSWERS,
    "reward_model": ROWS,
}
"""Entry point -> flags of all its jobs."""
HF = "--rollout.engine hf "
TURNS = HF + (
    "--data.train builtin:episodes --data.eval builtin:episodes:eval --data.chat_template {template} "
    "--reward.function environment --algo.advantage turn_rloo --rollout.max_new_tokens 40 --rollout.oversample 1.5 "
    "--rollout.partial_steps 2 "
)
MEGATRON = HF + "--policy.backend megatron --algo.kl_coef 0.05 "
JOBS = {
    "colocated": (2, HF + "--algo.kl_coef 0.05 --algo.entropy_coef 0.001"),
    "split": (3, HF + "--parallel.placement split --parallel.rollout_ranks 1 --rollout.staleness 1"),
    "partial": (2, HF + "--rollout.oversample 1.5 --rollout.partial_steps 1"),
    "ppo": (2, HF + "--algo.preset ppo --algo.kl_coef 0.05"),
    "dapo": (2, HF + "--algo.preset dapo --filter.max_rounds 10"),
    "lora": (2, HF + "--lora.rank 4"),
    "gspo-tp": (2, HF + "--algo.preset gspo --rollout.tp 2"),
    "prime": (2, HF + "--algo.preset prime"),
    "megatron-tp": (2, MEGATRON + "--parallel.tp 2 --parallel.sequence_parallel"),
    "megatron-experts": (2, MEGATRON + "--parallel.ep 2 --model.path {mixture} --reward.function {reward}"),
    "vllm": (1, "--rollout.engine vllm"),
    "resume": (2, HF + "--algo.preset ppo --rollout.oversample 1.5 --rollout.partial_steps 1"),
    "env": (2, TURNS + "--env {echoes}"),
    "env-tp": (2, TURNS + "--env {counts} --rollout.tp 2"),
    "env-branches": (2, TURNS + "--env {sums} --algo.advantage gigpo"),
    "distill": (2, HF + "--reference.path {teacher} --distill.beta 0.5 --distill.given_per_step 2"),
    "distill-split": (
        3,
        HF + "--reference.path {teacher} --distill.top_k 8 --parallel.placement split "
        "--parallel.rollout_ranks 1 --parallel.scoring_ranks 1",
    ),
    "online_preference": (2, HF + "--reference.refresh_every 2 --reference.mix 0.5"),
    "sft": (2, "--data.eval builtin:reverse:eval --sft.neftune 1"),
    "sft-teacher": (2, "--data.eval builtin:reverse:eval --teacher.path {teacher}"),
    "preference": (2, "--data.eval builtin:reverse-pairs:eval --reference.refresh_every 2 --reference.mix 0.5"),
    "reward_model": (2, "--data.eval builtin:reverse-pairs:eval"),
    "reward_model-steps": (
        2,
        "--reward_model.rows steps --reward_model.separator > --data.train builtin:reverse-steps "
        "--data.eval builtin:reverse-steps:eval",
    ),
}
"""Name -> ranks, flags. A job is one of the entry point with whose name it begins, otherwise of `train`."""
RESUMED = ("resume", "env", "env-tp", "env-branches")
"""Jobs that end after two steps, with episodes cut short in mid-conversation, and go on by the same command."""
WORLDS = {"echoes": "Echoes", "counts": "Counts", "sums": "Sums"}
"""Fact -> class in tests/ranks/worlds.py. `Counts` goes on from its state, the others run their turns again."""
TEMPLATE = (
    "{%- for m in messages -%}{{ '>' + m['content'] + '<eos>' if m['role'] == 'assistant' else m['content'] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}>{%- endif -%}"
)
"""Chat template of the demo's tokenizer."""

RUN_JSON = "state/run.json: not the same file"
"""Text with which `kills.differences` reports this difference."""


def train(tree: Path, name: str, folder: Path, facts: dict[str, str]) -> None:
    """Runs a job of JOBS on the code of a tree."""
    (ranks, text), kind = JOBS[name], name.partition("-")[0]
    kind = kind if kind in KINDS else "train"
    flags = [*COMMON, *argv(KINDS[kind]), *argv(text.format(**facts)), "--run.dir", str(folder)]
    # Kernels are this tree's in both: they have tests of their own, and may gain a digit.
    paths = ":".join(map(str, (tree, ROOT / "kernels", tree / "sandbox")))
    for more in [["--run.steps", "2"], []] if name in RESUMED else [[]]:
        succeed([*flags, *more], 240, ranks=ranks, module=f"spmdrl.{kind}", env={"PYTHONPATH": paths}, cwd=tree)


def worlds(folder: Path) -> dict[str, str]:
    """Writes the files that name environments, and the chat template."""
    (folder / "template.jinja").write_text(TEMPLATE)
    for fact, world in WORLDS.items():
        settings = "turn_tokens: 3\nsettings: {turns: 4, uneven: true}\n"
        (folder / f"{fact}.yaml").write_text(f"environment: {ROOT / 'tests/ranks/worlds.py'}:{world}\n{settings}")
    return {"template": str(folder / "template.jinja")} | {fact: str(folder / f"{fact}.yaml") for fact in WORLDS}


def compared(one: Path, other: Path) -> list[str]:
    """Differences between two run folders, in words."""
    found = differences(one, other)
    if RUN_JSON in found:
        # The order of the names in it is no number.
        told = [json.loads((f / "checkpoints" / "latest" / "state" / "run.json").read_text()) for f in (one, other)]
        found = [line for line in found if line != RUN_JSON or told[0] != told[1]]
    rows = [[json.loads(line) for line in (f / "samples.jsonl").read_text().splitlines()] for f in (one, other)]
    # A key that only one tree writes is not compared.
    same = len(rows[0]) == len(rows[1]) and all(
        a[key] == b[key] for a, b in zip(*rows, strict=True) for key in a.keys() & b.keys()
    )
    return found + ([] if same else ["samples.jsonl: not the same"])


def main() -> None:
    """Compares, prints a line for each job, and exits with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref")
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=list(JOBS))
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        before = root / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", before, args.ref], cwd=ROOT, check=True)
        (root / "reward.py").write_text(REWARD)
        facts = {"mixture": str(tiny_mixture(root / "mixture")), "reward": str(root / "reward.py")} | worlds(root)
        facts["teacher"] = small_model(root / "teacher", seed=5, vocab_size=64)
        try:
            for name in args.only:
                if name == "vllm" and (why := no_vllm()):
                    print(f"{name}: skipped, {why}", flush=True)
                    continue
                folders = [root / "runs" / side / name for side in ("before", "after")]
                for tree, folder in zip((before, ROOT), folders, strict=True):
                    train(tree, name, folder, facts)
                found = compared(*folders)
                rows = metrics(folders[1])
                wrong += bool(found)
                print(f"{name}: {'DIFFERS' if found else 'equal'}, {len(rows)} lines, loss {rows[-1]['loss']:.6g}")
                print("".join(f"  {line}\n" for line in found[:20]), end="", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
