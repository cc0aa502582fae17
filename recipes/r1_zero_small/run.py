"""DeepSeek-R1's stages in small: a base model, SFT on demonstrations, RL from what it saved; beside it RL alone.

    python recipes/r1_zero_small/run.py [--seeds 0 1 2] [--ranks 2] [--out DIR]

The base has the shipped policy's architecture and random weights. Its task is `builtin:reverse`: after `abcde=` comes
`edcba`. Half of the demonstrations are wrong (the copy `abcde`), so that a model which imitates them is right about
every second time; the reward then says which half was meant. RL alone starts from the base, as R1-Zero does.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed
from spmdrl.data.builtin import builtin_rows  # noqa: E402

SHIPPED = ROOT / "spmdrl" / "assets" / "tiny"
WRONG_SHARE = 0.5


def make_base(folder: Path, seed: int) -> None:
    """Writes a model of the shipped policy's architecture with random weights, and its tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHIPPED))
    shutil.copytree(SHIPPED, folder)
    model.save_pretrained(folder)


def make_demonstrations(file: Path, seed: int) -> None:
    """Writes the training prompts of the task with completions, a share of them wrong. No prompt is held out's."""
    rng = random.Random(seed)
    with file.open("w") as out:
        for row in builtin_rows("reverse", held_out=False):
            wrong = rng.random() < WRONG_SHARE
            completion = row["prompt"].removesuffix("=") if wrong else row["answer"]
            out.write(json.dumps({"prompt": row["prompt"], "completion": completion}) + "\n")


def start(job: str, ranks: int, *flags: object) -> None:
    """Runs `spmdrl.JOB` on some ranks and prints its command; its console goes to a file beside its run folder."""
    words = [str(flag) for flag in flags]
    log = Path(words[words.index("--run.dir") + 1]).with_suffix(".log")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = ["-m", *torchrun, f"spmdrl.{job}", *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    print(f"python {' '.join(command)}", flush=True)
    with log.open("w") as console:
        environment = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run([sys.executable, *command], env=environment, stdout=console, stderr=console)
    if ended.returncode:
        raise SystemExit(f"spmdrl.{job} failed:\n{log.read_text()[-3000:]}")


def accuracies(run: Path) -> list[float]:
    """Held-out accuracies of a run, in their order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


def one_seed(out: Path, seed: int, ranks: int, sft: list[str], rl: list[str]) -> tuple[list[float], list[float]]:
    """Runs all stages; returns held-out accuracy before and during RL, from SFT's checkpoint and from the base."""
    make_base(out / "base", seed)
    make_demonstrations(out / "demonstrations.jsonl", seed)
    given = ["--model.path", out / "base", "--data.train", out / "demonstrations.jsonl", "--run.seed", seed]
    start("sft", ranks, "--config", HERE / "demo_sft.yaml", *given, "--run.dir", out / "sft", *sft)
    for name, model in (("rl", out / "sft" / "checkpoints" / "latest" / "model"), ("zero", out / "base")):
        given = ["--model.path", model, "--run.seed", seed]
        start("train", ranks, "--config", HERE / "demo_rl.yaml", *given, "--run.dir", out / name, *rl)
    return accuracies(out / "rl"), accuracies(out / "zero")


def main() -> None:
    """Runs the stages for each seed, and prints one line of accuracies for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/r1_zero_small"))
    parser.add_argument("--sft-steps", type=int, help="fewer steps than demo_sft.yaml has")
    parser.add_argument("--rl-steps", type=int, help="fewer steps than demo_rl.yaml has, at least 2")
    args = parser.parse_args()
    sft = ["--run.steps", str(args.sft_steps)] if args.sft_steps else []
    rl = ["--run.steps", str(args.rl_steps), "--eval.every", str(args.rl_steps)] if args.rl_steps else []
    lines = []
    for seed in args.seeds:
        out = (args.out / f"seed_{seed}").resolve()
        if out.exists():
            raise SystemExit(f"{out} exists: remove it, or name another folder with --out")
        out.mkdir(parents=True)
        after_sft, alone = one_seed(out, seed, args.ranks, sft, rl)
        shown = ", ".join(f"{a:.3f}" for a in after_sft[1:])
        lines.append(f"| {seed} | {alone[0]:.3f} | {after_sft[0]:.3f} | {shown} | {alone[-1]:.3f} |")
    print("\n| seed | base | after SFT | during RL | RL from the base |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
