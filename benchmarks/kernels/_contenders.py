"""Contenders of the benchmarks: each returns logp (and, if supported, entropy) of every token, or a mean loss.

All of them get (hidden, weight, targets) and are called as their documentation describes. If a contender cannot be
imported or fails, the benchmark prints its name and the reason. They are not dependencies of this project: install them
with `pip install --target DIR liger-kernel cut-cross-entropy quack-kernels verl` and add DIR to PYTHONPATH.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spmdrl_kernels import chunked_loss, linear_logprob

CHUNK = 1024


@dataclass
class Contender:
    """A function of (hidden, weight, targets); `gives`: `both`, `logp`, or `loss` (the mean of -logp, one number)."""

    name: str
    gives: str
    call: Any
    matmuls: int
    """Number of matmuls of forward and backward in total."""
    certain: float = 0.1
    """Largest error of a bf16 gradient of nearly certain tokens; rounding logits of 30 may change 1 - p by this
    share."""
    logp: Any = None
    """For `loss` contenders, a function that returns the logp from which the loss is computed."""


def plain(h, w, t):
    logits = (h @ w.t()).float() if h.dtype != torch.float64 else h @ w.t()
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, t[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def plain_loss(h, w, t):
    return torch.nn.functional.cross_entropy((h @ w.t()).float(), t)


def ours(backend, **options):
    return lambda h, w, t: linear_logprob(h, w, t, backend=backend, **options)


def ours_logp(backend):
    return lambda h, w, t: (linear_logprob(h, w, t, entropy=False, backend=backend)[0], None)


def ours_loss(backend, **options):
    def call(h, w, t):
        return chunked_loss(h, w, t, lambda logp, _, x: -logp / len(t), entropy=False, backend=backend, **options)[0]

    return call


def told_logp(backend):
    return lambda h, w, t: chunked_loss(h, w, t, lambda logp, _, x: -logp, entropy=False, backend=backend)[1]["logp"]


def compiled(function, backend="inductor"):
    # With fullgraph, dynamo raises an error at its limit of recompilations instead of running uncompiled code.
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)


def compiled_chunks(backend="inductor"):
    body = compiled(plain, backend)

    def call(h, w, t):
        parts = [
            checkpoint(body, a, w, b, use_reentrant=False) for a, b in zip(h.split(CHUNK), t.split(CHUNK), strict=True)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    return call


def liger_torch():
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction as F

    return lambda h, w, t: (F.apply(h, w, t, None, 1.0, 4096), None)


def liger(reduction):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as f

    if reduction == "mean":
        return lambda h, w, t: f(h, w, t)
    return lambda h, w, t: (-f(h, w, t, reduction="none"), None)


def cut_cross_entropy(reduction):
    from cut_cross_entropy import linear_cross_entropy as f

    if reduction == "mean":
        return lambda h, w, t: f(h, w, t)
    return lambda h, w, t: (-f(h, w, t, reduction="none"), None)


def verl():
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as f

    return lambda h, w, t: f(h, w, t, 1.0, "none")


def quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as f

    return lambda h, w, t: f(h, w, t, chunk_size=4096, reduction="mean")


def contenders(device: str, quick: bool = False) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can be imported, and the reasons why the others cannot, by name.

    quick: without those that are slow, or slow to compile, on a GPU.
    """
    mine = "triton" if device == "cuda" else "torch"
    out = [
        Contender(f"spmdrl ({mine})", "both", ours(mine), 4, certain=2e-2),
        Contender(f"spmdrl ({mine}), logp only", "logp", ours_logp(mine), 4, certain=2e-2),
        Contender(f"spmdrl ({mine}), loss in chunks", "loss", ours_loss(mine), 3),
        Contender("torch, all logits", "both", plain, 3),
        Contender("torch, all logits, loss", "loss", plain_loss, 3),
    ]
    # Liger's SM90 kernels are its cutedsl implementation; an environment variable selects it for the process.
    flavour = os.environ.get("LIGER_KERNEL_IMPL", "triton")
    wanted = [("liger, chunks in plain torch", "logp", liger_torch, 4)]
    if device == "cuda":
        slow = [
            ("torch.compile'd chunks", "both", compiled_chunks, 4),
            ("spmdrl (torch)", "both", lambda: ours("torch"), 4),
        ]
        wanted = [] if quick else wanted + slow
        wanted += [
            (f"liger ({flavour})", "logp", lambda: liger("none"), 4),
            (f"liger ({flavour}), loss", "loss", lambda: liger("mean"), 3),
            ("cut-cross-entropy", "logp", lambda: cut_cross_entropy("none"), 4),
            ("cut-cross-entropy, loss", "loss", lambda: cut_cross_entropy("mean"), 4),
            ("verl", "both", verl, 4),
            ("quack, loss", "loss", quack, 3),
        ]
    absent = {}
    for name, gives, build, matmuls in wanted:
        try:
            out.append(Contender(name, gives, build(), matmuls))
        except Exception as error:
            absent[name] = f"{type(error).__name__}: {error}"[:120]
    return out, absent
