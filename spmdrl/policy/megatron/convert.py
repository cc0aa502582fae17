"""Maps a Megatron rank's parameters to ranges of tensors in HF checkpoints.

A list of slots describes a rank's parameters. A slot (`Held`) is the name of a checkpoint tensor, this rank's range of
it, and a view of the parameter for that range. To load a model, files are read into the views; `weights/reshard.py`
sends the views to engines, and `weights/safetensors.py` writes them to files. No parameter is gathered.

In Megatron, one parameter stores the projections of queries, keys and values group by group, [groups, query heads of a
group + 2, channels of a head, hidden]. Another one concatenates gate and up projections, each divided over tp. The
vocabulary is padded at its end. Several ranks have the same range of a parameter that is replicated over tp, cp or
data, or of a tied embedding, which is on the first and the last stage.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdrl.policy.megatron.arch import OUTSIDE
from spmdrl.weights.experts import full_box
from spmdrl.weights.folder import Tensors
from spmdrl.weights.reshard import Box, Piece
from spmdrl.weights.safetensors import fill

ROW = ("linear_proj.weight", "linear_fc2.weight")
"""Name endings of parameters whose second dimension is divided over tp."""
COLUMN = ("linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight")
"""Name endings of parameters whose first dimension is divided over tp without a special order of rows."""


@dataclass(frozen=True)
class Held:
    """A range of one checkpoint tensor that this rank has, and the view of its parameter that stores this range."""

    name: str
    """Name in a HF checkpoint."""
    shape: tuple[int, ...]
    """Shape of the complete checkpoint tensor."""
    box: Box
    """This rank's range of the checkpoint tensor."""
    param: torch.Tensor
    """The parameter or buffer of the model that contains the range."""
    view: torch.Tensor
    """The view of `param` that stores the range, in the range's shape."""
    exact: bool = False
    """True for a buffer that must not be cast to another type."""


def slots(models: Sequence[Any], of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> list[Held]:
    """Return the slots of this rank, model chunk by model chunk; every call returns the same names in the same order.

    models: the result of `model.build`, or its models in wrappers that have `.module`. of: function of a parameter or
    buffer that returns the tensor of the same shape to view: itself, or its gradient (`lambda p: p.main_grad`).
    """
    out = []
    for model in map(unwrapped, models):
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith("router.expert_bias")]
        for name, param in [*model.named_parameters(), *biases]:
            exact = not isinstance(param, torch.nn.Parameter)
            out += [Held(hf, shape, box, param, view, exact) for hf, shape, box, view in _cut(model, name, of(param))]
    return out


def pieces(models: Sequence[Any]) -> list[Piece]:
    """Return the slots as pieces for `weights/reshard.py`; their tensors are views that reflect later updates."""
    return [Piece(h.name, h.shape, h.box, h.view, h.exact) for h in slots(models)]


def load(models: Sequence[Any], folder: Path, blocks: tuple[int, int] | None = None) -> None:
    """Read the weights of the models from HF safetensors; each rank reads only its ranges.

    A `value` head that the folder lacks starts at 0. blocks: the size of the blocks that share a scale in a folder with
    fp8 weights (`weights/folder.py`); None for other folders.

    Raises:
        ValueError: the folder lacks a tensor, or has a tensor of another shape.
    """
    wanted, tensors = pieces(models), Tensors(folder, blocks)
    if any(unwrapped(m).head == "value" for m in models) and "score.weight" not in tensors:
        for piece in wanted:
            if piece.name == "score.weight":
                piece.tensor.zero_()
        wanted = [p for p in wanted if p.name != "score.weight"]
    fill(wanted, tensors)


def unwrapped(model: Any) -> Any:
    """Return the GPTModel inside Megatron's wrappers."""
    while not hasattr(model, "arch"):
        model = model.module
    return model


Cut = Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]


def _rows(group: Any, local: int) -> tuple[int, tuple[int, int]]:
    """Return the size of a dimension that a group divides, and this rank's range. local: size of this rank's part."""
    return local * group.size(), (local * group.rank(), local * (group.rank() + 1))


def _cut(model: Any, name: str, data: torch.Tensor) -> Cut:
    """Yield (checkpoint name, complete shape, box, view) of each checkpoint tensor that one parameter combines."""
    groups, arch = model.pg_collection, model.arch
    tp = groups.tp
    if name in OUTSIDE:
        yield from _outside(model, name, data, tp)
        return
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert found, name
    number, inside = model.decoder.layers[int(found[1])].layer_number - 1, found[2]
    # Either each expert is a module, or one module has the weights of several experts with numbered names, which are
    # mapped to the names of the first case.
    inside = re.sub(r"experts\.(linear_fc\d\.weight)(\d+)$", r"experts.local_experts.\2.\1", inside)
    expert = re.search(r"\.local_experts\.(\d+)\.", inside)
    if expert:
        inside = inside.replace(expert[0], ".E.")
        tp = groups.expt_tp
    before = f"model.layers.{number}."
    names = [before + n for n in arch.names[inside]]
    if expert:
        each = arch.settings["num_moe_experts"] // groups.ep.size()
        place = groups.ep.rank() * each + int(expert[1])
        names = [n.replace(".E.", f".{place}.") for n in names]
    if "linear_qkv" in inside:
        yield from _qkv(model, names, data, tp)
    elif "linear_fc1" in inside:
        for hf, part in zip(names, data.unflatten(0, (2, -1)), strict=True):
            rows, mine = _rows(tp, len(part))
            rest = part.shape[1:]
            yield hf, (rows, *rest), (mine, *full_box(rest)), part
    elif inside.endswith(ROW):
        columns, mine = _rows(tp, data.shape[1])
        yield names[0], (len(data), columns), ((0, len(data)), mine), data
    elif inside.endswith(COLUMN):
        rows, mine = _rows(tp, len(data))
        yield names[0], (rows, data.shape[1]), (mine, (0, data.shape[1])), data
    else:
        yield names[0], tuple(data.shape), full_box(data.shape), data


def _outside(model: Any, name: str, data: torch.Tensor, tp: Any) -> Cut:
    hf, hidden = OUTSIDE[name], full_box(data.shape[1:])
    if data.ndim == 1:
        yield hf, tuple(data.shape), full_box(data.shape), data
        return
    if name == "output_layer.weight" and model.head != "lm":
        yield "score.weight", tuple(data.shape), full_box(data.shape), data
        return
    if name == "output_layer.weight" and model.arch.tied:
        hf = OUTSIDE["embedding.word_embeddings.weight"]
    vocab = model.arch.vocab
    first, last = (min(row, vocab) for row in _rows(tp, len(data))[1])
    if first < last:
        yield hf, (vocab, data.shape[1]), ((first, last), *hidden), data[: last - first]


def _qkv(model: Any, names: list[str], data: torch.Tensor, tp: Any) -> Cut:
    """Yield the slots of queries, keys and values in a weight [groups * (r + 2) * channels, hidden] or in its bias."""
    s = model.arch.settings
    r, head = s["num_attention_heads"] // s["num_query_groups"], s["kv_channels"]
    grouped = data.unflatten(0, (-1, r + 2, head))
    rest = data.shape[1:]
    groups, (first, _) = _rows(tp, len(grouped))
    for g, group in enumerate(grouped, first):
        for hf, part, heads in zip(names, (group[:r], group[r : r + 1], group[r + 1 :]), (r, 1, 1), strict=True):
            rows = (g * heads * head, (g + 1) * heads * head)
            yield hf, (groups * heads * head, *rest), (rows, *full_box(rest)), part.flatten(0, 1)
