"""Measures memory by owner and phase on one rank, and the memory that sleep returns, for every engine and sleep level.

    python benchmarks/memory.py [--quick] [--json FILE] [--engines hf vllm sglang]

The models are a random Qwen2-shaped policy of 315M parameters (quick: 75M) with float32 masters and AdamW, and a
bfloat16 engine. Trainer and engine take turns as in a run. Offload goes to a file on a CPU and to pinned host memory on
a GPU. The measured memory is the resident memory of the process on a CPU, and the used memory that the driver reports
on a GPU. Each engine is measured in a separate process. SGLang's CPU build runs in a child process, whose memory is not
in the figures.
"""

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._about import available, measured_on, refuse, save  # noqa: E402

GOAL = 0.95
PHASES = (
    *("idle trainer off", "engine weights on", "pushed", "trainer off", "rollout", "sampled"),
    *("engine asleep", "training", "trained"),
)
OWNERS = ("policy parameters", "policy gradients", "policy optimizer", "engine weights", "KV cache")
MIB = 1 << 20


def make_model(folder: Path, quick: bool) -> str:
    """Write a random model to a HF folder and return its path."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = (512, 2816, 12, 8, 2) if quick else (1024, 2816, 25, 16, 4)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = dict(zip(names, sizes, strict=True), vocab_size=32000, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**values, max_position_embeddings=1024, eos_token_id=2)).bfloat16()
    model.save_pretrained(folder)
    return str(folder)


def changed(cfg, **sections: dict):
    """Return the settings with some of their sections changed."""
    return dataclasses.replace(cfg, **{k: dataclasses.replace(getattr(cfg, k), **v) for k, v in sections.items()})


def cycle(memory, level: int) -> None:
    """Run one step, which begins eight samples and then updates the model by a gradient of ones."""
    import torch

    from spmdrl.engines.engine import Request
    from spmdrl.spmd.storage import WORTH_TRIMMING, give_back

    policy, engine, device = memory.policy, memory.engine, memory.world.device
    memory.cfg = changed(memory.cfg, rollout={"sleep_level": level})
    with memory.rollout_phase():
        for i in range(8):
            prompt = [(7 * i + j) % 31000 + 3 for j in range(32)]
            engine.submit(Request((i, 0, 0), prompt, i, policy.version, 8))
        for _ in range(4):
            engine.poll()
        # Return memory cached by the allocator, which would otherwise be attributed to sleep.
        give_back(device, WORTH_TRIMMING)
    with memory.training_phase():
        for p in policy.shards:
            p.grad = torch.ones_like(p)
        policy.optimizer.step()
        policy.optimizer.zero_grad(set_to_none=True)
        policy.version += 1
        give_back(device, WORTH_TRIMMING)


def side(engine_name: str, model: str, quick: bool, out: Path) -> None:
    """Run one engine with two cycles at each sleep level, and write the phases of the second ones as JSON."""

    from spmdrl.config.schema import Config
    from spmdrl.engines.build import build_engine
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.models import Models
    from spmdrl.session.device_table import Memory
    from spmdrl.session.environ import keep_freed_memory, prepare
    from spmdrl.spmd.mesh import start
    from spmdrl.tracking.metrics import Timer

    prepare()
    logging.getLogger("spmdrl").addHandler(logging.NullHandler())
    cfg = Config()
    world = start(cfg.parallel, 1, "auto", 120.0)
    on_gpu = world.device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    cfg = changed(
        cfg,
        model={"path": model, "dtype": "bfloat16"},
        policy={"offload": "host" if on_gpu else "disk"},
        rollout={"engine": engine_name, "kv_cache_gib": 0.25 if quick else 1.0, "max_new_tokens": 16},
    )
    policy = FsdpPolicy(cfg, world, 100)
    engine = build_engine(cfg, world, {2})
    memory = Memory(cfg, Models(policy), engine, Timer(), world)
    rows, seconds = {}, {}
    for level in (1, 2):
        # The second cycle is preceded by a sleep at the same level.
        cycle(memory, level)
        timer = memory.timer = Timer()
        cycle(memory, level)
        seconds[level] = timer.flush()
        rows[level] = {
            name: {
                "table": [dataclasses.asdict(row) for row in memory.phases[name].table],
                "on_device": memory.phases[name].on_device,
                "measured": memory.phases[name].measured,
                "peak": memory.phases[name].peak,
            }
            for name in PHASES
        }
        with memory.rollout_phase():  # This measures what leaves the device after a step with moments.
            rows[level]["offloaded"] = {"measured": memory.phases["idle trainer off"].measured}
        with memory.training_phase():
            pass
    found = {"device": world.device.type, "parameters": sum(p.numel() for p in policy.shards)}
    out.write_text(json.dumps(found | {"levels": rows, "seconds": seconds, "offload": cfg.policy.offload}))
    sys.stdout.flush()
    # Skip vLLM's shutdown, which would kill the process group.
    os._exit(0)


def held(row: dict, owner: str) -> int:
    """Return the bytes of an owner on the device."""
    return sum(r["bytes"] for r in row["table"] if r["owner"] == owner and r["place"] == "device")


def targets(engine: str, result: dict) -> list[tuple[str, float]]:
    """Return (name, measured bytes / expected bytes) for memory that sleep and offload return."""
    out = []
    # On a CPU, SGLang's memory belongs to another process.
    outside = engine == "sglang" and result["offload"] == "disk"
    for level, rows in {}.items() if outside else result["levels"].items():
        before, after = rows["sampled"], rows["engine asleep"]
        freed = before["measured"] - after["measured"]
        cache, weights = (held(before, owner) - held(after, owner) for owner in ("KV cache", "engine weights"))
        # The HF engine only has a cache while it samples, which is small at this length.
        if level == "1" and cache > 64 * MIB:
            out.append((f"kv_back_level_1_{engine}", (freed - weights) / cache))
        if level == "2":
            out.append((f"engine_weights_back_level_2_{engine}", (freed - cache) / weights))
    rows = result["levels"]["2"]
    moments = held(rows["trained"], "policy optimizer")
    left = rows["trained"]["measured"] - rows["offloaded"]["measured"]
    return [*out, (f"optimizer_back_{engine}", left / moments)]


def show(engine: str, result: dict) -> None:
    """Print MiB by owner and phase, measured and peak."""
    for level, rows in result["levels"].items():
        print(f"\n{engine}, sleep level {level}, offload {result['offload']}: MiB on the device")
        print(f"{'phase':<18}" + "".join(f"{name.removeprefix('policy '):>15}" for name in OWNERS), end="")
        print(f"{'table':>9}{'measured':>10}{'rest':>7}{'peak':>7}")
        for name in PHASES:
            row = rows[name]
            cells = "".join(f"{held(row, owner) / MIB:>15.0f}" for owner in OWNERS)
            rest = row["measured"] - row["on_device"]
            numbers = [row["on_device"], row["measured"], rest, row["peak"]]
            print(
                f"{name:<18}{cells}"
                + "".join(f"{n / MIB:>{w}.0f}" for n, w in zip(numbers, (9, 10, 7, 7), strict=True))
            )
        print("  ".join(f"{k[5:]} {v:.2f} s" for k, v in result["seconds"][level].items()))


def main() -> None:
    """Print a table per engine and level and one line per target, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="75M parameters instead of 315M, engines hf and vllm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", nargs="+")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        engine, model, out = args.side
        return side(engine, model, args.quick, Path(out))
    kind = available()
    about = measured_on(kind, args.json)
    from spmdrl.config.engines import sglang_python

    # A name that is given twice counts once.
    engines = list(dict.fromkeys(args.engines or [])) or ["hf", *(["vllm"] if find_spec("vllm") else [])]
    if not args.engines and not args.quick and sglang_python():
        engines.append("sglang")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(os.environ)
    environment["PYTHONPATH"] = str(ROOT)
    results = {}
    with tempfile.TemporaryDirectory() as work:
        model = make_model(Path(work) / "model", args.quick)
        for engine in engines:
            out, log = Path(work) / f"{engine}.json", Path(work) / f"{engine}.log"
            command = [
                sys.executable,
                __file__,
                *(["--quick"] if args.quick else []),
                "--side",
                engine,
                model,
                str(out),
            ]
            with open(log, "w") as f:
                done = subprocess.run(command, env=environment, stdout=f, stderr=f, check=False)
            if done.returncode or not out.exists():
                raise RuntimeError(f"{engine} ends with:\n{log.read_text()[-3000:]}")
            result = results[engine] = json.loads(out.read_text())
            if result["device"] != kind:
                refuse(f"{engine} ran on {result['device']}, not on {kind}")
            show(engine, result)
            result["targets"] = dict(targets(engine, result))
            save(args.json, about, engines=results)
    print()
    for result in results.values():
        for name, value in result["targets"].items():
            print(f"target {name} {value:.3f} {GOAL} {'ok' if value >= GOAL else 'miss'}")


if __name__ == "__main__":
    main()
