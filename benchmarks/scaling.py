"""Measures communication of a step on 1 to 8 ranks, and plans 8 to 4,096 ranks, with the same work for each rank.

    python benchmarks/scaling.py [--quick] [--only ranks|plans] [--json FILE] [--plot FILE]

A world of n ranks is n gloo processes on this machine, which train the tiny model for a few complete steps (GRPO, the
HF engine, FSDP2 over all ranks) with four prompts of four samples for each rank. A dispatch mode of torch intercepts
all operations of torch.distributed. The figures are for one step of one rank, as the mean over ranks and over all steps
except the first:

- *collectives*: the number must be equal in all worlds with several ranks.
- *messages*: sends to another rank. Over gloo, a gather of FSDP2 consists of a message to each other rank
  (`spmdrl/spmd/gloo.py`), so the number grows with the world. Under NCCL such a gather is one collective.
- *sent*: bytes that the rank sends under a bandwidth-optimal algorithm (`_axis_bytes.py` has the rules).
- *ring*: sent x n / (n - 1) on groups of n ranks. For a tensor of S bytes, each rank of a ring sends S (n - 1) / n. The
  factor removes the dependence on n, so that the figure is constant if the tensors are the same.
- *requests*: requests to the rendezvous store, without those of the heartbeat thread.

Times are not measured: the ranks share the cores of one machine.

Without --quick, worlds with more ranks than a machine can run are planned (`python -m spmdrl.plan`). Rows of an FSDP
job and a Megatron job have the same figures of a step, and the time and memory of planning (`_scaling_plan.py`).
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
# Remove this folder from the path, because its megatron.py would hide the package `megatron`.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != ROOT / "benchmarks")]

from benchmarks import _scaling_plan  # noqa: E402
from benchmarks._about import measured_on, save  # noqa: E402
from benchmarks._axis_bytes import sent  # noqa: E402

MESSAGES = ("send", "recv_", "recv_any_source_")
WORLDS = (1, 2, 4, 8)
PROMPTS, SAMPLES, TOKENS = 4, 4, 8
"""Prompts of a rank in a step, samples per prompt, and maximum tokens of a sample."""
STEPS = 4
FLAT = 1.1
"""Maximum factor from the bytes of the smallest world with several ranks to those of the largest world."""
LABELS = {"cpu_s": "CPU seconds of planning", "peak_gib": "GiB of planning"}


class Traffic(TorchDispatchMode):
    """A context manager that adds up the communication of this rank in `now`."""

    def __init__(self):
        super().__init__()
        self.now: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: tuple) -> None:
        group = group_of(args)
        ranks = group.size() if group is not None else 1
        if ranks == 1:
            return
        size = sent(operation, args, ranks)
        self.now["sent"] += size
        # Sends to all other ranks of a group are one gather, whose factor is applied to each of them.
        self.now["ring"] += size * ranks / (ranks - 1)
        if operation in MESSAGES:
            self.now["messages"] += operation == "send"
        else:
            self.now["collectives"] += 1
            self.now[f"collectives/{operation.strip('_')}"] += 1


def group_of(args: tuple) -> dist.ProcessGroup | None:
    """Return the process group in the arguments of an operation, or None."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue
    return None


class CountingStore:
    """Wrapper of the rendezvous store that counts its requests in `now`."""

    def __init__(self, store: dist.Store, now: Counter):
        self.store, self.now = store, now

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)

        def call(*args):
            self.now["requests"] += 1
            return found(*args)

        return call


def settings(folder: str, ranks: int, steps: int):
    """Return the settings of a run with the same work for each rank."""
    import dataclasses

    from spmdrl.config.presets import with_preset
    from spmdrl.config.schema import Config

    cfg = with_preset(Config(), "grpo")
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "steps": steps, "seed": 3, "device": "cpu"},
        "model": {"path": "tiny", "dtype": "float32"},
        "rollout": {
            **{"engine": "hf", "prompts_per_step": PROMPTS * ranks, "samples_per_prompt": SAMPLES},
            **{"max_new_tokens": TOKENS, "max_prompt_tokens": 16},
        },
        "algo": {"kl_coef": 0.05},
        "eval": {"every": 0},
        "checkpoint": {"every": 0, "at_end": False},
        "tracking": {"trackers": ("jsonl",)},
    }
    return dataclasses.replace(
        cfg, **{name: dataclasses.replace(getattr(cfg, name), **values) for name, values in sections.items()}
    )


def one_rank(rank: int, ranks: int, steps: int, folder: str) -> None:
    """Train on one rank and write the communication of its steps to FOLDER/<ranks>_<rank>.json."""
    from transformers.utils.logging import disable_progress_bar

    from spmdrl.config.schema import ParallelConfig
    from spmdrl.rl.build import build_run
    from spmdrl.session.session import Session
    from spmdrl.spmd.mesh import world_from_group
    from spmdrl.tracking.metrics import Timer
    from spmdrl.train import train

    disable_progress_bar()
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    store = dist.FileStore(f"{folder}/store_{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    world = world_from_group(ParallelConfig(), 1, torch.device("cpu"), rank, limit)
    traffic = Traffic()
    world.store = CountingStore(world.store, traffic.now)  # type: ignore[assignment]
    os.makedirs(f"{folder}/run_{ranks}", exist_ok=True)
    run = build_run(Session(settings(f"{folder}/run_{ranks}", ranks, steps), world, Timer()))
    traffic_of_steps, begin = [], run.steps

    def counted():
        for step in begin():
            before = Counter(traffic.now)
            yield step
            traffic_of_steps.append({name: traffic.now[name] - before[name] for name in traffic.now})

    run.steps = counted
    with traffic:
        train(run)
    Path(folder, f"{ranks}_{rank}.json").write_text(json.dumps(traffic_of_steps))
    dist.barrier()
    os._exit(0)  # Skip destructors of process groups: they would wait for ranks that may have exited.


def measured(ranks: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the row of one world: the mean figures of a step of a rank, without the first step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (ranks, steps, folder), ranks, start_method="fork")
        of_ranks = [json.loads(Path(folder, f"{ranks}_{r}.json").read_text()) for r in range(ranks)]
    rows = [step for rank in of_ranks for step in rank[1:]]
    names = sorted({name for row in rows for name in row} | {"collectives", "messages", "sent", "ring", "requests"})
    counts = sorted({row.get("collectives", 0) for row in rows})
    mean = {name: sum(row.get(name, 0) for row in rows) / len(rows) for name in names}
    return {"ranks": ranks, "all_collectives": counts} | mean


def targets(rows: list[dict[str, Any]]) -> list[tuple[str, float, str, bool]]:
    """Return (name, value, goal, met) of each target."""
    several = [row for row in rows if row["ranks"] > 1]
    if len(several) < 2:
        return []
    counts = {count for row in several for count in row["all_collectives"]}
    first, last = several[0], several[-1]
    bytes_ratio = last["ring"] / first["ring"]
    worst = max(row["requests"] for row in several)
    return [
        ("scaling-collectives-spread", max(counts) - min(counts), "0", len(counts) == 1),
        ("scaling-bytes-over-2-ranks", bytes_ratio, f"<={FLAT}", bytes_ratio <= FLAT),
        ("scaling-store-requests", worst, f"<={2 * PROMPTS}", worst <= 2 * PROMPTS),
    ]


def plot(rows: list[dict[str, Any]], plans: list[dict[str, Any]], file: Path) -> None:
    """Plot figures of a rank over the number of ranks, relative to the smallest number, for runs and for plans."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = [row for row in rows if row["ranks"] > 1]
    jobs = {name: [row for row in plans if row["job"] == name] for name in dict.fromkeys(p["job"] for p in plans)}
    panels = [("one step of one rank, as run", several, ("collectives", "ring", "sent", "messages"))] if several else []
    panels += [
        (f"{name} job, as planned", mine, ("collectives", "ring", "cpu_s", "peak_gib")) for name, mine in jobs.items()
    ]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
    for axes, (title, mine, names) in zip(all_axes[0], panels, strict=True):
        ticks = [row["ranks"] for row in mine]
        for name in names:
            if first := mine[0][name]:
                label = f"{LABELS.get(name, name)} ({first:,.{1 if first < 10 else 0}f} on {ticks[0]} ranks)"
                axes.plot(ticks, [row[name] / first for row in mine], "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[f"{n:,}" for n in ticks])
        axes.set(xlabel="ranks", ylabel=f"relative to {ticks[0]} ranks", title=title)
        axes.set_ylim(0, max(1.5, axes.get_ylim()[1]))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks, two steps each, and no plans")
    parser.add_argument("--only", choices=("ranks", "plans"), default=None, help="one half")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="an image of the tables: .png or .svg")
    args = parser.parse_args()
    about = measured_on("cpu", args.json)
    rows, plans, pushes = [], [], []
    began = os.getloadavg()
    if args.only != "plans":
        print(f"{'ranks':>5} {'collectives':>11} {'messages':>9} {'sent KiB':>9} {'ring KiB':>9} {'requests':>9}")
        for ranks in (2, 4) if args.quick else WORLDS:
            rows.append(row := measured(ranks, 2 if args.quick else STEPS))
            print(
                f"{ranks:5} {row['collectives']:11.1f} {row['messages']:9.1f} {row['sent'] / 1024:9.0f} "
                f"{row['ring'] / 1024:9.0f} {row['requests']:9.1f}",
                flush=True,
            )
    if args.only == "plans" or not (args.only or args.quick):
        plans, pushes = _scaling_plan.run(), _scaling_plan.run_pushes()
    for name, value, goal, met in targets(rows) + _scaling_plan.targets(plans, pushes):
        print(f"target {name} {value:.2f} {goal} {'ok' if met else 'miss'}")
    # Record the load, because seconds of a plan are wall-clock times, which other programs lengthen.
    about |= {"load_before_and_after": [began, os.getloadavg()]}
    save(args.json, about, rows=rows, plans=plans, pushes=pushes)
    if args.plot:
        plot(rows, plans, args.plot)


if __name__ == "__main__":
    main()
