"""Compares the time of a weight push with a plain copy, and the bytes that a rank receives with those that it needs.

    python benchmarks/transfer.py [--quick] [--json FILE]

It prints two tables. *Colocated, one rank*: a real policy (SmolLM2-135M's shapes, float32 master weights) and a real HF
engine, bfloat16 and float32; the copy is `tensor.copy_` of the policy's tensors into others of the engine's type.
*Resharding*: FSDP 2 and 4 to engines of TP 1, 2 and 4 over gloo. The shards have the right shapes and sizes and the
transfer is the program's own; the trainer and the engine around it are stand-ins (no optimizer, no forward), so that
a 1B model fits a small machine: q, k, v, gate, up and the vocabulary are cut by rows, o and down by columns.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

SHAPES = {
    "135M": dict(hidden=576, layers=30, inner=1536, heads=9, kv=3, head=64, vocabulary=49152, tied=True),
    "1B": dict(hidden=2048, layers=16, inner=8192, heads=32, kv=8, head=64, vocabulary=128256, tied=True),
}
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def tensors_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama-like model by tensor name."""
    s, out = SHAPES[name], {}
    out["model.embed_tokens.weight"] = (s["vocabulary"], s["hidden"])
    for i in range(s["layers"]):
        at = f"model.layers.{i}"
        for part, rows in (("q", s["heads"]), ("k", s["kv"]), ("v", s["kv"])):
            out[f"{at}.self_attn.{part}_proj.weight"] = (rows * s["head"], s["hidden"])
        out[f"{at}.self_attn.o_proj.weight"] = (s["hidden"], s["heads"] * s["head"])
        for part in ("gate", "up"):
            out[f"{at}.mlp.{part}_proj.weight"] = (s["inner"], s["hidden"])
        out[f"{at}.mlp.down_proj.weight"] = (s["hidden"], s["inner"])
        out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (s["hidden"],)
    return out | {"model.norm.weight": (s["hidden"],)}


class Shards:
    """Stand-in for a policy, which has rows of every tensor as under FSDP."""

    def __init__(self, shapes: dict, rank: int, ranks: int):
        from spmdrl.weights.reshard import Piece
        from spmdrl.weights.shards import shard_rows

        self.held = []
        for name, shape in shapes.items():
            rows = shard_rows(shape[0], ranks, rank)
            if rows[1] > rows[0]:
                box = (rows, *((0, n) for n in shape[1:]))
                self.held.append(Piece(name, shape, box, torch.randn([b - a for a, b in box])))

    def pieces(self, part: str = "model"):
        """Implement `pieces` of `policy.contract`."""
        return self.held


class Tensors:
    """Stand-in for an engine, which has one rank's part of every tensor."""

    def __init__(self, shapes: dict, rank: int, tp: int, dtype: torch.dtype):
        self.dtype, self.version, self.parts = dtype, None, {}
        for name, shape in shapes.items():
            kind = name.split(".")[-2]
            dim = 0 if kind in ROWS else 1 if kind in COLUMNS else None
            # A tensor that cannot be divided evenly, as with more ranks than heads: engines replicate or pad it.
            if dim is None or shape[dim] % tp:
                dim, rows = 0, shape[0]
                start = 0
            else:
                rows = shape[dim] // tp
                start = rank * rows
            kept = [rows if d == dim else n for d, n in enumerate(shape)]
            self.parts[name] = dim, start, torch.empty(kept, dtype=dtype)

    def load_weights(self, named) -> None:
        """Copy tensors to this rank's parts by name, as an engine's loader does."""
        for name, x in named:
            dim, start, into = self.parts[name]
            into.copy_(x.narrow(dim, start, into.shape[dim]))

    def needs(self, entries):
        """Implement `needs` of `rollout.engine`."""
        from spmdrl.engines.needs import watched_load

        return watched_load(self.load_weights, ((e.name, e.shape, self.dtype) for e in entries))

    def load(self, buckets, version: int) -> None:
        """Implement `load` of `rollout.engine`."""
        for bucket in buckets:
            self.load_weights(bucket.items())
        self.version = version

    def held_words(self) -> int:
        """Implement `held_words` of `rollout.engine`."""
        from spmdrl.spmd.checksum import word_sum

        return word_sum(x for _, _, x in self.parts.values())


def world_of(rank: int, ranks: int, tp: int, folder: str):
    """Return a gloo world of forked ranks."""
    from datetime import timedelta

    from spmdrl.config.schema import ParallelConfig
    from spmdrl.session.environ import keep_freed_memory
    from spmdrl.spmd.mesh import world_from_group

    keep_freed_memory()  # as in a run on CPUs
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return world_from_group(ParallelConfig(), tp, torch.device("cpu"), rank, timedelta(seconds=300))


def best(action, times: int) -> float:
    """Return the seconds of the fastest of several runs on this rank."""
    taken = []
    for _ in range(times):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def reshard(rank: int, ranks: int, tp: int, model: str, bucket_mib: int, times: int, folder: str) -> None:
    """Measure one case of the second table; write this rank's numbers."""
    from spmdrl.session.transfer import Transfer

    world, shapes = world_of(rank, ranks, tp, folder), tensors_of(model)
    policy, engine = Shards(shapes, rank, ranks), Tensors(shapes, world.engine_tp_rank, tp, torch.bfloat16)
    transfer = Transfer(world, policy, engine, torch.bfloat16, bucket_mib << 20)
    report = transfer.push(0)
    seconds = best(lambda: transfer.push(1), times)
    # All tensors share one source, as four ranks of the larger model would otherwise not fit into memory.
    source = torch.randn(max(x.numel() for _, _, x in engine.parts.values()))
    copy = best(lambda: [into.copy_(source[: into.numel()].view_as(into)) for _, _, into in engine.parts.values()], 3)
    held = sum(p.tensor.nbytes // 2 for p in policy.pieces())
    row = dict(needed=report.bytes, received=report.received, seconds=seconds, copy=copy, held=held, deep=report.deep)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def colocated(rank: int, ranks: int, dtype: str, bucket_mib: int, times: int, folder: str) -> None:
    """Measure one row of the first table: a real policy and a real engine on one rank."""
    from spmdrl.config.schema import Config
    from spmdrl.engines.hf.engine import HFEngine
    from spmdrl.hub.build import DTYPES
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.session.transfer import Transfer

    world, cfg = world_of(rank, ranks, 1, folder), Config()
    cfg.model.path, cfg.model.dtype = f"{folder}/model", dtype
    policy, engine = FsdpPolicy(cfg, world, 1), HFEngine(cfg, world, {0})
    transfer = Transfer(world, policy, engine, DTYPES[dtype], bucket_mib << 20)
    report = transfer.push(0)
    target = [torch.empty_like(p.tensor, dtype=DTYPES[dtype]) for p in policy.pieces()]

    def copy() -> None:
        for into, piece in zip(target, policy.pieces(), strict=True):
            into.copy_(piece.tensor)

    copy()
    seconds, plain = best(lambda: transfer.push(1), times), best(copy, times)
    row = dict(needed=report.bytes, seconds=seconds, copy=plain, deep=report.deep)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(row))


def ranks_of(function, ranks: int, *args) -> list[dict]:
    """Run a function on forked ranks and return the results that they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        if function is colocated:
            random_model(Path(folder) / "model")
        mp.start_processes(function, (ranks, *args, folder), ranks, start_method="fork")
        return [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(ranks)]


def random_model(folder: Path) -> None:
    """Write a random model with the shapes of SmolLM2-135M in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SHAPES["135M"]
    config = LlamaConfig(
        hidden_size=s["hidden"],
        num_hidden_layers=s["layers"],
        intermediate_size=s["inner"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        vocab_size=s["vocabulary"],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def main() -> None:
    """Run the cases, print the tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="135M only, fewer repetitions")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--bucket-mib", type=int, default=None, help="as --rollout.push-bucket-mib")
    args = parser.parse_args()
    from spmdrl.config.schema import Config

    bucket, times = args.bucket_mib or Config().rollout.push_bucket_mib, 3 if args.quick else 7
    torch.set_num_threads(1)
    rows, targets = [], []
    print(f"{'colocated, 1 rank':24} {'MiB':>7} {'push s':>8} {'copy s':>8} {'ratio':>6}")
    for dtype in ("bfloat16", "float32"):
        (row,) = ranks_of(colocated, 1, dtype, bucket, times)
        row |= {"case": f"135M {dtype}", "ratio": row["seconds"] / row["copy"]}
        rows.append(row)
        mib = row["needed"] / 2**20
        print(f"{row['case']:24} {mib:7.0f} {row['seconds']:8.4f} {row['copy']:8.4f} {row['ratio']:6.2f}")
        targets.append((f"push-{dtype}-over-copy", row["ratio"], 2.0))
    print(f"\n{'resharding':24} {'needs':>7} {'gets':>7} {'gets/needs':>10} {'push s':>8} {'copy s':>8}   (MiB a rank)")
    worst = 0.0
    for model in ("135M",) if args.quick else ("135M", "1B"):
        for ranks, tp in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
            each = ranks_of(reshard, ranks, tp, model, bucket, 1 if model == "1B" else times)
            row = {
                "case": f"{model} FSDP {ranks} -> TP {tp}",
                "needed": max(r["needed"] for r in each),
                "received": max(r["received"] for r in each),
                "ratio": max(r["received"] / r["needed"] for r in each),
                "seconds": max(r["seconds"] for r in each),
                "copy": statistics.mean(r["copy"] for r in each),
                "deep": all(r["deep"] for r in each),
            }
            worst = max(worst, row["ratio"])
            rows.append(row)
            print(
                f"{row['case']:24} {row['needed'] / 2**20:7.0f} {row['received'] / 2**20:7.0f} {row['ratio']:10.3f} "
                f"{row['seconds']:8.3f} {row['copy']:8.3f}"
            )
    targets.append(("bytes-received-over-needed", worst, 1.1))
    for name, value, goal in targets:
        print(f"target {name} {value:.3f} {goal} {'ok' if value <= goal else 'miss'}")
    if args.json:
        facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        facts |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "bucket_mib": bucket, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
