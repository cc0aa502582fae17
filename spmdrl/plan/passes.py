"""Simulates only a few micro-batches of each pass in a step; `scale.py` extrapolates to the full step."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from spmdrl.plan.paper import Paper
from spmdrl.plan.storages import Moment
from spmdrl.plan.traffic import Traffic

STARTS = ("spmdrl.policy.fsdp.policy", "spmdrl.policy.megatron.schedule")
"""Modules that call `tick` at the start of a micro-batch."""


@dataclass
class Pass:
    """Memory, FLOPs and traffic of one pass over some micro-batches."""

    micros: int
    peak: Moment
    flops: int
    traffic: Traffic
    kept: int = 0
    """Bytes that the pass allocates before its first micro-batch, plus bytes still live when it ends.

    Both can grow with `micros`."""


@dataclass
class Work:
    """One type of pass over a model, measured at several micro-batch counts, or the model's optimizer step."""

    model: str
    kind: str
    """`logp` (forward only), `update`, or `step` (optimizer step)."""
    total: int
    """Number of micro-batches per training step (for `update`: per optimizer update)."""
    times: int
    """Number of such passes per training step: 1 for `logp`, else the number of updates."""
    passes: list[Pass] = field(default_factory=list)


@contextmanager
def few_passes(
    models: list[tuple[str, Any]], paper: Paper, works: list[Work], updates: int, rounds: tuple[int, ...]
) -> Iterator[None]:
    """Limit each pass over a model to a few of its micro-batches inside this context.

    Args:
        models: (name, model) pairs of the models that own tensors on this rank.
        paper: counts the memory, FLOPs and traffic of the passes.
        works: list that receives each pass and each optimizer step.
        updates: number of optimizer updates per training step.
        rounds: lengths of the shortened passes, in multiples of `model.multiple` micro-batches, such as (1, 2).
    """
    with ExitStack() as stack:
        for name, model in models:
            for method, kind in (("numbers", "logp"), ("gradient", "update")):
                if hasattr(model, method):
                    times = updates if kind == "update" else 1
                    stub = _passes(name, method, model, paper, works, times, rounds)
                    stack.enter_context(patch.object(model, method, stub))
            if hasattr(model, "step"):
                stack.enter_context(patch.object(model, "step", _step(name, model, paper, works, updates)))
        yield


def _step(name: str, model: Any, paper: Paper, works: list[Work], times: int) -> Any:
    run = model.step

    def step(*args: Any) -> None:
        paper.lap()
        flops, traffic = paper.flops, paper.traffic.copy()
        run(*args)
        done = Pass(1, paper.lap(), paper.flops - flops, paper.traffic.since(traffic))
        works.append(Work(name, "step", 1, times, [done]))

    return step


def _passes(
    name: str, method: str, model: Any, paper: Paper, works: list[Work], times: int, rounds: tuple[int, ...]
) -> Any:
    run, kind = getattr(model, method), "update" if method == "gradient" else "logp"

    def passes(micros: list, *args: Any, **more: Any) -> Any:
        """Run a few of the micro-batches and return results for all of them."""
        work = Work(name, kind, len(micros), times)
        works.append(work)
        out: Any = None
        for count in sorted({min(n * model.multiple, len(micros)) for n in rounds}):
            # FSDP leaves the root module unsharded after a forward pass without a backward pass, so reshard it first.
            model.reshard()
            out = None
            paper.lap()
            before, flops, traffic = paper.live, paper.flops, paper.traffic.copy()
            with _first_start(paper) as start:
                out = run(micros[:count], *args, **more)
                if kind == "logp":
                    out = [x for x in out]
                elif model.world.trains:
                    model.gradient_norm()
            # A pass may pack all micro-batches before running the first one, and keeps their results until it ends.
            kept = (start[0] - before if start else 0) + paper.live
            work.passes.append(Pass(count, paper.lap(), paper.flops - flops, paper.traffic.since(traffic), kept))
            if kind == "update" and count < len(micros) and count < max(rounds) * model.multiple:
                model.zero_grad()
        if kind == "logp":
            # Fill in ones for the micro-batches that did not run.
            like = [(x.shape[1:], x.dtype) for x in out[0]] if out else []
            out += [tuple(torch.ones(m.n_tokens, *s, dtype=d) for s, d in like) for m in micros[len(out) :]]
        return out

    return passes


@contextmanager
def _first_start(paper: Paper) -> Iterator[list[int]]:
    """Yield a list that receives the number of live bytes when the first micro-batch starts."""
    live: list[int] = []

    def tick() -> None:
        if not live:
            live.append(paper.live)

    with ExitStack() as stack:
        for module in [sys.modules[name] for name in STARTS if name in sys.modules]:
            stack.enter_context(patch.object(module, "tick", tick))
        yield live
