"""Samples per second of a GRPO step: spmdrl and TRL on the same model, data, lengths and engine (HF), 1 thread a rank.

    python benchmarks/vs_trl.py [--quick] [--json FILE]

64 completions of exactly 32 tokens a step (8 prompts x 8 samples), the tiny policy that ships here, float32, one
optimizer update a step, no KL. TRL runs in an environment of its own (`--trl-venv`, made on first use beside `.venv`,
whose torch and transformers it shares, so that both sides run the same kernels). Both sides are timed in one call of
this script, one after the other; a step counts from the third on.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "spmdrl" / "assets" / "tiny"
PINS = ["trl==1.16.0", "accelerate==1.15.0"]
PROMPTS, SAMPLES, TOKENS, SKIP = 8, 8, 32, 2

TRL_SIDE = """
import json, os, random, sys, time
import torch
torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
model, steps, prompts, samples, tokens, out = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
world = int(os.environ.get("WORLD_SIZE", "1"))
draw = random.Random(0)
words = ["".join(draw.choice("abcdefghij") for _ in range(5)) for _ in range(512)]
data = Dataset.from_dict({"prompt": [w + "=" for w in words], "answer": [w[::-1] for w in words]})
def reward(completions, answer, **_):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]
config = GRPOConfig(
    output_dir=out + ".trl", use_cpu=True, bf16=False, per_device_train_batch_size=prompts * samples // world,
    num_generations=samples, max_completion_length=tokens, max_steps=steps, learning_rate=2e-4, logging_steps=1,
    report_to=[], save_strategy="no", beta=0.0, gradient_checkpointing=False, disable_tqdm=True,
    generation_kwargs={"min_new_tokens": tokens})
times = []
class Clock(TrainerCallback):
    def on_step_begin(self, *a, **k): self.began = time.time()
    def on_step_end(self, *a, **k): times.append(time.time() - self.began)
trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=reward,
                      args=config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model),
                      callbacks=[Clock()])
trainer.train()
lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
if os.environ.get("RANK", "0") == "0":
    json.dump({"times": times, "tokens": lengths[-1]}, open(out, "w"))
"""

SPMDRL_SIDE = """
import json, sys
import torch
torch.set_num_threads(1)
from spmdrl.config.load import Loaded, from_command_line
from spmdrl.run import open_run
from spmdrl.train import train
steps, prompts, samples, tokens, folder = *map(int, sys.argv[1:5]), sys.argv[5]
config = from_command_line([
    "--run.dir", folder, "--run.steps", str(steps), "--rollout.engine", "hf",
    "--rollout.prompts_per_step", str(prompts),
    "--rollout.samples_per_prompt", str(samples), "--rollout.max_new_tokens", str(tokens), "--data.eval", "",
    "--eval.every", "0", "--checkpoint.at_end", "false", "--tracking.samples", "0", "--tracking.console", "plain"])
with open_run(Loaded(config.config)) as run:
    # Fixed length on both sides: nothing ends a response early.
    run.engine.stop = torch.zeros(0, dtype=torch.int64)
    train(run)
"""


def environment(world: int) -> dict[str, str]:
    """One thread a rank, no network, the project importable."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_DISABLED": "true",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "TOKENIZERS_PARALLELISM": "false",
    }


def launch(python: Path, world: int, script: str, arguments: list[str], log: Path) -> None:
    """Run a script on `world` ranks; raises with the end of its log when it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as f:
        f.write(script)
    run = (
        [str(python)]
        if world == 1
        else [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    )
    with open(log, "w") as out:
        done = subprocess.run([*run, f.name, *arguments], env=environment(world), stdout=out, stderr=out, check=False)
    if done.returncode:
        raise RuntimeError(f"{log} ends with:\n{log.read_text()[-2000:]}")


def trl_python(venv: Path) -> Path:
    """Python of the TRL environment, made on first use on top of this one's packages."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        site = next(venv.glob("lib/python3.*/site-packages"))
        ours = [p for p in sys.path if p.endswith("site-packages")]
        (site / "base.pth").write_text("\n".join(ours) + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *PINS], check=True)
    return python


def measure(world: int, steps: int, python: Path, work: Path) -> dict:
    """Median seconds a step of both sides at one world size."""
    numbers = [str(x) for x in (steps, PROMPTS, SAMPLES, TOKENS)]
    trl_out = work / f"trl{world}.json"
    launch(python, world, TRL_SIDE, [str(MODEL), *numbers, str(trl_out)], work / f"trl{world}.log")
    trl = json.loads(trl_out.read_text())
    folder = work / f"spmdrl{world}"
    launch(Path(sys.executable), world, SPMDRL_SIDE, [*numbers, str(folder)], work / f"spmdrl{world}.log")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][SKIP:]
    ours = statistics.median(row["time/step"] for row in rows)
    theirs = statistics.median(trl["times"][SKIP:])
    phases = {k: statistics.median(row[k] for row in rows) for k in rows[0] if k.startswith("time/")}
    samples = PROMPTS * SAMPLES
    return {
        "world": world,
        "spmdrl_s": ours,
        "trl_s": theirs,
        "spmdrl_samples_per_s": samples / ours,
        "trl_samples_per_s": samples / theirs,
        "ratio": theirs / ours,
        "trl_mean_tokens": trl["tokens"],
        "spmdrl_mean_tokens": rows[-1]["response_length/mean"],
        "spmdrl_phases": phases,
    }


def main() -> None:
    """Print a table, one line per target, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 steps instead of 30")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parser.parse_args()
    python = trl_python(args.trl_venv)
    steps = 8 if args.quick else 30
    with tempfile.TemporaryDirectory() as work:
        rows = [measure(world, steps, python, Path(work)) for world in (1, 2)]
    print(
        f"{'ranks':>5} {'spmdrl s/step':>14} {'TRL s/step':>11} {'spmdrl samples/s':>17} {'TRL samples/s':>14} {'ratio':>6}"  # noqa: E501
    )
    for r in rows:
        print(
            f"{r['world']:>5} {r['spmdrl_s']:>14.3f} {r['trl_s']:>11.3f} {r['spmdrl_samples_per_s']:>17.0f} "
            f"{r['trl_samples_per_s']:>14.0f} {r['ratio']:>6.2f}"
        )
        print("      phases " + "  ".join(f"{k[5:]} {v:.3f}" for k, v in r["spmdrl_phases"].items()))
    for r in rows:
        word = "ok" if r["ratio"] >= 2 else "miss"
        print(f"target vs_trl_{r['world']}_rank {r['ratio']:.2f} 2.00 {word}")
    if args.json:
        import torch
        import transformers

        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": PINS[0],
            "date": time.strftime("%Y-%m-%d"),
        }
        args.json.write_text(json.dumps({"about": about, "steps": steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
