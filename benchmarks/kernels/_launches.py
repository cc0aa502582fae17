"""Records the kernel launches that the package's Python code makes for a shape, without a GPU.

Tensors are on torch's meta device, which has shapes, dtypes and strides but no values; the package treats it as a GPU.
Stand-ins replace all functions that need values. The stand-ins of kernels record their launches. Those of matmuls and
of checks of values (targets out of range, a loss that is not per token) do nothing; the caller sets whether a matmul
can write fp32 from 16-bit inputs.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from spmdrl_kernels import blocks, chunked, gradients, linear, logits, triton_rows

KERNELS = {"stats": "stats_kernel", "results": "results_kernel", "gradient": "gradient_kernel"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ALIGNED = 512
"""Alignment of tensors in bytes in torch's allocator for GPUs."""


@dataclass(frozen=True)
class Pointer:
    """Stand-in for a tensor in Triton: its dtype, whether it is aligned to 16 bytes, and whether it is below 2 GiB."""

    dtype: torch.dtype
    aligned: bool
    small: bool

    def data_ptr(self) -> int:
        return ALIGNED if self.aligned else ALIGNED + self.dtype.itemsize

    def ptr_range(self) -> int:
        return 0 if self.small else 2**31


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments: pointers, integers, None; and its constants, including block sizes and warps."""

    kernel: str
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]


class Recorder:
    """Stand-in for a kernel that records its launches."""

    def __init__(self, kernel: str, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid) -> Callable[..., None]:
        def launch(*arguments, **constants):
            recorded = tuple(pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments)
            self.launches.append(Launch(self.kernel, recorded, tuple(constants.items())))

        return launch


def pointer(tensor: torch.Tensor) -> Pointer:
    begins = tensor.storage_offset() * tensor.element_size()
    # Triton's backend for AMD treats a tensor as small if its complete storage is below 2 GiB.
    return Pointer(tensor.dtype, begins % 16 == 0, tensor.untyped_storage().nbytes() < 2**31)


@contextmanager
def recording(widens: bool) -> Iterator[list[Launch]]:
    """Yield a list into which launches inside this context are recorded.

    widens: whether matmuls of the device can write fp32 from 16-bit inputs, as on NVIDIA GPUs.
    """
    launches: list[Launch] = []
    with ExitStack() as stack:
        for kernel, name in KERNELS.items():
            stack.enter_context(mock.patch.object(triton_rows, name, Recorder(kernel, launches)))
        for module in (blocks, chunked, gradients):
            stack.enter_context(mock.patch.object(module, "product_", lambda *a: None))
        stack.enter_context(mock.patch.object(gradients, "outer_", lambda *a: None))
        for module in (chunked, linear, logits):
            stack.enter_context(mock.patch.object(module, "check_values", lambda *a: None))
        stack.enter_context(mock.patch.object(chunked._Caller, "check_separable", lambda *a: None))
        stack.enter_context(mock.patch.object(blocks, "widens", lambda a: widens and blocks.narrow(a)))
        yield launches


def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def calls(T: int, V: int, dtype: torch.dtype, quick: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls of every public function, forward and backward, with every setting that affects launches (D does
    not).

    quick: only the settings with the most and with the least work.
    """
    hidden, weight = make(T, 8, dtype=dtype), make(V, 8, dtype=dtype)
    targets = make(T, dtype=torch.int64)
    heats = [(1.0, None), (0.7, 30.0)] if quick else itertools.product((1.0, 0.7), (None, 30.0))
    uses = [(False, False), (True, True)] if quick else [(False, False), (True, False), (True, True)]
    for temperature, softcap in heats:
        options = {"temperature": temperature, "softcap": softcap, "backend": "triton"}
        name = f"temperature {temperature} softcap {softcap}"
        for entropy, through in uses:
            more = options | {"entropy": entropy}
            what = f"{name} entropy {entropy} backward through {'both' if through else 'logp'}"
            for invariant in (False,) if quick else (False, True):
                yield (
                    f"linear_logprob invariant {invariant} {what}",
                    partial(
                        of_logp,
                        through,
                        linear.linear_logprob,
                        hidden,
                        weight,
                        targets,
                        batch_invariant=invariant,
                        **more,
                    ),
                )
            yield (
                f"token_logprob {what}",
                partial(of_logp, through, logits.token_logprob, make(T, V, dtype=dtype), targets, **more),
            )
            if through == entropy:
                yield f"chunked_loss {what}", partial(in_chunks, hidden, weight, targets, **more)
        yield (
            f"collision_probability {name}",
            partial(linear.collision_probability, hidden.detach(), weight.detach(), **options),
        )


def of_logp(through: bool, function: Callable, *given, **options) -> None:
    """Run forward and backward of the sum of logp; with `through`, of logp plus entropy."""
    logp, entropy = function(*given, **options)
    (logp + entropy if through else logp).sum().backward()


def in_chunks(*given, **options) -> None:
    def loss(logp, entropy, inputs):
        return logp if entropy is None else logp + entropy

    chunked.chunked_loss(*given, loss, {}, **options)[0].backward()


def launches_of(shapes: list[tuple[int, int]], dtypes: list[str], widens: bool, quick: bool) -> dict[Launch, str]:
    """Return the distinct launches of all calls, each with the first call that makes it."""
    found: dict[Launch, str] = {}
    for (T, V), name in itertools.product(shapes, dtypes):
        for what, call in calls(T, V, DTYPES[name], quick):
            with recording(widens) as launches:
                call()
            for launch in launches:
                found.setdefault(launch, f"T {T} V {V} {name} {what}")
    return found
