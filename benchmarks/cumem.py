"""Lets an engine's weights and KV pool sleep in vLLM's allocator beside a real trainer, without vLLM's engine.

    python benchmarks/cumem.py [--quick] [--json FILE]

It needs a GPU and, of vLLM, its Python files and `cumem_allocator` alone, so it also measures sleep where other
libraries of vLLM do not work. The policy is a random model of Qwen2.5-0.5B's shapes under FSDP with AdamW; the weights
are bfloat16 tensors of the same shapes, and the pool has 4 GiB (quick: 1). A cycle is that of a step at sleep level 2:
weights and pool sleep, the trainer steps, the weights wake and are copied from the policy, the pool wakes. After these
cycles, a sleep at level 1 must return every bit of the weights. Memory is the amount that the driver reports as used.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from benchmarks._about import available, measured_on, refuse, save  # noqa: E402
from benchmarks._models import random_published  # noqa: E402

CYCLES = 4
BACK = 0.95
"""Minimum share of the sleeping bytes that the driver must get back."""
GROWTH_GIB = 0.1
"""Maximum growth of the memory after a wake, from the second cycle to the last."""
GIB = 1 << 30


def allocator() -> Any:
    """Return vLLM's allocator. Libraries that it does not call are replaced by empty modules where they do not load."""
    for name in ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def used() -> int:
    """Return the bytes that the driver reports as used."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def cycles(pool: Any, policy: Any, cache_bytes: int, device: torch.device, used: Callable[[], int]) -> list[dict]:
    """Return a row for each cycle, and a last one for a sleep at level 1.

    pool: vLLM's allocator. policy: trains and has the weights. used: returns the device's used bytes.
    """
    with pool.use_memory_pool(tag="weights"):
        weights = [torch.empty_like(piece.tensor, dtype=torch.bfloat16, device=device) for piece in policy.pieces()]
    with pool.use_memory_pool(tag="kv_cache"):
        cache = torch.zeros(cache_bytes, dtype=torch.uint8, device=device)
    size, rows = sum(x.nbytes for x in weights) + cache.nbytes, []
    for level in (*[2] * CYCLES, 1):
        row: dict[str, Any] = {"level": level, "bytes": size}
        kept = [x.clone() for x in weights[:4]]
        row |= timed("sleep_s", used, lambda level=level: pool.sleep(offload_tags=("weights",) if level == 1 else ()))
        row["asleep"] = row.pop("after")
        step(policy)
        row["trained"] = used()
        row |= timed("wake_weights_s", used, lambda: pool.wake_up(tags=["weights"]))
        row["weights"] = row.pop("after")
        if level == 1:
            row["same"] = all(torch.equal(a, b) for a, b in zip(kept, weights, strict=False))
        else:
            row |= timed("push_s", used, lambda: copy(policy, weights))
        row |= timed("wake_cache_s", used, lambda: pool.wake_up(tags=["kv_cache"]))
        cache.fill_(1)
        row["awake"] = used()
        rows.append(row)
    return rows


def timed(name: str, used: Callable[[], int], action: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of an action under a name and, as `before` and `after`, the used bytes around it."""
    before, began = used(), time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {name: seconds, "before": before, "after": used()}


def copy(policy: Any, weights: list[torch.Tensor]) -> None:
    """Copy the policy's weights into the engine's tensors."""
    for into, piece in zip(weights, policy.pieces(), strict=True):
        into.copy_(piece.tensor)


def step(policy: Any) -> None:
    """Take one step of the optimizer with a gradient of ones."""
    for p in policy.shards:
        p.grad = torch.ones_like(p)
    policy.optimizer.step()
    policy.optimizer.zero_grad(set_to_none=True)


def targets(rows: list[dict]) -> list[tuple[str, float, float, bool]]:
    """Return (name, value, goal, reached)."""
    deep, back = [row for row in rows if row["level"] == 2], []
    for before, row in zip([rows[0], *rows], rows, strict=False):
        # The first step of the optimizer creates its state while weights and pool sleep.
        awake = row["asleep"] if row is before else before["awake"]
        back += [] if row is before else [(awake - row["asleep"]) / row["bytes"]]
    grown = (deep[-1]["awake"] - deep[1]["awake"]) / GIB
    return [
        ("cumem-bytes-back", min(back), BACK, min(back) >= BACK),
        ("cumem-gib-grown", grown, GROWTH_GIB, grown <= GROWTH_GIB),
        ("cumem-level-1-same", float(rows[-1]["same"]), 1, rows[-1]["same"]),
    ]


def main() -> None:
    """Print a row for each cycle and one line per target; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a pool of 1 GiB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = measured_on(available(), args.json)
    if about["device"] == "cpu":
        refuse("vLLM's allocator sleeps on GPUs only")
    from spmdrl.config.schema import Config
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.spmd.mesh import start

    pool, cfg = allocator(), Config()
    with tempfile.TemporaryDirectory() as folder:
        cfg.model.path, cfg.model.dtype = str(random_published(Path(folder), "Qwen2.5-0.5B", "cuda")), "bfloat16"
        world = start(cfg.parallel, 1, "cuda", 300.0)
        policy = FsdpPolicy(cfg, world, 100)
    rows = cycles(pool, policy, GIB if args.quick else 4 * GIB, world.device, used)
    save(args.json, about, rows=rows)
    for row in rows:
        print({name: round(v / GIB, 3) if isinstance(v, int) and v > GIB // 64 else v for name, v in row.items()})
    for name, value, goal, reached in targets(rows):
        print(f"target {name} {value:.3f} {goal} {'ok' if reached else 'miss'}")
    sys.stdout.flush()
    # The allocator's memory would be freed after the driver's context is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
