"""Maps a Megatron rank's parameters to slices of HF checkpoint tensors.

A rank's parameters are described by a list of slots. A slot (`Held`) consists of the name of a checkpoint tensor, this
rank's slice of it, and a view of the parameter that stores this slice. To load a model, files are read into the views;
`weights/reshard.py` sends the views to engines, and `weights/safetensors.py` writes them to files. No parameter is ever
gathered.

In Megatron, one parameter stores the query, key and value projections interleaved by group, [groups, query heads per
group + 2, head dimension, hidden]. Another parameter concatenates the gate and up projections, each sharded over tp.
The vocabulary is padded at the end. Parameters replicated over tp, cp or data have the same slice on several ranks, and
so do tied embeddings, which are on both the first and the last stage.
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
"""Name suffixes of parameters whose second dimension is sharded over tp."""
COLUMN = ("linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight")
"""Name suffixes of parameters whose first dimension is sharded over tp without reordering rows."""


@dataclass(frozen=True)
class Held:
    """A slice of a checkpoint tensor on this rank, and the view of the parameter that stores it."""

    name: str
    """Name of the tensor in HF checkpoints."""
    shape: tuple[int, ...]
    """Shape of the full checkpoint tensor."""
    box: Box
    """This rank's slice of the checkpoint tensor."""
    param: torch.Tensor
    """The parameter or buffer that contains the slice."""
    view: torch.Tensor
    """View of `param` that stores the slice, in the shape of the slice."""
    exact: bool = False
    """True for a buffer that must not be cast to another dtype."""


def slots(models: Sequence[Any], of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> list[Held]:
    """Return this rank's slots, chunk by chunk; every call returns the same names in the same order.

    models: the result of `model.build`, possibly in wrappers with a `.module`. of: function that maps a parameter or
    buffer to the tensor to view. This tensor has the same shape; it is the parameter itself or its gradient (`lambda p:
    p.main_grad`).
    """
    out = []
    for model in map(unwrapped, models):
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith("router.expert_bias")]
        for name, param in [*model.named_parameters(), *biases]:
            exact = not isinstance(param, torch.nn.Parameter)
            out += [Held(hf, shape, box, param, view, exact) for hf, shape, box, view in _cut(model, name, of(param))]
    return out


def pieces(models: Sequence[Any]) -> list[Piece]:
    """Return the slots as pieces for `weights/reshard.py`, with views that reflect later updates."""
    return [Piece(h.name, h.shape, h.box, h.view, h.exact) for h in slots(models)]


def load(models: Sequence[Any], folder: Path, blocks: tuple[int, int] | None = None) -> None:
    """Load model weights from HF safetensors; each rank only reads its own slices.

    A `value` head that is missing from the folder is set to 0. blocks: size of the blocks that share a scale if the
    weights are fp8 (`weights/folder.py`), otherwise None.

    Raises:
        ValueError: a tensor is missing from the folder or has the wrong shape.
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
    """Return the full size of a sharded dimension, and this rank's range of it. local: size of this rank's shard."""
    return local * group.size(), (local * group.rank(), local * (group.rank() + 1))


def _cut(model: Any, name: str, data: torch.Tensor) -> Cut:
    """Yield (checkpoint name, full shape, box, view) for each checkpoint tensor combined in one parameter."""
    groups, arch = model.pg_collection, model.arch
    tp = groups.tp
    if name in OUTSIDE:
        yield from _outside(model, name, data, tp)
        return
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert found, name
    number, inside = model.decoder.layers[int(found[1])].layer_number - 1, found[2]
    # Experts are either separate modules, or numbered weights of a single module. Give numbered weights the names of
    # separate modules.
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
    """Yield the query, key and value slots of a weight [groups * (r + 2) * channels, hidden] or of its bias."""
    s = model.arch.settings
    r, head = s["num_attention_heads"] // s["num_query_groups"], s["kv_channels"]
    grouped = data.unflatten(0, (-1, r + 2, head))
    rest = data.shape[1:]
    groups, (first, _) = _rows(tp, len(grouped))
    for g, group in enumerate(grouped, first):
        for hf, part, heads in zip(names, (group[:r], group[r : r + 1], group[r + 1 :]), (r, 1, 1), strict=True):
            rows = (g * heads * head, (g + 1) * heads * head)
            yield hf, (groups * heads * head, *rest), (rows, *full_box(rest)), part.flatten(0, 1)
