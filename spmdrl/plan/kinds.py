"""Which ranks of a job are unlike: one of each kind is planned, and stands for all of its kind."""

from dataclasses import dataclass

from spmdrl.config.schema import Config
from spmdrl.spmd.roles import roles_of


@dataclass(frozen=True)
class Kind:
    """Ranks that hold and send as much as one another, or less than the one that stands for them."""

    name: str
    rank: int
    """The one that is planned."""
    ranks: int
    """How many there are."""
    stage: int = 0
    """Its pipeline stage."""
    alike: tuple[int, ...] = (0,)
    """All pipeline stages of this kind, which have as many ranks each."""


def kinds_of(cfg: Config, world: int, layers: list[int], sparse: list[bool]) -> list[Kind]:
    """Return the kinds of ranks of a job.

    Of pipeline stages with layers alike the first one is planned, which has most micro-batches in flight. Ranks of one
    stage hold as much: FSDP pads shards to one length, and its first rank has the most rows.

    Args:
        cfg: the run's settings.
        world: ranks of the job.
        layers: number of layers of each pipeline stage; one number without pipeline parallelism.
        sparse: for each layer of the model, True if it has experts.
    """
    roles = roles_of(cfg.parallel, world)
    each = len(roles.trainers) // len(layers)
    found: dict[tuple, list[int]] = {}
    first = 0
    for stage, count in enumerate(layers):
        mine = tuple(sparse[first : first + count])
        first += count
        found.setdefault((stage == 0, stage == len(layers) - 1, mine), []).append(stage)
    kinds = []
    for (begins, ends, _), stages in found.items():
        name = "ranks that train" if len(layers) == 1 else _stages(stages, begins, ends)
        kinds.append(Kind(name, roles.trainers[stages[0] * each], each * len(stages), stages[0], tuple(stages)))
    if roles.scorers not in (roles.trainers, roles.samplers):
        kinds.append(Kind("ranks that score", roles.scorers[0], len(roles.scorers)))
    if roles.split:
        kinds.append(Kind("ranks that sample", roles.samplers[0], len(roles.samplers)))
    return kinds


def _stages(stages: list[int], first: bool, last: bool) -> str:
    if first or last:
        return "first stage" if first else "last stage"
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
