"""Measures the planning of a weight push among hundreds of ranks: memory, CPU seconds, messages and digests of a rank.

    python benchmarks/push_plan.py [--quick] [--ranks 512] [--json FILE]

It simulates all ranks in one process, without weights. Names and shapes come from a HF model on the meta device. The
boxes (parts of tensors) that each rank has and needs are derived from the layouts, in the form in which ranks exchange
them. *fsdp* has rows of every parameter, with experts divided as in `weights/experts.py`. *megatron* has tp 4, pp 8,
ep 16 as in `policy/megatron/convert.py`. Engines are vLLM with tp 8 and, for *ep*, complete experts. `weights/plan.py`
makes the plan for two ranks; in large jobs, one of them has experts and the other has none. Memory counts the
allocations of Python and NumPy (tracemalloc), including the boxes of all ranks.
"""

import argparse
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks._about import measured_on, save  # noqa: E402

MODELS = {"qwen3-30b": "Qwen3-30B-A3B", "qwen3-235b": "Qwen3-235B-A22B", "deepseek-v3": "DeepSeek-V3"}
ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
BUCKET = 256 << 20


@dataclass
class Checkpoint:
    """Tensors of a checkpoint, and the model parameters that contain them."""

    entries: list
    """`weights.boxes.Entry` of each tensor."""
    parameters: list[tuple[int, list[int]]]
    """For each parameter, its number of rows and the indices of its tensors: one, or one per expert in row order."""
    config: Any
    """Config of the model in transformers."""


def checkpoint_of(model: str, layers: int | None = None) -> Checkpoint:
    """Return the tensors of a model on the meta device. layers: replaces the model's number of layers."""
    from transformers import AutoModelForCausalLM

    from benchmarks._models import published
    from spmdrl.weights.boxes import Entry
    from spmdrl.weights.experts import Layout, full_box

    more = dict(num_hidden_layers=layers, first_k_dense_replace=1) if layers else {}
    config = published(MODELS[model], **more)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    layout, entries, parameters = Layout(hf), [], []
    for name, p in hf.named_parameters():
        slots = layout.slots(name, tuple(p.shape), full_box(p.shape))
        parameters.append((p.shape[0], list(range(len(entries), len(entries) + len(slots)))))
        entries += [Entry(slot.name, slot.shape) for slot in slots]
    return Checkpoint(entries, parameters, config)


def to_row(i: int, shape: tuple[int, ...], dim: int | None = None, part: tuple[int, int] = (0, 0)) -> list[int]:
    """Return a tensor (one or two dimensions), or its range `part` of dimension `dim`, as a row of a plan."""
    first, last = [0, 0], [*shape, 1][:2]
    if dim is not None:
        first[dim], last[dim] = part
    return [i, *first, *last]


def sets_of(rows: list[list[list[int]]], of: list[int]):
    """Return a `weights.plan.Sets` made from the rows of each set."""
    from spmdrl.weights.boxes import runs
    from spmdrl.weights.plan import Sets

    arrays = [np.array(x, dtype=np.int64).reshape(-1, 5) for x in rows]
    return Sets([x[runs(x)[0]] for x in arrays], np.array(of))


def fsdp(model: Checkpoint, ranks: int):
    """Return the boxes of all ranks under FSDP2: rows of every parameter."""
    from spmdrl.weights.shards import shard_rows

    held: list[list[list[int]]] = [[] for _ in range(ranks)]
    for rows, tensors in model.parameters:
        for rank in range(ranks):
            a, b = shard_rows(rows, ranks, rank)
            if len(tensors) > 1:  # The rank has one or several complete experts.
                each = len(tensors) // rows
                held[rank] += [to_row(i, model.entries[i].shape) for i in tensors[a * each : b * each]]
            elif a < b:
                held[rank].append(to_row(tensors[0], model.entries[tensors[0]].shape, 0, (a, b)))
    return sets_of(held, list(range(ranks)))


def shared(name: str, shape: tuple[int, ...], parts: int, part: int, config) -> tuple[int | None, tuple[int, int]]:
    """Return the dimension that tensor parallelism divides and a rank's range of it; None for an undivided tensor."""
    kind = name.split(".")[-2]
    dim = 0 if kind in ROWS else 1 if kind in COLUMNS else None
    if dim is None:
        return None, (0, 0)
    if kind in ("k_proj", "v_proj") and config.num_key_value_heads < parts:  # Several ranks have the same head.
        parts, part = config.num_key_value_heads, part * config.num_key_value_heads // parts
    if shape[dim] % parts:
        return None, (0, 0)
    step = shape[dim] // parts
    return dim, (part * step, (part + 1) * step)


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to."""
    words = name.split(".")
    return int(words[words.index("experts") + 1]) if "experts" in words else None


def megatron(model: Checkpoint, ranks: int, tp: int = 4, pp: int = 8, ep: int = 16):
    """Return the boxes of all ranks under Megatron: parts of a stage's tensors, and complete experts."""
    layers, stage_ranks = model.config.num_hidden_layers, ranks // pp
    assert stage_ranks * pp == ranks and ep % tp == 0 and stage_ranks % ep == 0
    experts = 1 + max(expert_of(e.name) or 0 for e in model.entries)
    held = [[] for _ in range(pp * ep)]
    for i, entry in enumerate(model.entries):
        words = entry.name.split(".")
        stage = int(words[2]) * pp // layers if words[1] == "layers" else 0 if words[1] == "embed_tokens" else pp - 1
        expert = expert_of(entry.name)
        for place in range(ep):
            if expert is None:
                row = to_row(i, entry.shape, *shared(entry.name, entry.shape, tp, place % tp, model.config))
            elif expert * ep // experts == place:
                row = to_row(i, entry.shape)
            else:
                continue
            held[stage * ep + place].append(row)
    return sets_of(held, [rank // stage_ranks * ep + rank % ep for rank in range(ranks)])


def vllm(model: Checkpoint, ranks: int, tp: int = 8, ep: bool = False):
    """Return the boxes that ranks of engines need. ep: an engine's ranks have complete experts, not parts of each."""
    experts = 1 + max(expert_of(e.name) or 0 for e in model.entries)
    needed = [[] for _ in range(tp)]
    for i, entry in enumerate(model.entries):
        expert = expert_of(entry.name)
        for place in range(tp):
            if expert is None or not ep:
                needed[place].append(to_row(i, entry.shape, *shared(entry.name, entry.shape, tp, place, model.config)))
            elif expert * tp // experts == place:
                needed[place].append(to_row(i, entry.shape))
    return sets_of(needed, [rank % tp for rank in range(ranks)])


def plan(model: Checkpoint, held, wanted, rank: int):
    """Return the plan of one rank for a push in bfloat16, and the bucket of each tensor."""
    from spmdrl.weights.plan import Routes
    from spmdrl.weights.reshard import bucket_places

    places = bucket_places(model.entries, 2, BUCKET)
    pieces = np.arange(len(held.rows[held.of[rank]]))
    return Routes(held, wanted, rank, pieces, model.entries, np.array(places)), 1 + places[-1]


def exchanged(sets):
    """Return copies of sets in the form in which ranks exchange them: one block of rows."""
    from spmdrl.weights.plan import Sets

    rows = np.concatenate(sets.rows)
    return Sets(np.split(rows, np.cumsum([len(x) for x in sets.rows])[:-1]), sets.of.copy())


def traffic(model: Checkpoint, held, routes, buckets: int, rank: int) -> dict:
    """Return messages, regions, digests and bytes of a push on one rank, also with one digest for each region."""
    from spmdrl.weights.boxes import to_boxes
    from spmdrl.weights.reshard import message_bytes

    out = dict.fromkeys(("messages_in", "messages_out", "regions_in", "regions_out", "digests", "received"), 0)
    out |= dict.fromkeys(("region_digests", "region_received"), 0)
    mine = to_boxes(held.rows[held.of[rank]], model.entries)
    for k in range(buckets):
        bucket, different = routes.bucket(k), set()
        for places, regions in bucket.send:
            out["messages_out"] += len(places)
            out["regions_out"] += len(places) * len(regions)
            out["digests"] += 1
            different |= {(mine[n][0], box) for n, box in regions}
        out["region_digests"] += len(different)  # A region counts once for all receivers.
        for regions in bucket.receive.values():
            nbytes = message_bytes((torch.bfloat16, box) for _, box in regions)
            out["messages_in"] += 1
            out["regions_in"] += len(regions)
            out["digests"] += 1
            out["received"] += nbytes
            out["region_digests"] += len(regions)
            out["region_received"] += nbytes - 8 + -(-8 * len(regions) // 16) * 16
    return out


def measured(model: Checkpoint, held, wanted, rank: int) -> dict:
    """Plan twice; return CPU seconds of the first plan, peak and final MiB of the second one, and its traffic."""
    clock = time.process_time()
    plan(model, exchanged(held), exchanged(wanted), rank)
    seconds = time.process_time() - clock
    tracemalloc.start()
    routes, buckets = plan(model, exchanged(held), exchanged(wanted), rank)
    remaining, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    row = dict(peak_mib=peak / 2**20, lasting_mib=remaining / 2**20, cpu_s=seconds)
    return row | traffic(model, held, routes, buckets, rank)


def main() -> None:
    """Run the cases, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest model alone, 64 ranks")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    about = measured_on("cpu", args.json)
    torch.set_num_threads(1)
    ranks, rows = args.ranks or (64 if args.quick else 512), []
    print(f"{ranks} ranks, bfloat16, buckets of {BUCKET >> 20} MiB; one push of one rank")
    # (region): numbers with one digest per region.
    print(
        f"{'':42} {'peak':>5} {'lasts':>5} {'CPU':>5}  {'messages':>13}  {'regions':>13}  {'digests':>15} {'gets':>7}\n"
        f"{'case':37} {'rank':>4} {'MiB':>5} {'MiB':>5} {'s':>5}  {'in':>6} {'out':>6}  {'in':>6} {'out':>6}  "
        f"{'':>6} {'(region)':>8} {'MiB':>7}"
    )
    for name in ("qwen3-30b",) if args.quick else tuple(MODELS):
        model = checkpoint_of(name)
        trainers = {"fsdp": fsdp(model, ranks)}
        if not ranks % (8 * 16):
            trainers["megatron"] = megatron(model, ranks)
        engines = {"tp 8": vllm(model, ranks), "tp 8 ep": vllm(model, ranks, ep=True)}
        for (trainer, held), (engine, wanted) in ((t, e) for t in trainers.items() for e in engines.items()):
            for rank in sorted({5 % ranks, max(0, ranks - 3)}):
                row = dict(case=f"{name} {trainer} -> {engine}", ranks=ranks, rank=rank)
                row |= measured(model, held, wanted, rank)
                rows.append(row)
                print(
                    f"{row['case']:37} {rank:4} {row['peak_mib']:5.0f} {row['lasting_mib']:5.0f} {row['cpu_s']:5.1f}  "
                    f"{row['messages_in']:6} {row['messages_out']:6}  {row['regions_in']:6} {row['regions_out']:6}  "
                    f"{row['digests']:6} {row['region_digests']:8} {row['received'] / 2**20:7.0f}",
                    flush=True,
                )
    for name, value, goal in (
        ("push-plan-peak-mib", max(row["peak_mib"] for row in rows), 512),
        ("push-plan-cpu-s", max(row["cpu_s"] for row in rows), 30),
    ):
        print(f"target {name} {value:.1f} {goal} {'ok' if value <= goal else 'miss'}")
    save(args.json, about, rows=rows)


if __name__ == "__main__":
    main()
