"""Scales the few micro-batches that ran on paper to a whole step: memory, operations and bytes of one rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from spmdrl.plan.job import Step
from spmdrl.plan.passes import Work
from spmdrl.plan.storages import Moment


@dataclass
class Load:
    """Operations and traffic of a rank in one phase of a step."""

    flops: int = 0
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """(axis, kind of collective) -> bytes."""
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    peers: dict[tuple[str, int], int] = field(default_factory=dict)
    """(`send` or `receive`, rank) -> bytes of a push."""


@dataclass
class Rank:
    """The plan of one rank's step."""

    memory: dict[str, dict[str, int]]
    """phase (`push`, `rollout`, `logp`, `update`) -> bytes on the device at its peak, by purpose."""
    loads: dict[str, Load]
    """phase -> its operations and traffic."""
    host: dict[str, int]
    """Peak bytes in host memory in a step, by purpose."""
    held: dict[str, int]
    """Bytes of the models' own tensors while the rank trains, by owner."""
    numbers: int
    """Parameters on this rank."""
    models: tuple[str, ...]
    """The models of these parameters."""
    moved: tuple[int, int]
    """Bytes that a step moves to the host, and back."""
    checkpoint: int
    """Bytes of a checkpoint, all ranks together."""
    micros: dict[str, int]
    """Micro-batches of the policy's passes: `logp` of a step, `update` of one optimizer step."""


def in_flight(stage: int, stages: int, virtual: int, micros: int) -> int:
    """Return the number of chunks on a pipeline rank whose activations live at once.

    1F1B keeps as many as there are stages from this one on; the interleaved schedule keeps two for each later stage,
    and one round for each further chunk (https://arxiv.org/abs/2104.04473).
    """
    if virtual == 1:
        return min(stages - stage, micros)
    return min((stages - stage - 1) * 2 + (virtual - 1) * stages + 1, micros * virtual)


def line(at: Sequence[tuple[int, float]], x: int) -> float:
    """Return the value at x of the line through the last two points; with a single point, its own value."""
    if len(at) == 1 or at[-1][0] == at[-2][0]:
        return at[-1][1]
    (a, fa), (b, fb) = at[-2:]
    return fb + (fb - fa) / (b - a) * (x - b)


def peak_of(work: Work, stage: int, stages: int, virtual: int, measured: int | None = None) -> dict[str, int]:
    """Return the bytes at the peak of a pass over all micro-batches, by purpose.

    measured: the stage whose passes ran on paper, one with the same layers as `stage`; None if it is `stage`.
    """
    peak = _peak_in_flight(work, stage, stages, virtual, stage if measured is None else measured)
    kept = line([(p.micros, p.kept) for p in work.passes], work.total) - work.passes[-1].kept
    if kept > 0:
        peak["activations"] = peak.get("activations", 0) + int(kept)
    return peak


def _peak_in_flight(work: Work, stage: int, stages: int, virtual: int, measured: int) -> dict[str, int]:
    if work.kind != "update" or stages == 1:
        # Without a pipeline one micro-batch runs at a time; gradients live from the first one on.
        return dict(max((p.peak for p in work.passes), key=lambda m: m.live).by_tag)
    flying = [in_flight(measured, stages, virtual, p.micros) for p in work.passes]
    most = in_flight(stage, stages, virtual, work.total)
    tags = {tag for p in work.passes for tag in p.peak.by_tag}
    points = {tag: [(n, p.peak.by_tag.get(tag, 0)) for n, p in zip(flying, work.passes, strict=True)] for tag in tags}
    return {tag: int(line(at, most)) for tag, at in points.items()}


def load_of(work: Work) -> Load:
    """Return the operations and traffic of a pass over all micro-batches, times the number of such passes in a step."""

    def scaled(values: list[tuple[int, float]]) -> int:
        return int(line(values, work.total) * work.times)

    counts = [p.micros for p in work.passes]
    keys = {key for p in work.passes for key in p.traffic.calls}

    def counter(name: str) -> dict[tuple[str, str], int]:
        of = [getattr(p.traffic, name) for p in work.passes]
        return {key: scaled([(n, c.get(key, 0)) for n, c in zip(counts, of, strict=True)]) for key in keys}

    flops = scaled([(p.micros, p.flops) for p in work.passes])
    return Load(flops, counter("bytes"), counter("calls"))


def added(loads: list[Load]) -> Load:
    """Return the sum of some loads."""
    return Load(
        sum(x.flops for x in loads),
        dict(sum((Counter(x.sent) for x in loads), Counter())),
        dict(sum((Counter(x.calls) for x in loads), Counter())),
    )


def rank_of(
    step: Step, stage: int, stages: int, virtual: int, sampling: dict[str, int], measured: int | None = None
) -> Rank:
    """Scale the step of one rank on paper to its plan.

    stage: its pipeline stage, of `stages`, each of `virtual` chunks. sampling: bytes of its engine that exist only
    while it samples and did not live on paper, by purpose. measured: as in `peak_of`.
    """
    memory: dict[str, dict[str, int]] = {"push": _named(step.moments["push"])}
    memory["rollout"] = _named(step.moments["rollout"]) | _clean(sampling)
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
    host = dict(step.host) | {f"off the device ({place})": n for place, n in step.parked.items() if n}
    micros = {work.kind: work.total for work in step.works if work.model == "policy"}
    return Rank(memory, loads, host, step.held, step.numbers, step.models, step.moved, step.checkpoint, micros)


def _named(moment: Moment) -> dict[str, int]:
    return _clean(moment.by_tag)


def _clean(tags: dict[str, int]) -> dict[str, int]:
    return {tag: n for tag, n in tags.items() if n > 0}
