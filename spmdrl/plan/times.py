"""Least times of a step's phases by a roofline: no rank is faster than its slowest resource at its peak rate.

Source: https://en.wikipedia.org/wiki/Roofline_model. These are bounds, not forecasts: kernels reach 40 to 80% of peak
matrix rates, and links less for small messages.
"""

from dataclasses import dataclass

from spmdrl.config.schema import Config
from spmdrl.plan.gpus import Gpu
from spmdrl.plan.scaled import Load

SCATTERED = ("all-to-all", "gather", "scatter")
"""Collectives that carry different bytes to each rank; others pass the same bytes along a ring."""


@dataclass(frozen=True)
class Bound:
    """Seconds that each resource of a rank is busy at its peak rate; the phase takes at least the longest of them."""

    matrix: float = 0.0
    nvlink: float = 0.0
    network: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    bubble: float = 1.0
    """Factor by which a pipeline's ranks wait for one another."""

    def _named(self) -> dict[str, float]:
        named = {"matrix rate": self.matrix * self.bubble, "NVLink": self.nvlink, "network": self.network}
        return named | {"memory": self.memory, "host link": self.host}

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self._named().values())

    @property
    def by(self) -> str:
        """The resource that determines the least time."""
        named = self._named()
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Axes:
    """The places of the ranks with which a rank communicates."""

    ranks: dict[str, tuple[int, ...]]
    """Axis -> the ranks of its group."""
    rank: int
    """The rank itself."""
    per_node: int
    """GPUs of a node; ranks fill nodes in order."""

    def beside(self, rank: int) -> bool:
        """Return True for a rank of the same node."""
        return rank // self.per_node == self.rank // self.per_node

    def divided(self, axis: str, kind: str, size: float) -> tuple[float, float]:
        """Return the least bytes of a collective that this rank sends inside its node, and over its network card.

        A ring can be laid so that each rank of a node passes a part of the bytes on to the next node.
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
    """Return the bound of a phase. Links carry both directions at once, so only the larger one counts.

    micros: micro-batches of one pass, for the bubble of a pipeline with this many stages.
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
    """Return the bound of a step's moves of weights and optimizers: to the host before sampling, and back after it."""
    return Bound(host=(to_host + from_host) / (gpu.host_gb_s * 1e9) if gpu.host_gb_s else 0.0)


def rollout_bound(cfg: Config, gpu: Gpu, engines: int, engine: dict) -> Bound:
    """Return the bound of sampling responses of full length: matrix products, and reads of weights and cache.

    Each step of an engine reads the weights once, and the cache of each sequence. Of n experts it reads those that its
    tokens choose, k each: n (1 - (1 - k / n) ** tokens) if the choice is even. Copies of an engine's attention
    (`--rollout.dp`) have sequences and a cache of their own.

    Args:
        cfg: the run's settings.
        gpu: the GPU of a rank.
        engines: number of engines in the job.
        engine: facts of one engine from `run.engine_facts`: its ranks together, and the cache of one rank.
    """
    rollout = cfg.rollout
    sequences = -(-rollout.prompts_per_step * rollout.samples_per_prompt // (engines * rollout.dp))
    at_once = max(1, min(sequences, -(-engine["capacity"] // rollout.dp), engine["sequences"] or 1))
    rounds = -(-sequences // at_once)
    new, prompt = rollout.max_new_tokens, rollout.max_prompt_tokens
    read_share = 1 - (1 - engine["chosen_share"]) ** (at_once * rollout.dp)
    weights = engine["weights"] * (1 - engine["expert_share"] * (1 - read_share))
    read = rounds * new * (weights + at_once * (prompt + new / 2) * engine["token_bytes"])
    tokens = sequences * rollout.dp * (new + prompt / rollout.samples_per_prompt)
    flops = 2 * engine["active_numbers"] * tokens / engine["ranks"]
    return Bound(flops / (gpu.matmul_tflops * 1e12), memory=read / (gpu.memory_tb_s * 1e12))
