"""Labels of the fake GPU (`fake_cuda.py`): the device that tensors report, and torch functions that set or read it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros", "tril_indices", "triu_indices", "frombuffer", "from_numpy"),
    *("as_tensor", "asarray"),
)
LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
NEW = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]


def place(tensor: torch.Tensor) -> str | None:
    """Returns `cuda` or `cpu`, or None for a tensor that torch made for itself, which suits either."""
    return label_of(storage_of(tensor))


def on(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Labels a tensor with another device and returns it: no copy, for tests that build their inputs."""
    storage_of(tensor)._fake = torch.device(device).type
    return tensor


def storage_of(tensor: torch.Tensor) -> Any:
    return _untyped(getattr(tensor, "_local_tensor", tensor))


def label_of(storage: Any) -> str | None:
    return getattr(storage, "_fake", "cpu")


_untyped = torch.Tensor.untyped_storage
_to = torch.Tensor.to


def _move(tensor: torch.Tensor, kind: str, **how: Any) -> torch.Tensor:
    out = _to(tensor, copy=True, **how)
    return on(out, kind)


class _Journey(torch.autograd.Function):
    """A copy to the other device, whose gradient comes back to this one."""

    @staticmethod
    def forward(ctx, tensor, kind, how):
        ctx.back = place(tensor) or "cpu", tensor.dtype
        return _move(tensor, kind, **how)

    @staticmethod
    def backward(ctx, *grads):
        kind, dtype = ctx.back
        return _move(grads[0], kind, dtype=dtype), None, None


DEVICE: Any = torch.Tensor.device
STORAGE_DEVICE: Any = torch.UntypedStorage.device


def seen(tensor: torch.Tensor, real: Any) -> torch.device:
    found = real.__get__(tensor)
    return CUDA if found.type == "cpu" and place(tensor) == "cuda" else found


def _kind(device: Any) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def factory(make: Callable, like: bool = False) -> Callable:
    """Makes a function that creates tensors, on the fake device where that is named (or is the first argument's)."""

    @functools.wraps(make)
    def made(*args, **kwargs):
        device, pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if make.__name__ in ("as_tensor", "asarray") and first is not None:
            return first.to(device=device or first.device, dtype=kwargs.get("dtype") or first.dtype)
        kind = _kind(device) if device is not None else None
        if kind is None and first is not None and (like or make.__name__ == "tensor"):
            kind = place(first)
        if kind not in ("cuda", "cpu", None):
            return make(*args, device=device, **kwargs)
        if device is not None:
            kwargs["device"] = "cpu"
        out = make(*args, **kwargs)
        if DEVICE.__get__(out).type == "cpu":
            on(out, kind or "cpu")
        return pinned(out) if pin else out

    return made


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    storage_of(tensor)._pinned = True
    return tensor


def moved(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Replaces `Tensor.to`."""
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], torch.Tensor):
        args, kwargs = args[1:], kwargs | {"device": args[0].device, "dtype": args[0].dtype}
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    how: dict[str, Any] = {"dtype": dtype or tensor.dtype}
    if layout is not None:
        how["memory_format"] = layout
    if device is not None and device.type not in ("cpu", "cuda"):
        return _to(tensor, device=device, copy=copy, **how)
    if DEVICE.__get__(tensor).type != "cpu":
        assert device is None or device.type == "cpu", "a meta tensor has no bytes to move"
        return _to(tensor, device=device, copy=copy, **how) if device else _to(tensor, copy=copy, **how)
    kind = device.type if device is not None else place(tensor)
    if kind == place(tensor) or (place(tensor) is None and device is None):
        return _to(tensor, copy=copy, **how)
    if tensor.requires_grad and torch.is_grad_enabled() and tensor.is_floating_point():
        return _Journey.apply(tensor, kind, how)  # type: ignore[return-value]
    return _move(tensor, kind or "cpu", **how)


def typed(real: Callable) -> Callable:
    def of_type(tensor, *args, **kwargs):
        found = real(tensor, *args, **kwargs)
        on_gpu = isinstance(found, str) and place(tensor) == "cuda"
        # A function mode has torch ask again, and the answer has the name already.
        named = on_gpu and not found.startswith("torch.cuda.")
        return found.replace("torch.", "torch.cuda.", 1) if named else found

    return of_type


def to_numpy(real: Callable) -> Callable:
    def numpy(tensor, *args, **kwargs):
        if place(tensor) == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return real(tensor, *args, **kwargs)

    return numpy


class HostGenerator(torch.Generator):
    """A CPU generator that is accepted for any device."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, "cpu")
