"""Fills a model that was sharded on the meta device: each rank reads only its own parts of the weights."""

from pathlib import Path
from typing import Any

import torch

from spmdrl.hub.build import give_memory
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.lora import initial_values, is_adapter, plain_name
from spmdrl.weights.folder import Tensors
from spmdrl.weights.shards import local, shard_box
from spmdrl.weights.sources import Sources

Names = dict[int, tuple[Any, list[str]]]
"""id of a tensor -> the tensor and its names in the original model; tied weights have several."""


def names_of(hf: Any) -> Names:
    """Return the parameters and the persistent buffers of a model, each with all its names."""
    found: Names = {}
    kept = hf.state_dict().keys()
    buffers = [(name, b) for name, b in hf.named_buffers(remove_duplicate=False) if name in kept]
    for name, tensor in [*hf.named_parameters(remove_duplicate=False), *buffers]:
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    return found


def check_folder_fits(names: Names, sources: Sources, new_head: bool) -> None:
    """Check that a folder holds every parameter in its shape. new_head: the head `score` may be missing.

    Raises:
        ValueError: tensors that are missing or misshapen, or fp8 weights without scales.
    """
    wrong = []
    for _, known in names.values():
        present = [name for name in known if name in sources]
        wrong += [name for name in present if not sources.fits(name)]
        lacking = not present and not sources.may_lack(known[0]) and not is_adapter(known[0])
        if lacking and not (new_head and known[0] in ("score.weight", "score.bias")):
            wrong.append(known[0])
        for name in present:
            for tensor in sources.read_from(name):
                sources.tensors.check_scales(tensor)
    if wrong:
        listed = ", ".join(sorted(wrong)[:4])
        raise ValueError(
            f"the weights in {sources.tensors.folder} do not fit its config.json: missing or misshapen {listed}"
        )


@torch.no_grad()
def fill_model(
    model: Any, folder: Path, device: torch.device, new_head: bool, seed: int, blocks: tuple[int, int] | None = None
) -> None:
    """Allocate a sharded model on this rank's device and fill it with the values of a HF folder.

    A rank reads only its own shards, directly into its tensors. Adapters, which no folder holds, get their initial
    values; a head `score` that the folder lacks gets zeros.

    model: the result of `sharded`, with parameters on the meta device. new_head: the folder may lack the head `score`.
    seed: of the run, for adapters. blocks: as `fp8_blocks` returns them.

    Raises:
        ValueError: a folder that lacks a tensor, or holds one of another shape.
    """
    names = names_of(model.hf)
    shapes = {n: tuple(t.shape) for t, known in names.values() for n in known if not is_adapter(n)}
    with plain_errors(folder):
        sources = Sources(model.hf, shapes, Tensors(folder, blocks))
        check_folder_fits(names, sources, new_head)

    give_memory(model, device)
    with plain_errors(folder):
        for tensor, known in names_of(model.hf).values():
            _fill(tensor, known, sources, seed)


def _fill(tensor: torch.Tensor, names: list[str], sources: Sources, seed: int) -> None:
    box, mine = shard_box(tensor), local(tensor)
    if not mine.numel():
        return
    present = [name for name in names if name in sources]
    if not present:
        first = initial_values(names[0], tuple(tensor.shape), seed) if is_adapter(names[0]) else None
        mine.zero_() if first is None else mine.copy_(first[tuple(slice(a, b) for a, b in box)])
        return
    sources.copy(present[0], box, mine)
    for other in present[1:]:
        # A folder may hold a tied weight twice.
        if any(sources.tensors.differs(name, box, mine) for name in sources.read_from(other)):
            raise ValueError(
                f"{sources.tensors.folder}: config.json ties {other} to {present[0]}, but the folder holds different "
                "values for them: set tie_word_embeddings to false in config.json, or remove one of them"
            )
