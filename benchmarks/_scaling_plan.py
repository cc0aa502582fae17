"""The part of scaling.py that plans jobs with fixed work per rank on 8 to 4,096 simulated ranks.

A plan is made by `python -m spmdrl.plan` in a separate process. `ranks_of_axes` in its JSON is used to remove the
factor (n - 1) / n from the bytes that a rank sends. Two further costs that grow with the number of ranks are measured:
every rank takes part in creating all process groups of the job, and every rank plans its part of the weight push from
the boxes of all ranks.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plans, push_plan

ROOT = Path(__file__).resolve().parents[1]
PLANNED = (8, 64, 512, 4096)
FLAT = 1.1
"""Maximum factor by which the bytes that a rank sends may grow from the fewest ranks to the most."""
SLOWER = 2.0
"""Maximum factor by which the seconds of the planner may grow."""
JOINING, PUSH_SECONDS, PUSH_MIB = 30, 30, 512
"""Limits for a rank: CPU seconds to join all groups, CPU seconds to plan its push, and MiB of that plan."""
WHOLE = ("broadcast", "reduce", "gather", "scatter")
"""Collectives whose bytes do not have the factor (n - 1) / n in a plan; messages do not have it either."""


@dataclass(frozen=True)
class Job:
    """A job in which the work of each rank does not depend on the number of ranks."""

    name: str
    words: str
    """Command line; {ranks} and {copies}, which is ranks / 4, are replaced."""
    layers: int = 0
    """Number of layers to which the model is reduced; 0 to leave it unchanged."""
    model: str = ""
    """Folder of the model in configs/models, if it is reduced."""
    prompts: int = 1
    """Prompts of a rank in a step."""

    def line(self, ranks: int, folder: Path) -> str:
        """Return the command line for a number of ranks. folder: folder to which a reduced model is written."""
        words = self.words.format(ranks=ranks, copies=ranks // 4)
        if self.layers:
            config = json.loads((ROOT / "configs" / "models" / self.model / "config.json").read_text())
            config["num_hidden_layers"] = self.layers
            (folder / "config.json").write_text(json.dumps(config))
            words += f" --model.path {folder}"
        return f"{words} --rollout.prompts-per-step {self.prompts * ranks} --gpu h100 --world {ranks}"


JOBS = (
    # FSDP over all ranks would pad each parameter to a multiple of 4,096 rows, and an engine would receive a message
    # from every rank in every bucket of a push. Large jobs therefore shard over few ranks and replicate. Shards over
    # four ranks, not eight, give 8 ranks both axes.
    Job("fsdp", "--config configs/gsm8k_grpo.yaml --parallel.dp-shard 4 --parallel.dp-replicate {copies}", prompts=4),
    # Axes of size two give 8 ranks the same axes as 4,096 ranks: dp is 2, and two ranks have the same experts.
    Job(
        "megatron",
        "--config configs/qwen3_30b_a3b.yaml --parallel.tp 2 --parallel.pp 2 --parallel.ep 2 "
        "--rollout.max-new-tokens 2048 --shaping.overlong-buffer 1024 --policy.max-tokens-per-microbatch 10240",
        layers=8,
        model="Qwen3-30B-A3B",
    ),
)


def planned(job: Job, ranks: int) -> dict[str, Any]:
    """Plan one job; return the cost of planning, and figures of one step of one rank.

    Raises:
        RuntimeError: the plan was refused, with its reason.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        facts = plans.planned(job.line(ranks, Path(folder)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "skipped" in facts:
        raise RuntimeError(f"{job.name} on {ranks} ranks: {facts['skipped']}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"job": job.name, "ranks": ranks, "seconds": facts["planning_seconds"], "cpu_s": cpu}
    return row | {"peak_gib": facts["planning_gib"]} | figures(facts)


def figures(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the collectives and bytes of a step from a plan's JSON, as the mean over ranks.

    `all_collectives` and `all_ring` have a figure for each kind of rank.
    """
    kinds = [figures_of(kind) for kind in facts["kinds"]]
    counts = [kind["kind"]["ranks"] for kind in facts["kinds"]]
    names = ("collectives", "sent", "ring")
    row: dict[str, Any] = {
        name: sum(kind[name] * n for kind, n in zip(kinds, counts, strict=True)) / sum(counts) for name in names
    }
    row["all_collectives"] = [kind["collectives"] for kind in kinds]
    row["all_ring"] = [kind["ring"] for kind in kinds]
    return row


def figures_of(kind: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one kind of rank: its collectives, and the bytes of collectives and messages."""
    found = dict.fromkeys(("collectives", "sent", "ring"), 0.0)
    sizes = kind["ranks_of_axes"]
    for phase, counts in kind["collectives"].items():
        for key, calls in counts.items():
            axis, what = key.split(": ", 1)
            if what.endswith("receive"):
                continue
            alone = what.endswith("send")
            found["collectives"] += 0 if alone else calls
            size = kind["sent_bytes"][phase].get(key, 0)
            found["sent"] += size
            n = sizes.get(axis) or int(axis.split()[0])
            found["ring"] += size if alone or what in WHOLE else size * n / (n - 1)
    return found


# ── costs that grow with the number of ranks ─────────────────────────────────


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list with the number of process groups that this process helped to create, as a member or not."""
    from torch.distributed import distributed_c10d

    made, make = [0], distributed_c10d._new_process_group_helper

    def helper(*args: Any, **more: Any) -> Any:
        made[0] += 1
        return make(*args, **more)

    distributed_c10d._new_process_group_helper = helper
    try:
        yield made
    finally:
        distributed_c10d._new_process_group_helper = make


def joined(job: Job, ranks: int) -> dict[str, Any]:
    """Create the process groups of a job as rank 0, over a fake store; return their number, CPU seconds and MiB.

    Groups of meshes are created one by one, as over gloo. Call it in a fresh process.
    """
    import shlex
    import warnings

    from spmdrl.config.load import from_command_line
    from spmdrl.plan.paper import Paper
    from spmdrl.plan.rank import open_world
    from spmdrl.plan.substitutes import install

    with tempfile.TemporaryDirectory() as folder:
        words = job.line(ranks, Path(folder)).replace("--gpu h100 ", "").replace(f"--world {ranks}", "")
        cfg = from_command_line(shlex.split(words)).config
    warnings.simplefilter("ignore")
    install(Paper(), "cuda")
    if cfg.policy.backend == "megatron":
        from spmdrl.policy.megatron import model, policy
    before, clock = plans.resident(os.getpid()), time.process_time()
    with counted() as made:
        open_world(cfg, 0, ranks)
        if cfg.policy.backend == "megatron":
            model.initialize(policy.layout_of(cfg))
    seconds = time.process_time() - clock
    grown = (plans.resident(os.getpid()) - before) / 2**20
    return {"groups": made[0], "joining_cpu_s": seconds, "joining_mib": grown}


def pushed(layouts: tuple[str, ...], worlds: tuple[int, ...], layers: int | None = None) -> list[dict[str, Any]]:
    """Plan the push of rank 5 for Qwen3-30B-A3B; return CPU seconds, MiB, and the bytes that describe all boxes.

    layouts: `fsdp` (four shards) and `megatron` (tp 2, pp 2, ep 2); engines are vLLM with tp 4. worlds: numbers of
    ranks. layers: number of layers of the model.
    """
    import numpy as np

    from spmdrl.weights.plan import Sets

    model, rows = push_plan.checkpoint_of("qwen3-30b", layers), []
    for layout in layouts:
        shards = push_plan.fsdp(model, 4)
        for ranks in worlds:
            wanted = push_plan.vllm(model, ranks, 4)
            held = push_plan.megatron(model, ranks, 2, 2, 2)
            if layout == "fsdp":
                held = Sets(shards.rows, np.arange(ranks) % 4)
            row = push_plan.measured(model, held, wanted, 5)
            exchanged = sum(x.nbytes for x in (*held.rows, *wanted.rows)) + 2 * 16 * ranks
            rows.append({"layout": layout, "ranks": ranks, "boxes_mib": exchanged / 2**20} | row)
    return rows


# ── the report ───────────────────────────────────────────────────────────────


def run(jobs: tuple[Job, ...] = JOBS, worlds: tuple[int, ...] = PLANNED) -> list[dict[str, Any]]:
    """Plan all jobs in all worlds, print their table, and return its rows."""
    from spmdrl.plan.run import side_by_side

    rows = []
    print(
        f"{'plan of':<9} {'ranks':>5} {'seconds':>8} {'CPU s':>6} {'GiB':>5} {'collectives':>11} "
        f"{'sent MiB':>9} {'ring MiB':>9} {'groups':>7} {'CPU s':>6}"
    )
    for job in jobs:
        for ranks in worlds:
            row = planned(job, ranks)
            row |= next(side_by_side([lambda job=job, ranks=ranks: joined(job, ranks)]))
            rows.append(row)
            print(
                f"{job.name:<9} {ranks:5} {row['seconds']:8.1f} {row['cpu_s']:6.1f} {row['peak_gib']:5.2f} "
                f"{row['collectives']:11.1f} {row['sent'] / 2**20:9,.0f} "
                f"{row['ring'] / 2**20:9,.0f} {row['groups']:7} {row['joining_cpu_s']:6.2f}",
                flush=True,
            )
    return rows


def run_pushes(worlds: tuple[int, ...] = PLANNED, layers: int | None = None) -> list[dict[str, Any]]:
    """Measure the plans of pushes, print their table, and return its rows."""
    rows = pushed(("fsdp", "megatron"), worlds, layers)
    print(f"{'push of':<9} {'ranks':>5} {'CPU s':>6} {'MiB':>5} {'messages':>8} {'boxes MiB':>9}")
    for row in rows:
        print(
            f"{row['layout']:<9} {row['ranks']:5} {row['cpu_s']:6.2f} {row['peak_mib']:5.1f} "
            f"{row['messages_out']:8} {row['boxes_mib']:9.2f}"
        )
    return rows


def targets(rows: list[dict[str, Any]], pushes: list[dict[str, Any]]) -> list[tuple[str, float, str, bool]]:
    """Return (name, value, goal, met) of each target; most of them compare the most ranks with the fewest."""
    found = []
    for name in dict.fromkeys(row["job"] for row in rows):
        mine = [row for row in rows if row["job"] == name]
        first, last = mine[0], mine[-1]
        counts = zip(*(row["all_collectives"] for row in mine), strict=True)
        spread = max(max(kind) - min(kind) for kind in counts)
        sent = max(b / a for a, b in zip(first["all_ring"], last["all_ring"], strict=True))
        slower, more = (last[name] / first[name] for name in ("seconds", "cpu_s"))
        joining = max(row["joining_cpu_s"] for row in mine)
        found += [
            (f"plan-{name}-collectives-spread", spread, "0", spread == 0),
            (f"plan-{name}-bytes-over-{first['ranks']}-ranks", sent, f"<={FLAT}", sent <= FLAT),
            (f"plan-{name}-seconds-over-{first['ranks']}-ranks", slower, f"<={SLOWER}", slower <= SLOWER),
            # CPU seconds are compared because other programs on the machine affect them less than wall-clock seconds.
            (f"plan-{name}-cpu-s-over-{first['ranks']}-ranks", more, f"<={SLOWER}", more <= SLOWER),
            (f"plan-{name}-joining-cpu-s", joining, f"<={JOINING}", joining <= JOINING),
        ]
    if pushes:
        seconds, most = max(row["cpu_s"] for row in pushes), max(row["peak_mib"] for row in pushes)
        found.append(("plan-push-cpu-s", seconds, f"<={PUSH_SECONDS}", seconds <= PUSH_SECONDS))
        found.append(("plan-push-peak-mib", most, f"<={PUSH_MIB}", most <= PUSH_MIB))
    return found
