"""Least times of a step's phases by a roofline: no rank is quicker than its slowest resource at its peak rate.

https://en.wikipedia.org/wiki/Roofline_model. These are bounds, not forecasts: kernels reach 40 to 80% of peak matrix
rates, and links less for small messages.
"""

from dataclasses import dataclass

from spmdrl.config.schema import Config
from spmdrl.plan.gpus import Gpu
from spmdrl.plan.scaled import Load


@dataclass(frozen=True)
class Bound:
    """Seconds that each resource of a rank is busy at its peak rate; the phase takes at least the longest."""

    matrix: float
    nvlink: float
    network: float
    memory: float = 0.0
    bubble: float = 1.0
    """Factor by which a pipeline's ranks wait for one another."""

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.matrix * self.bubble, self.nvlink, self.network, self.memory)

    @property
    def by(self) -> str:
        """The resource that sets it."""
        named = {"matrix rate": self.matrix * self.bubble, "NVLink": self.nvlink, "network": self.network}
        named["memory"] = self.memory
        return max(named, key=lambda name: named[name])


def bound_of(load: Load, gpu: Gpu, within_node: set[str], micros: int, stages: int) -> Bound:
    """Return the bound of a phase.

    within_node: axes whose ranks are in one node. micros: micro-batches of one pass, for the pipeline's bubble.
    """
    near = sum(n for (axis, _), n in load.sent.items() if axis in within_node)
    far = sum(n for (axis, _), n in load.sent.items() if axis not in within_node)
    bubble = (micros + stages - 1) / micros if micros else 1.0
    return Bound(
        load.flops / (gpu.matmul_tflops * 1e12),
        near / (gpu.nvlink_gb_s * 1e9),
        far / (gpu.network_gb_s * 1e9),
        bubble=bubble,
    )


def rollout_bound(cfg: Config, gpu: Gpu, engines: int, engine: dict) -> Bound:
    """Return the bound of sampling full-length responses: matrix products, and reading weights and the cache.

    Each step of an engine reads the weights once (of a mixture the experts that its tokens use) and the cache of each
    sequence. Copies of an engine's attention (`--rollout.dp`) each have sequences and a cache of their own.

    Args:
        cfg: the run's settings.
        gpu: a rank's.
        engines: of the job.
        engine: what `run.engine_facts` says of one: its ranks together, and the cache of one rank.
    """
    rollout = cfg.rollout
    sequences = -(-rollout.prompts_per_step * rollout.samples_per_prompt // (engines * rollout.dp))
    at_once = max(1, min(sequences, -(-engine["capacity"] // rollout.dp), engine["sequences"] or 1))
    rounds = -(-sequences // at_once)
    new, prompt = rollout.max_new_tokens, rollout.max_prompt_tokens
    read = rounds * new * (engine["read_bytes"] + at_once * (prompt + new / 2) * engine["token_bytes"])
    tokens = sequences * rollout.dp * (new + prompt / rollout.samples_per_prompt)
    flops = 2 * engine["active_numbers"] * tokens / engine["ranks"]
    return Bound(flops / (gpu.matmul_tflops * 1e12), 0.0, 0.0, read / (gpu.memory_tb_s * 1e12))
