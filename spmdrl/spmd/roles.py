"""Computes rank roles and mesh axis sizes from the settings, without communication."""

from dataclasses import dataclass

from spmdrl.config.schema import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Axes of the training mesh, outermost first. `sp` splits the tokens of a packed micro-batch: Ulysses or context
parallelism. A policy with expert parallelism derives its expert axis from these."""


@dataclass(frozen=True)
class Roles:
    """Ranks that train, score and sample. With placement `colocated`, every rank does all three.

    With placement `split`, the ranks that sample do nothing else. Scorers hold the frozen models. The trainers are also
    the scorers unless scorers have separate ranks.
    """

    trainers: tuple[int, ...]
    scorers: tuple[int, ...]
    samplers: tuple[int, ...]

    @property
    def split(self) -> bool:
        """True if the ranks that sample do not train."""
        return self.samplers != self.trainers


def axis_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Return the size of each axis. A dp_shard of -1 becomes the size that uses all ranks.

    The sp axis includes the context-parallel ranks (`parallel.cp`).

    Raises ValueError if the product of the sizes is not world_size.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    sizes["sp"] *= parallel.cp
    rest = 1
    for axis, size in sizes.items():
        rest *= size if axis != "dp_shard" else 1
    if sizes["dp_shard"] == -1:
        if world_size % rest:
            raise ValueError(f"the other parallel axes multiply to {rest}, which does not divide {world_size} ranks")
        sizes["dp_shard"] = world_size // rest
    if rest * sizes["dp_shard"] != world_size:
        raise ValueError(f"parallel axes {sizes} multiply to {rest * sizes['dp_shard']}, not to {world_size} ranks")
    return sizes


def roles_of(parallel: ParallelConfig, world_size: int) -> Roles:
    """Return the roles of all ranks according to the settings. Raises ValueError if no rank trains or samples."""
    everyone = tuple(range(world_size))
    if parallel.placement == "colocated":
        return Roles(everyone, everyone, everyone)
    trainers = world_size - parallel.rollout_ranks - parallel.scoring_ranks
    if trainers < 1 or parallel.rollout_ranks < 1:
        raise ValueError(
            f"--parallel.placement split: {parallel.rollout_ranks} of {world_size} ranks sample and "
            f"{parallel.scoring_ranks} score, which leaves {max(trainers, 0)} to train; training and sampling need "
            "a rank each"
        )
    first = world_size - parallel.rollout_ranks
    scorers = everyone[trainers:first] or everyone[:trainers]
    return Roles(everyone[:trainers], scorers, everyone[first:])
