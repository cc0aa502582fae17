"""Plans a job by simulating one rank of each kind, in parallel processes."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from spmdrl.config.placement import samplers
from spmdrl.config.schema import Config
from spmdrl.plan.gpus import Gpu
from spmdrl.plan.kinds import Kind, config_of, kinds_of, stages_of
from spmdrl.plan.scale import Axes, Bound, Rank, bound_of, engine_facts, parking_bound, rank_of, rollout_bound

GIB = 1 << 30
OUTSIDE = 2 * GIB
"""Estimated bytes of a GPU outside tensors: CUDA's context, NCCL's buffers, fragmentation. It was not measured."""


@dataclass
class Planned:
    """The plan of one kind of ranks."""

    kind: Kind
    rank: Rank
    bounds: dict[str, Bound]
    engine: dict[str, Any]
    """Facts from `engine_facts`; empty on ranks that do not sample."""
    numbers: int
    """Number of parameters of the complete policy."""
    means: dict[str, float] = field(default_factory=dict)
    """phase -> bytes on the device at the phase's peak, as the mean over the ranks of the kind. Pipeline stages differ
    in the number of micro-batches in flight; all ranks of a stage are taken to need what its first rank needs."""
    axes: dict[str, int] = field(default_factory=dict)
    """Name of an axis in `Traffic` -> number of ranks in this rank's group on the axis."""

    def peak(self) -> tuple[str, int]:
        """Return the phase with the most bytes on the device, and the number of these bytes."""
        sums = {phase: sum(tags.values()) for phase, tags in self.rank.memory.items()}
        phase = max(sums, key=lambda name: sums[name])
        return phase, sums[phase]


@dataclass
class Plan:
    """The plan of a job."""

    cfg: Config
    world: int
    gpu: Gpu
    kinds: list[Planned]

    @property
    def numbers(self) -> int:
        """Number of parameters of the policy."""
        return self.kinds[0].numbers

    def worst(self) -> Planned:
        """Return the kind with the fullest device."""
        return max(self.kinds, key=lambda planned: planned.peak()[1])

    def phases(self) -> dict[str, tuple[int, float]]:
        """Return, for each phase, the bytes at its peak on the fullest device, and their mean over the phase's ranks.

        If some ranks only train and others only sample, no rank goes through all phases.
        """
        found = {}
        for phase in dict.fromkeys(phase for p in self.kinds for phase in p.rank.memory):
            mine = [p for p in self.kinds if phase in p.rank.memory]
            total = sum(p.means[phase] * p.kind.ranks for p in mine)
            worst = max(sum(p.rank.memory[phase].values()) for p in mine)
            found[phase] = worst, total / sum(p.kind.ranks for p in mine)
        return found

    @property
    def device_spare(self) -> int:
        """Bytes of a GPU that stay free on the fullest rank; negative if the GPU is too small."""
        return int(self.gpu.memory_gib * GIB) - OUTSIDE - self.worst().peak()[1]

    @property
    def spare(self) -> int:
        """`device_spare`, but at most -n if the KV cache of an engine lacks n bytes."""
        lack = max((planned.engine.get("lack", 0) for planned in self.kinds), default=0)
        return min(self.device_spare, -lack) if lack else self.device_spare

    @property
    def host_spare(self) -> int | None:
        """Bytes of a node's host memory that stay free; None if that memory is unknown."""
        known = self.gpu.host_memory_gib
        return int(known * GIB) - self.host_of_node() if known else None

    @property
    def fits(self) -> bool:
        """True if everything fits on devices and hosts, and every KV cache holds a sequence of full length."""
        return self.spare >= 0 and (self.host_spare or 0) >= 0

    @property
    def seconds(self) -> float:
        """Least seconds of a step: the sum of its phases, each with the seconds of its slowest ranks."""
        phases = dict.fromkeys(phase for planned in self.kinds for phase in planned.bounds)
        return sum(max(p.bounds[phase].seconds for p in self.kinds if phase in p.bounds) for phase in phases)

    def host_of_node(self) -> int:
        """Return a node's bytes of host memory, as if all its ranks needed as much as the rank that needs the most."""
        return self.gpu.gpus_per_node * max(sum(p.rank.step.host.values()) for p in self.kinds)


def _check_method(cfg: Config) -> None:
    """Reject settings of a distillation that need texts or an engine, which a plan does not have.

    Raises:
        ValueError: one of these settings is set; the message names the flags.
    """
    distill = getattr(cfg, "distill", None)
    if distill is None:
        return
    unplanned = {
        "--distill.on-engine": distill.on_engine,
        "--distill.align": cfg.aligns_tokens,
        "--distill.teacher-template": distill.teacher_template,
        "--distill.given-per-step": distill.given_per_step,
        "--parallel.scoring-ranks": cfg.parallel.scoring_ranks,
    }
    if flags := [flag for flag, value in unplanned.items() if value]:
        what = "this setting; leave it out" if len(flags) == 1 else "these settings; leave them out"
        raise ValueError(f"{', '.join(flags)}: a distillation is planned without {what}")


def plan(cfg: Config, world: int, gpu: Gpu, kind: str = "cuda") -> Plan:
    """Plan a job whose settings passed their checks. kind: `cuda`, or `cpu` for a job of gloo ranks.

    Raises:
        ValueError: the model cannot be planned, or the layout cannot divide it; the message names the flag.
    """
    _check_method(cfg)
    hf_config = config_of(cfg)
    cfg = _within_positions(cfg, hf_config)
    layers, sparse = stages_of(cfg, hf_config)
    kinds = kinds_of(cfg, world, layers, sparse)
    memory = int(gpu.memory_gib * GIB) if kind == "cuda" else None
    tasks = [lambda each=each: _one(cfg, world, each, len(layers), kind, memory, gpu) for each in kinds]
    planned = list(side_by_side(tasks))
    return Plan(cfg, world, gpu, planned)


def _within_positions(cfg: Config, hf_config: Any) -> Config:
    """Limit the longest sequence in the settings to the model's number of positions, as engines do.

    Raises:
        ValueError: the longest prompt alone would use all positions.
    """
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    prompt = cfg.rollout.max_prompt_tokens
    if not positions or prompt + cfg.rollout.max_new_tokens <= positions:
        return cfg
    if prompt >= positions:
        raise ValueError(f"--rollout.max-prompt-tokens {prompt}: must be below the model's {positions} positions")
    return replace(cfg, rollout=replace(cfg.rollout, max_new_tokens=positions - prompt))


def _one(cfg: Config, world: int, kind: Kind, stages: int, device: str, memory: int | None, gpu: Gpu) -> Planned:
    from spmdrl.plan.rank import open_rank

    made = open_rank(cfg, kind.rank, world, device, memory)
    engine = made.engine
    virtual = cfg.parallel.virtual_stages
    step = made.step()
    sampling = engine.sampling_bytes() if engine else {}
    each = [rank_of(step, stage, stages, virtual, sampling, kind.stage) for stage in kind.alike]
    rank, traffic = each[0], made.paper.traffic
    axes = Axes(traffic.axes, kind.rank, gpu.gpus_per_node)
    bounds = {phase: bound_of(load, gpu, axes, rank.micros.get(phase, 0), stages) for phase, load in rank.loads.items()}
    bounds["parking"] = parking_bound(*step.moved, gpu)
    facts = engine_facts(cfg, made) if engine else {}
    if facts:
        engines = samplers(cfg, world) // facts["ranks"]
        bounds["rollout"] = rollout_bound(cfg, gpu, engines, facts)
    sizes = {name: len(ranks) for name, ranks in axes.ranks.items()}
    return Planned(kind, rank, bounds, facts, made.numbers, means_of(each), sizes)


def means_of(ranks: list[Rank]) -> dict[str, float]:
    """Return, for each phase, the mean over ranks of the bytes on the device at the phase's peak."""
    phases = ranks[0].memory
    return {phase: sum(sum(r.memory[phase].values()) for r in ranks) / len(ranks) for phase in phases}


def side_by_side(tasks: list[Callable[[], Any]]) -> Iterator[Any]:
    """Run tasks in forked processes, at most one per core and at most 4, and yield their results in order.

    Raises:
        ValueError: a task raised a ValueError; the message is the same.
        RuntimeError: a task failed in another way.
    """
    context = multiprocessing.get_context("fork")
    waiting, running, results = list(enumerate(tasks)), {}, {}
    most = max(1, min(len(os.sched_getaffinity(0)), 4))
    while waiting or running:
        while waiting and len(running) < most:
            index, task = waiting.pop(0)
            mine, theirs = context.Pipe(False)
            process = context.Process(target=_run, args=(task, theirs))
            process.start()
            theirs.close()
            running[index] = process, mine
        index = min(running)
        process, pipe = running.pop(index)
        try:
            results[index] = pipe.recv()
        except EOFError:
            results[index] = "fault", f"a process of the plan ended with exit code {process.exitcode}"
        process.join()
    for index in range(len(tasks)):
        outcome, value = results[index]
        if outcome == "mistake":
            raise ValueError(value)
        if outcome == "fault":
            raise RuntimeError(value)
        yield value


def _run(task: Callable[[], Any], pipe: Any) -> None:
    try:
        outcome = ("done", task())
    except ValueError as error:
        outcome = ("mistake", str(error))
    except BaseException:
        outcome = ("fault", traceback.format_exc())
    pipe.send(outcome)
    pipe.close()
    # A regular exit would make torch's simulated groups print warnings.
    os._exit(0)
