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
from spmdrl.plan.images import Images
from spmdrl.plan.kinds import Kind, config_of, kinds_of, stages_of
from spmdrl.plan.scale import Axes, Bound, Rank, bound_of, engine_facts, parking_bound, rank_of, rollout_bound

GIB = 1 << 30
OUTSIDE = 2 * GIB
"""Estimated (not measured) GPU memory in bytes besides tensors: CUDA context, NCCL buffers, fragmentation."""


@dataclass
class Planned:
    """The plan for one kind of rank."""

    kind: Kind
    rank: Rank
    bounds: dict[str, Bound]
    engine: dict[str, Any]
    """Result of `engine_facts`, or an empty dict on ranks that do not sample."""
    numbers: int
    """Number of parameters of the full policy."""
    means: dict[str, float] = field(default_factory=dict)
    """Phase -> peak device bytes, averaged over the ranks of this kind. Pipeline stages differ in the number of
    micro-batches in flight; within a stage, all ranks are assumed to need as much as the first."""
    axes: dict[str, int] = field(default_factory=dict)
    """Axis name in `Traffic` -> size of this rank's group on that axis."""
    images: Images | None = None
    """Images of each prompt."""

    def peak(self) -> tuple[str, int]:
        """Return the phase with the highest device memory use, and its bytes."""
        sums = {phase: sum(tags.values()) for phase, tags in self.rank.memory.items()}
        phase = max(sums, key=lambda name: sums[name])
        return phase, sums[phase]


@dataclass
class Plan:
    """The plan for a job."""

    cfg: Config
    world: int
    gpu: Gpu
    kinds: list[Planned]

    @property
    def numbers(self) -> int:
        """Number of policy parameters."""
        return self.kinds[0].numbers

    @property
    def images(self) -> Images | None:
        """Images of each prompt, or None if the plan assumes none."""
        return next((planned.images for planned in self.kinds if planned.images), None)

    @property
    def exchanged(self) -> int:
        """Most bytes of pixels that reach a rank in the exchange of a step."""
        return max(planned.rank.step.exchanged for planned in self.kinds)

    def worst(self) -> Planned:
        """Return the kind with the fullest device."""
        return max(self.kinds, key=lambda planned: planned.peak()[1])

    def phases(self) -> dict[str, tuple[int, float]]:
        """Return, per phase, the peak bytes on the fullest device and the mean over all ranks that run the phase.

        If training and sampling ranks are separate, no rank runs all phases.
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
        """Free GPU memory in bytes on the fullest rank; negative if the GPU is too small."""
        return int(self.gpu.memory_gib * GIB) - OUTSIDE - self.worst().peak()[1]

    @property
    def spare(self) -> int:
        """`device_spare`. If an engine's KV cache is n bytes too small, the value is at most -n."""
        lack = max((planned.engine.get("lack", 0) for planned in self.kinds), default=0)
        return min(self.device_spare, -lack) if lack else self.device_spare

    @property
    def host_spare(self) -> int | None:
        """Free host memory per node in bytes, or None if the host memory size is unknown."""
        known = self.gpu.host_memory_gib
        return int(known * GIB) - self.host_of_node() if known else None

    @property
    def fits(self) -> bool:
        """True if everything fits on devices and hosts, and every KV cache can hold a full-length sequence."""
        return self.spare >= 0 and (self.host_spare or 0) >= 0

    @property
    def seconds(self) -> float:
        """Lower bound on the step time in seconds: the slowest rank's time in each phase, summed over phases."""
        phases = dict.fromkeys(phase for planned in self.kinds for phase in planned.bounds)
        return sum(max(p.bounds[phase].seconds for p in self.kinds if phase in p.bounds) for phase in phases)

    def host_of_node(self) -> int:
        """Return the bytes of host memory that a node uses if all its ranks need as much as the largest one."""
        return self.gpu.gpus_per_node * max(sum(p.rank.step.host.values()) for p in self.kinds)


def _check_method(cfg: Config) -> None:
    """Reject distillation settings that need texts or an engine, neither of which is available in a plan.

    Raises:
        ValueError: one of these is set; the message names the flags.
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
    """Plan a job whose settings have been validated. kind: `cuda`, or `cpu` for a job with gloo ranks.

    Raises:
        ValueError: the model cannot be planned, or the layout cannot shard it; the message names the flag.
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
    """Limit the maximum sequence length in the settings to the model's number of positions, as engines do.

    Raises:
        ValueError: a maximum-length prompt alone would use all positions.
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
    return Planned(kind, rank, bounds, facts, made.numbers, means_of(each), sizes, made.images)


def means_of(ranks: list[Rank]) -> dict[str, float]:
    """Return the peak device bytes per phase, averaged over ranks."""
    phases = ranks[0].memory
    return {phase: sum(sum(r.memory[phase].values()) for r in ranks) / len(ranks) for phase in phases}


def side_by_side(tasks: list[Callable[[], Any]]) -> Iterator[Any]:
    """Run tasks in forked processes, at most one per core and at most 4, and yield their results in order.

    Raises:
        ValueError: a task raised a ValueError; its message is kept.
        RuntimeError: a task failed for any other reason.
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
    # A regular exit would make torch's fake process groups print warnings.
    os._exit(0)
