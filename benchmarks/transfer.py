"""Compares the time of a weight push with a plain copy, and the bytes that a rank receives with those that it needs.

    python benchmarks/transfer.py [--quick] [--json FILE] [--device auto]

It prints three tables. *Colocated, one rank*: a real policy (a random Llama with float32 master weights) and a real HF
engine in bfloat16 or float32, on a GPU if there is one; the copy is `tensor.copy_` of the policy's tensors into others
of the engine's type. *Parking*: the policy's parameters leave that device and return, as when the engine samples: to
pinned host memory from a GPU, to a file from a CPU; the copy moves the same bytes through one buffer of the same kind.
*Resharding* (on a CPU only): FSDP 2 and 4 to engines of TP 1, 2 and 4 over gloo. The shards have the right shapes and
sizes and the transfer is the program's own; the trainer and the engine around it are stand-ins (no optimizer, no
forward), so that a 1B model fits a small machine: q, k, v, gate, up and the vocabulary are cut by rows, o and down by
columns. One GPU cannot hold several ranks of NCCL, so its resharding is not measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks._about import available, measured_on, refuse, save  # noqa: E402

SHAPES = {
    "135M": dict(hidden=576, layers=30, inner=1536, heads=9, kv=3, head=64, vocabulary=49152, tied=True),
    "1B": dict(hidden=2048, layers=16, inner=8192, heads=32, kv=8, head=64, vocabulary=128256, tied=True),
}
CPU = torch.device("cpu")
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
    """Stand-in for a policy on one rank; as under FSDP, it has rows of every tensor."""

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
    """Stand-in for the engine on one rank; it has the rank's part of every tensor."""

    def __init__(self, shapes: dict, rank: int, tp: int, dtype: torch.dtype):
        self.dtype, self.version, self.parts = dtype, None, {}
        for name, shape in shapes.items():
            kind = name.split(".")[-2]
            dim = 0 if kind in ROWS else 1 if kind in COLUMNS else None
            # Engines replicate or pad a tensor that cannot be divided evenly, as with more ranks than heads.
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
        """Implement `needs` of `engines.engine`."""
        from spmdrl.engines.needs import watched_load

        return watched_load(self.load_weights, ((e.name, e.shape, self.dtype) for e in entries))

    def load(self, buckets, version: int) -> None:
        """Implement `load` of `engines.engine`."""
        for bucket in buckets:
            self.load_weights(bucket.items())
        self.version = version

    def held_words(self) -> int:
        """Implement `held_words` of `engines.engine`."""
        from spmdrl.spmd.checksum import word_sum

        return word_sum(x for _, _, x in self.parts.values())


def world_of(rank: int, ranks: int, tp: int, folder: str):
    """Return a gloo world of forked ranks."""
    from datetime import timedelta

    from spmdrl.config.schema import ParallelConfig
    from spmdrl.session.environ import keep_freed_memory
    from spmdrl.spmd.mesh import world_from_group

    keep_freed_memory()  # A run on CPUs does this too.
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return world_from_group(ParallelConfig(), tp, torch.device("cpu"), rank, timedelta(seconds=300))


def seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of an action, including its work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def best(action: Callable[[], Any], times: int, device: torch.device = CPU) -> float:
    """Return the seconds of the fastest of several runs on this rank."""
    taken = []
    for _ in range(times):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        taken.append(seconds_of(action, device))
    return min(taken)


def reshard(rank: int, ranks: int, tp: int, model: str, bucket_mib: int, times: int, folder: str) -> None:
    """Measure one case of the third table; write this rank's numbers."""
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


def keep(json_file: Path | None, about: dict, rows: list[dict], case: str, row: dict) -> None:
    """Write the rows so far and one without its parking, in a process that may be stopped while it parks."""
    kept = {name: value for name, value in about.items() if name != "clocks_before"}  # Readings would take seconds.
    save(json_file, kept, rows=[*rows, row | {"case": case, "ratio": row["seconds"] / row["copy"]}])


def colocated(
    rank: int,
    device: str,
    model: str,
    dtype: str,
    bucket_mib: int,
    times: int,
    early: Callable[[dict], None],
    folder: str,
) -> None:
    """Measure a row of the first table and one of the second: a real policy and a real engine on one rank."""
    from spmdrl.config.schema import Config
    from spmdrl.session.environ import keep_freed_memory
    from spmdrl.spmd.mesh import start

    torch.set_num_threads(1)
    cfg = Config()
    cfg.model.path, cfg.model.dtype = f"{folder}/model", dtype
    world = start(cfg.parallel, 1, device, 300.0)
    if world.device.type == "cpu":
        keep_freed_memory()  # A run on CPUs does this too.
    random_model(Path(cfg.model.path), model, world.device)
    row = push_and_park(cfg, world, bucket_mib, times, early)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def push_and_park(cfg: Any, world: Any, bucket_mib: int, times: int, early: Callable[[dict], None]) -> dict:
    """Return the numbers of `colocated`. world: of one rank; its device computes.

    early: called with the numbers of the push before anything is parked.
    """
    from spmdrl.engines.hf.engine import HFEngine
    from spmdrl.hub.build import DTYPES
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.session.transfer import Transfer

    device, kind = world.device, DTYPES[cfg.model.dtype]
    policy, engine = FsdpPolicy(cfg, world, 1), HFEngine(cfg, world, {0})
    transfer = Transfer(world, policy, engine, kind, bucket_mib << 20)
    report = transfer.push(0)
    places = {str(piece.tensor.device) for piece in policy.pieces()}
    assert places == {str(device)}, f"the weights are on {places}, not on {device}"
    target = [torch.empty_like(piece.tensor, dtype=kind) for piece in policy.pieces()]

    def copy() -> None:
        for into, piece in zip(target, policy.pieces(), strict=True):
            into.copy_(piece.tensor)

    copy()
    seconds, plain = best(lambda: transfer.push(1), times, device), best(copy, times, device)
    row = dict(needed=report.bytes, seconds=seconds, copy=plain, deep=report.deep, device=str(device))
    early(row)
    return row | {"parking": parking(policy.shards, device, times)}


def parking(tensors: list[torch.Tensor], device: torch.device, times: int) -> dict[str, float]:
    """Return GB/s by which tensors leave a device and return, and those of plain copies of the same bytes.

    `first`: leaving for the first time, which also allocates the host's memory.
    """
    from spmdrl.spmd.storage import PIECE, Parked

    place, away, back, size = "host" if device.type == "cuda" else "disk", [], [], 0
    for _ in range(times):
        held: list[Parked] = []
        away.append(seconds_of(lambda held=held: held.append(Parked(tensors, place, device)), device))
        size = held[0].bytes
        back.append(seconds_of(held[0].bring_back, device))
    on_device = torch.empty(min(PIECE, size), dtype=torch.uint8, device=device)
    on_host = torch.empty(len(on_device), dtype=torch.uint8, pin_memory=device.type == "cuda")
    rounds = -(-size // len(on_device))

    def copies(into: torch.Tensor, source: torch.Tensor) -> float:
        seconds = best(lambda: [into.copy_(source, non_blocking=True) for _ in range(rounds)], times, device)
        return rounds * len(on_device) / seconds / 1e9

    speeds = {
        name: size / taken / 1e9 for name, taken in (("first", away[0]), ("away", min(away)), ("back", min(back)))
    }
    return speeds | {"gb": size / 1e9, "copy_away": copies(on_host, on_device), "copy_back": copies(on_device, on_host)}


def ranks_of(function, ranks: int, *args, start_method: str = "fork") -> list[dict]:
    """Run a function on other processes and return the results that they wrote. args: after the rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(function, (*args, folder), ranks, start_method=start_method)
        return [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(ranks)]


def random_model(folder: Path, name: str, device: torch.device = CPU) -> None:
    """Write a random model with the shapes of SHAPES[name] in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SHAPES[name]
    config = LlamaConfig(
        hidden_size=s["hidden"],
        num_hidden_layers=s["layers"],
        intermediate_size=s["inner"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        head_dim=s["head"],
        vocab_size=s["vocabulary"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with device:
        model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)


def pushes(device: str, quick: bool, bucket: int, times: int, json_file: Path | None, about: dict) -> list[dict]:
    """Print the first two tables, write their rows one by one, and return them."""
    models = ("135M", "1B") if device == "cuda" and not quick else ("1B",) if device == "cuda" else ("135M",)
    kinds = ("bfloat16",) if device == "cuda" and quick else ("bfloat16", "float32")
    rows, forked = [], "spawn" if device == "cuda" else "fork"
    print(f"{'colocated on ' + device:24} {'MiB':>7} {'push s':>8} {'copy s':>8} {'ratio':>6}")
    for model in models:
        for dtype in kinds:
            early = partial(keep, json_file, about, list(rows), f"{model} {dtype}")
            (row,) = ranks_of(colocated, 1, device, model, dtype, bucket, times, early, start_method=forked)
            row |= {"case": f"{model} {dtype}", "ratio": row["seconds"] / row["copy"]}
            rows.append(row)
            save(json_file, about, rows=rows)
            mib = row["needed"] / 2**20
            print(
                f"{row['case']:24} {mib:7.0f} {row['seconds']:8.4f} {row['copy']:8.4f} {row['ratio']:6.2f}", flush=True
            )
    names = ("gb", "first", "away", "back", "copy_away", "copy_back")
    print(f"\n{'parking, GB/s':24} " + " ".join(f"{name:>9}" for name in names))
    for row in rows:
        print(f"{row['case']:24} " + " ".join(f"{row['parking'][name]:9.2f}" for name in names))
    return rows


def resharding(quick: bool, bucket: int, times: int) -> list[dict]:
    """Print the third table and return its rows."""
    rows = []
    head = f"{'needs':>7} {'gets':>7} {'gets/needs':>10} {'push s':>8} {'copy s':>8}   (MiB a rank)"
    print(f"\n{'resharding on cpu':24} {head}")
    for model in ("135M",) if quick else ("135M", "1B"):
        for ranks, tp in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
            each = ranks_of(reshard, ranks, ranks, tp, model, bucket, 1 if model == "1B" else times)
            row = {
                "case": f"{model} FSDP {ranks} -> TP {tp}",
                "needed": max(r["needed"] for r in each),
                "received": max(r["received"] for r in each),
                "ratio": max(r["received"] / r["needed"] for r in each),
                "seconds": max(r["seconds"] for r in each),
                "copy": statistics.mean(r["copy"] for r in each),
                "deep": all(r["deep"] for r in each),
                "device": "cpu",
            }
            rows.append(row)
            print(
                f"{row['case']:24} {row['needed'] / 2**20:7.0f} {row['received'] / 2**20:7.0f} {row['ratio']:10.3f} "
                f"{row['seconds']:8.3f} {row['copy']:8.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    """Run the cases, print the tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one model (135M on a CPU, 1B on a GPU), fewer repetitions"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--bucket-mib", type=int, default=None, help="as --rollout.push-bucket-mib")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    args = parser.parse_args()
    device = available() if args.device == "auto" else args.device
    if device == "cuda" != available():
        refuse("--device cuda, but torch sees no CUDA device on this machine")
    from spmdrl.config.schema import Config

    bucket, times = args.bucket_mib or Config().rollout.push_bucket_mib, 3 if args.quick else 7
    about = measured_on(device, args.json) | {"bucket_mib": bucket}
    torch.set_num_threads(1)
    rows = pushes(device, args.quick, bucket, times, args.json, about)
    targets = [(f"push-{row['case'].replace(' ', '-')}-over-copy", row["ratio"], 2.0) for row in rows]
    if device == "cpu":
        moved = resharding(args.quick, bucket, times)
        targets.append(("bytes-received-over-needed", max(row["ratio"] for row in moved), 1.1))
        save(args.json, about, rows=rows + moved)
    for name, value, goal in targets:
        print(f"target {name} {value:.3f} {goal} {'ok' if value <= goal else 'miss'}")


if __name__ == "__main__":
    main()
