"""Operations of torch: their flattened arguments, the tensors that they write, and their floating-point operations."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._grouped_mm: 0}
"""Matrix products, and the position of the first matrix in their arguments; in a group each row has one matrix."""


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the floating-point operations of a matrix product or of attention; 0 for other operations."""
    packet = func.overloadpacket
    if packet in PRODUCTS:
        a, b = args[PRODUCTS[packet]], args[PRODUCTS[packet] + 1]
        return 2 * a.numel() * b.shape[-1]
    if "attention" not in packet.__name__:
        return 0
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=out) if count else 0


Spec = tuple[list[int], list[str]]
"""Layout of flattened arguments: the length of each list (-1 for a plain argument), and the names of the last ones."""


def tree_flatten(arguments: tuple[tuple, dict]) -> tuple[list, Spec]:
    """Flatten the arguments of an operation; lists among them hold only tensors or numbers."""
    args, kwargs = arguments
    flat, lengths = [], []
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            flat += x
            lengths.append(len(x))
        else:
            flat.append(x)
            lengths.append(-1)
    return flat, (lengths, list(kwargs))


def tree_unflatten(flat: list, spec: Spec) -> tuple[tuple, dict]:
    """Undo `tree_flatten`."""
    lengths, names = spec
    out, at = [], 0
    for n in lengths:
        out.append(flat[at] if n < 0 else flat[at : at + n])
        at += 1 if n < 0 else n
    count = len(out) - len(names)
    return tuple(out[:count]), dict(zip(names, out[count:], strict=True))


def changed_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operation writes into."""
    changed: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            changed += [x] if isinstance(x, torch.Tensor) else [y for y in x or () if isinstance(y, torch.Tensor)]
    return changed
