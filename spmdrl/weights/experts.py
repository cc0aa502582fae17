"""Maps the parameters of a HF model to checkpoint tensors.

transformers 5 packs all experts of a layer into one parameter, [E, 2I, H] or [E, H, I]. Checkpoints, which vLLM and
SGLang also read, have one tensor per expert and projection. For a few model families, checkpoints also use different
module names. `Layout` lists the checkpoint tensor slices in a shard, for reading and writing. `Layout` uses the mapping
from transformers (`conversion_mapping.py`), so the written tensors are those that save_pretrained would write.

E: number of experts; I: expert intermediate size; H: hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from spmdrl.weights.boxes import Box, full_box


@dataclass(frozen=True)
class Slot:
    """A slice of one checkpoint tensor, and its position in a shard."""

    name: str
    """Name of the tensor in a HF checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    box: Box
    """Index ranges in the checkpoint tensor that the shard contains."""
    index: tuple[int | slice, ...]
    """`shard[index]` is a view of the shard with the box's shape, for reading and writing."""


class Layout:
    """Mapping from the parameters of one architecture to its checkpoint tensors."""

    def __init__(self, hf: Any):
        """Read the mapping for a model.

        hf: a transformers model. Only its names are read, so the model may be on the meta device or sharded.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        known = [t for t in get_model_conversion_mapping(hf, add_legacy=False) if not isinstance(t, PrefixChange)]
        # save_pretrained uses the same reverse mapping from parameters to checkpoints. If transformers converts a
        # parameter in any way other than packing experts, the parameter is written under its transformers name, which
        # from_pretrained accepts.
        known = [t for t in known if not isinstance(t, WeightConverter) or packs_experts(t)]
        backwards = [t.reverse_transform() for t in known[::-1]]
        self.renamings = [t for t in backwards if isinstance(t, WeightRenaming)]
        self.converters = [t for t in backwards if isinstance(t, WeightConverter)]
        self.cache: dict[tuple[str, tuple[int, ...], Box], list[Slot]] = {}

    def slots(self, name: str, shape: tuple[int, ...], box: Box) -> list[Slot]:
        """List the slots (checkpoint tensor slices) in a parameter's shard, or an empty list if the shard is empty.

        name, shape: name and shape of the whole parameter. box: index ranges of the parameter that the shard holds. A
        parameter without packed experts has one slot, the whole shard.
        """
        if (name, shape, box) not in self.cache:
            # Slots are cached, because every weight transfer to the engine needs the same slots.
            self.cache[name, shape, box] = self._slots(name, shape, box)
        return self.cache[name, shape, box]

    def _slots(self, name: str, shape: tuple[int, ...], box: Box) -> list[Slot]:
        if not prod(hi - lo for lo, hi in box):
            return []
        from transformers.core_model_loading import rename_source_key

        first, pattern = rename_source_key(name, self.renamings, self.converters, reverse=True)
        if pattern is None:
            return [Slot(first, tuple(shape), box, (slice(None),) * len(box))]
        converter = next(t for t in self.converters if pattern in t.source_patterns)
        endings = [p.rpartition("*")[2] for p in converter.target_patterns]
        before = first.removesuffix(endings[0]).removesuffix("*")
        assert first == before + "*" + endings[0], f"the checkpoint name {first} of {name} has no expert number"
        return _expert_slots(before, endings, tuple(shape), box)

    def places(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int | slice, ...]]]:
        """Return the location of each checkpoint tensor in an unsharded model: name -> (parameter name, index into the
        parameter).

        shapes: parameter names and shapes of the model.
        """
        return {
            slot.name: (name, slot.index) for name, shape in shapes for slot in self.slots(name, shape, full_box(shape))
        }


def packs_experts(converter: Any) -> bool:
    """Return True if a transformers WeightConverter packs experts along dim 0 and their projections along dim 1."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    steps = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    return steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _expert_slots(before: str, endings: list[str], shape: tuple[int, ...], box: Box) -> list[Slot]:
    """Return the slots of experts packed along dim 0, each with len(endings) projections concatenated along dim 1."""
    assert shape[1] % len(endings) == 0, (shape, endings)
    rows = shape[1] // len(endings)
    (first, last), (top, bottom), *rest = box
    out = []
    for expert in range(first, last):
        for i, ending in enumerate(endings):
            lo, hi = max(top, i * rows), min(bottom, (i + 1) * rows)
            if lo < hi:
                part: Box = ((lo - i * rows, hi - i * rows), *rest)
                index = (expert - first, slice(lo - top, hi - top), *(slice(None) for _ in rest))
                out.append(Slot(f"{before}{expert}{ending}", (rows, *shape[2:]), part, index))
    return out
