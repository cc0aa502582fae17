"""Extrapolates a few simulated micro-batches to a rank's full step, and computes lower bounds on the phase times.

Times follow a roofline model (https://en.wikipedia.org/wiki/Roofline_model): a phase takes at least as long as its
busiest resource does at peak rate. These are lower bounds, not predictions: kernels reach 40 to 80% of peak matmul
throughput, and links reach less for small messages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config.schema import Config
from spmdrl.plan.engine_boxes import experts_of
from spmdrl.plan.gpus import Gpu
from spmdrl.plan.passes import Work
from spmdrl.plan.step import Step


@dataclass
class Load:
    """FLOPs and traffic of a rank in one phase of a step."""

    flops: int = 0
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """(axis, collective type) -> bytes that the rank sends."""
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    peers: dict[tuple[str, int], int] = field(default_factory=dict)
    """(`send` or `receive`, peer rank) -> bytes of policy weights exchanged with that rank."""


@dataclass
class Rank:
    """The planned step of one rank."""

    step: Step
    memory: dict[str, dict[str, int]]
    """Phase (`push`, `rollout`, `logp`, `update`) -> peak device bytes, by purpose."""
    loads: dict[str, Load]
    """Phase -> FLOPs and traffic."""
    micros: dict[str, int]
    """Number of policy micro-batches: per training step for `logp`, per optimizer step for `update`."""


def in_flight(stage: int, stages: int, virtual: int, micros: int) -> int:
    """Return the maximum number of chunks whose activations a pipeline rank holds at once.

    A chunk is the pass of one micro-batch through one virtual stage. The 1F1B schedule holds one chunk for this stage
    and one for each later stage. With n later stages, the interleaved schedule holds 2n + (virtual - 1) * stages + 1
    chunks (https://arxiv.org/abs/2104.04473).
    """
    if virtual == 1:
        return min(stages - stage, micros)
    return min((stages - stage - 1) * 2 + (virtual - 1) * stages + 1, micros * virtual)


def line(at: Sequence[tuple[int, float]], x: int) -> float:
    """Extrapolate linearly to x from the last two points. If there is only one point, return its value."""
    if len(at) == 1 or at[-1][0] == at[-2][0]:
        return at[-1][1]
    (a, fa), (b, fb) = at[-2:]
    return fb + (fb - fa) / (b - a) * (x - b)


def peak_of(work: Work, stage: int, stages: int, virtual: int, measured: int | None = None) -> dict[str, int]:
    """Return the peak bytes of a pass over all micro-batches, by purpose.

    measured: the simulated stage, which has the same layers as `stage`, or None if it is `stage` itself.
    """
    peak = _peak_in_flight(work, stage, stages, virtual, stage if measured is None else measured)
    kept = line([(p.micros, p.kept) for p in work.passes], work.total) - work.passes[-1].kept
    if kept > 0:
        peak["activations"] = peak.get("activations", 0) + int(kept)
    return peak


def _peak_in_flight(work: Work, stage: int, stages: int, virtual: int, measured: int) -> dict[str, int]:
    if work.kind != "update" or stages == 1:
        # Without a pipeline, micro-batches run one at a time, so additional ones need no more memory.
        return dict(max((p.peak for p in work.passes), key=lambda m: m.live).by_tag)
    flying = [in_flight(measured, stages, virtual, p.micros) for p in work.passes]
    most = in_flight(stage, stages, virtual, work.total)
    tags = {tag for p in work.passes for tag in p.peak.by_tag}
    points = {tag: [(n, p.peak.by_tag.get(tag, 0)) for n, p in zip(flying, work.passes, strict=True)] for tag in tags}
    return {tag: int(line(at, most)) for tag, at in points.items()}


def load_of(work: Work) -> Load:
    """Return how many FLOPs and how much traffic one type of pass causes in a step, over all micro-batches."""

    def scaled(values: list[tuple[int, float]]) -> int:
        return int(line(values, work.total) * work.times)

    counts = [p.micros for p in work.passes]
    keys = dict.fromkeys(key for p in work.passes for key in p.traffic.calls)

    def counter(name: str) -> dict[tuple[str, str], int]:
        of = [getattr(p.traffic, name) for p in work.passes]
        return {key: scaled([(n, c.get(key, 0)) for n, c in zip(counts, of, strict=True)]) for key in keys}

    flops = scaled([(p.micros, p.flops) for p in work.passes])
    return Load(flops, counter("bytes"), counter("calls"))


def added(loads: list[Load]) -> Load:
    """Return the sum of several loads."""
    return Load(
        sum(x.flops for x in loads),
        dict(sum((Counter(x.sent) for x in loads), Counter())),
        dict(sum((Counter(x.calls) for x in loads), Counter())),
    )


def rank_of(
    step: Step, stage: int, stages: int, virtual: int, sampling: dict[str, int], measured: int | None = None
) -> Rank:
    """Extrapolate a simulated step to the full step of a rank that has the same layers.

    Args:
        step: the simulated step.
        stage: pipeline stage of the planned rank.
        stages: number of pipeline stages.
        virtual: number of virtual stages (chunks) per stage.
        sampling: bytes that the engine uses only while sampling, by purpose; the simulation does not count them.
        measured: the simulated stage, if different from `stage` (see `peak_of`).
    """
    memory = {phase: _clean(step.moments[phase].by_tag) for phase in ("push", "rollout")}
    memory["rollout"] |= _clean(sampling)
    loads = {"push": Load()}
    if step.push:
        pushed = step.push.traffic
        loads["push"] = Load(step.push.flops, dict(pushed.bytes), dict(pushed.calls), dict(pushed.peers))
    for phase, kinds in (("logp", ["logp"]), ("update", ["update", "step"])):
        works = [work for work in step.works if work.kind in kinds and work.passes]
        if works:
            peaks = [peak_of(work, stage, stages, virtual, measured) for work in works]
            memory[phase] = _clean(max(peaks, key=lambda tags: sum(tags.values())))
            loads[phase] = added([load_of(work) for work in works])
    micros = {work.kind: work.total for work in step.works if work.model == "policy"}
    return Rank(step, memory, loads, micros)


def _clean(tags: dict[str, int]) -> dict[str, int]:
    return {tag: n for tag, n in tags.items() if n > 0}


SCATTERED = ("all-to-all", "gather", "scatter")
"""Collectives that send different data to each rank; the others pass the same data along a ring."""


@dataclass(frozen=True)
class Bound:
    """Seconds that each resource of a rank is busy in a phase at peak rate.

    The maximum is a lower bound on the phase's time.
    """

    matrix: float = 0.0
    nvlink: float = 0.0
    network: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    bubble: float = 1.0
    """Slowdown factor of matrix products, caused by waiting for other pipeline stages."""

    def _named(self) -> dict[str, float]:
        named = {"matrix rate": self.matrix * self.bubble, "NVLink": self.nvlink, "network": self.network}
        return named | {"memory": self.memory, "host link": self.host}

    @property
    def seconds(self) -> float:
        """Lower bound on the phase's time in seconds, set by its busiest resource."""
        return max(self._named().values())

    @property
    def by(self) -> str:
        """The resource that determines the bound."""
        named = self._named()
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Axes:
    """A rank's communication groups, and the number of ranks per node."""

    ranks: dict[str, tuple[int, ...]]
    """Axis name -> ranks in this rank's group on that axis."""
    rank: int
    """The rank that these groups belong to."""
    per_node: int
    """Number of GPUs per node; consecutive ranks fill one node after another."""

    def beside(self, rank: int) -> bool:
        """Return True if the given rank is on the same node as this rank."""
        return rank // self.per_node == self.rank // self.per_node

    def divided(self, axis: str, kind: str, size: float) -> tuple[float, float]:
        """Return the minimum bytes that this rank sends in a collective, within its node and over its network card.

        Rings can be arranged so that all ranks of a node send an equal share of the bytes to the next node.
        """
        ranks = self.ranks[axis]
        here = sum(map(self.beside, ranks))
        if here == len(ranks):
            return size, 0.0
        if kind in SCATTERED:
            others = len(ranks) - 1
            return size * (here - 1) / others, size * (len(ranks) - here) / others
        return (size if here > 1 else 0.0), size / here


def bound_of(load: Load, gpu: Gpu, axes: Axes, micros: int, stages: int) -> Bound:
    """Return the `Bound` of a phase: the minimum time that its load keeps each resource busy.

    Links are full duplex, so only the direction with more bytes counts.

    micros: number of micro-batches per pass; together with `stages` it determines the pipeline bubble.
    """
    near: dict[str, float] = dict.fromkeys(("send", "receive"), 0.0)
    far = dict(near)
    for (axis, kind), size in load.sent.items():
        if axis != "push":
            inside, outside = axes.divided(axis, kind, size)
            near["send"] += inside
            far["send"] += outside
    for (way, rank), size in load.peers.items():
        (near if axes.beside(rank) else far)[way] += size
    bubble = (micros + stages - 1) / micros if micros else 1.0
    return Bound(
        load.flops / (gpu.matmul_tflops * 1e12),
        max(near.values()) / (gpu.nvlink_gb_s * 1e9),
        max(far.values()) / (gpu.network_gb_s * 1e9),
        bubble=bubble,
    )


def parking_bound(to_host: int, from_host: int, gpu: Gpu) -> Bound:
    """Return the `Bound` of offloading tensors to the host before sampling and loading them back afterwards."""
    return Bound(host=(to_host + from_host) / (gpu.host_gb_s * 1e9) if gpu.host_gb_s else 0.0)


def rollout_bound(cfg: Config, gpu: Gpu, engines: int, engine: dict) -> Bound:
    """Return the `Bound` of sampling full-length responses, from matrix products and reads of weights and KV cache.

    Each decoding step reads the language model's weights once and the KV cache of every sequence. If tokens choose k of
    n experts uniformly, a step reads n (1 - (1 - k / n) ** tokens) experts. With `--rollout.dp`, each data-parallel
    attention replica has its own sequences and its own cache. The vision tower runs once for each prompt.

    Args:
        cfg: the run's settings.
        gpu: the GPU that each rank uses.
        engines: number of engines in the job.
        engine: result of `engine_facts` for one engine.
    """
    rollout = cfg.rollout
    sequences = -(-rollout.prompts_per_step * rollout.samples_per_prompt // (engines * rollout.dp))
    at_once = max(1, min(sequences, -(-engine["capacity"] // rollout.dp), engine["sequences"] or 1))
    rounds = -(-sequences // at_once)
    new, prompt = rollout.max_new_tokens, rollout.max_prompt_tokens
    read_share = 1 - (1 - engine["chosen_share"]) ** (at_once * rollout.dp)
    weights = engine["weights"] * (1 - engine["tower_share"] - engine["expert_share"] * (1 - read_share))
    read = rounds * new * (weights + at_once * (prompt + new / 2) * engine["token_bytes"])
    prompts = sequences * rollout.dp / rollout.samples_per_prompt
    tokens = sequences * rollout.dp * new + prompts * prompt
    flops = (2 * engine["active_numbers"] * tokens + prompts * engine["image_flops"]) / engine["ranks"]
    return Bound(flops / (gpu.matmul_tflops * 1e12), memory=read / (gpu.memory_tb_s * 1e12))


def engine_facts(cfg: Config, made: Any) -> dict[str, Any]:
    """Return the engine's numbers that the report and `rollout_bound` use."""
    engine, text = made.engine, made.hf_config.get_text_config()
    ranks = made.world.rollout_mesh["tp"].size()
    experts, used = experts_of(text), getattr(text, "num_experts_per_tok", None)
    chosen = used / experts if experts and used else 1.0
    in_experts = made.expert_numbers / made.numbers
    return {
        "ranks": ranks,
        "weights": engine.weight_bytes,
        "cache": engine.cache_bytes,
        "tokens": engine.cache_tokens,
        "sequences": engine.sequences,
        "lack": engine.lack,
        "unknown": engine.unknown,
        "workspace": dict(engine.workspace),
        "capacity": engine.capacity,
        "token_bytes": engine.cache_bytes / engine.cache_tokens if engine.cache_tokens else 0.0,
        "expert_share": in_experts,
        "chosen_share": chosen,
        "active_numbers": made.numbers * (1 - in_experts * (1 - chosen)) - made.tower_numbers,
        "tower_share": made.tower_numbers / made.numbers,
        "image_flops": made.images.flops if made.images else 0,
    }
