"""Finds the tensors in a Hugging Face folder that a model's parameters are read from.

When transformers loads a folder, it renames tensors, adds or drops the inner model's prefix, packs a layer's experts
into one parameter, and for a few model families splits or transposes tensors. This module applies the same rules
(`core_model_loading.py`) to names and to the slices (boxes, `boxes.py`) that a rank needs, so that part of a parameter
can be read without the rest. This does not work for parameters whose tensors transformers splits or transposes.
`experts.py` maps in the opposite direction, from parameters to checkpoint tensors.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.weights.boxes import Box, cut, full_box, inside
from spmdrl.weights.experts import packs_experts
from spmdrl.weights.folder import Tensors


@dataclass(eq=False)
class Converted:
    """Tensors in a folder that transformers converts together into one or more parameters."""

    first: str
    """Name of the first parameter that the conversion returns."""
    converter: Any
    """The transformers WeightConverter that performs the conversion."""
    by_pattern: dict[str, list[str]]
    """Converter pattern -> names of the tensors that match it, in transformers' order."""

    def packs(self) -> bool:
        """Return True if the conversion only packs experts into one parameter."""
        return len(self.converter.target_patterns) == 1 and packs_experts(self.converter)

    def projections(self) -> list[list[str]]:
        """Return, for each projection, the names of its tensors, one per expert.

        Projections are in their order along dim 1 of the parameter.
        """
        return [self.by_pattern.get(pattern, []) for pattern in self.converter.source_patterns]

    def run(self, hf: Any, tensors: Tensors, meta: bool = False) -> dict[str, torch.Tensor]:
        """Return the converted parameters by name. meta: whether to return them on the meta device, without values."""
        converter = deepcopy(self.converter)
        for pattern, names in self.by_pattern.items():
            for name in names:
                shape = tensors.shape(name)
                found = torch.empty(shape, device="meta") if meta else tensors.read(name, full_box(shape))
                converter.add_tensor(self.first, name, pattern, found)
        parameters = converter.convert(self.first, model=hf, config=hf.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in parameters.items()}


class Sources:
    """The tensors in a folder that a model's parameters are read from."""

    def __init__(self, hf: Any, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors):
        """Match tensors to parameters by name, without reading weights.

        hf: a transformers model, which may be on the meta device, be sharded, or have adapters. shapes: full shape of
        every parameter and persistent buffer, by its name in the original model. tensors: the folder to read.
        """
        self.hf, self.shapes, self.tensors = hf, dict(shapes), tensors
        self.plain: dict[str, str] = {}
        self.converted: dict[str, Converted] = {}
        self.last: tuple[Converted, dict[str, torch.Tensor]] | None = None
        self._match()
        # A conversion may return several parameters, whose names are known only after running it.
        for first, each in list(self.converted.items()):
            if not each.packs():
                for name in self._result_shapes(each):
                    self.converted.setdefault(name, self.converted[first])

    def _match(self) -> None:
        """Assign each tensor to a parameter, as transformers' `convert_and_load_state_dict_in_model` does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        known = get_model_conversion_mapping(self.hf)
        renamings = [t for t in known if isinstance(t, WeightRenaming)]
        converters = [t for t in known if isinstance(t, WeightConverter)]
        of_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
        prefix: Any = self.hf.base_model_prefix
        shapes: Any = self.shapes
        for name in sorted(self.tensors.names(), key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, shapes)
            if renamed not in shapes and name in shapes:
                renamed, pattern = rename_source_key(name, [], [], prefix, shapes)
            if renamed not in shapes:
                continue
            if pattern is None:
                # If several tensors match one parameter, the first is used, as in transformers.
                self.plain.setdefault(renamed, name)
            else:
                at = self.converted.setdefault(renamed, Converted(renamed, of_pattern[pattern], {}))
                at.by_pattern.setdefault(pattern, []).append(name)

    def _result_shapes(self, each: Converted) -> dict[str, tuple[int, ...]]:
        try:
            parameters = each.run(self.hf, self.tensors, meta=True)
        except (RuntimeError, ValueError, IndexError):
            # The tensors do not fit together, so `fits` returns False for their parameters.
            return {}
        return {name: tuple(x.shape) for name, x in parameters.items()}

    def __contains__(self, name: str) -> bool:
        """Return True if the folder has tensors for a parameter."""
        return name in self.plain or name in self.converted

    def fits(self, name: str) -> bool:
        """Return True if the folder has all tensors of a parameter, with shapes that match the model."""
        shape = self.shapes[name]
        if name in self.plain:
            return self.tensors.shape(self.plain[name]) == shape
        if name not in self.converted:
            return False
        each = self.converted[name]
        if not each.packs():
            return self._result_shapes(each).get(name) == shape
        projections = each.projections()
        if len(shape) < 2 or shape[1] % len(projections):
            return False
        part = (shape[1] // len(projections), *shape[2:])
        return all(
            len(names) == shape[0] and all(self.tensors.shape(n) == part for n in names) for names in projections
        )

    def may_lack(self, name: str) -> bool:
        """Return True if the model class allows this parameter to be missing from the folder."""
        return any(re.search(pattern, name) for pattern in self.hf._keys_to_ignore_on_load_missing or ())

    def read_from(self, name: str) -> list[str]:
        """List the tensors that a parameter is read from."""
        if name in self.plain:
            return [self.plain[name]]
        return [tensor for names in self.converted[name].by_pattern.values() for tensor in names]

    @torch.no_grad()
    def copy(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copy a box of a parameter into a tensor of the box's shape. `fits` must return True for the parameter."""
        if name in self.plain:
            self.tensors.copy(self.plain[name], box, into)
            return
        each = self.converted[name]
        if each.packs():
            self._copy_experts(each.projections(), self.shapes[name], box, into)
            return
        if self.last is None or self.last[0] is not each:
            # Cache the result, because the next call probably needs another box or parameter from this conversion.
            self.last = each, each.run(self.hf, self.tensors)
        into.copy_(inside(self.last[1][name], box))

    def _copy_experts(self, projections: list[list[str]], shape: tuple[int, ...], box: Box, into: torch.Tensor) -> None:
        """Copy a box of a parameter with packed experts.

        The parameter's shape is [experts, rows of all projections of an expert, ...].
        """
        (first, last), inner = box[0], box[1:]
        rows = shape[1] // len(projections)
        for expert in range(first, last):
            for i, names in enumerate(projections):
                place: Box = ((i * rows, (i + 1) * rows), *full_box(shape[2:]))
                if (part := cut(place, inner)) is None:
                    continue
                top, bottom = part[0]
                source: Box = ((top - i * rows, bottom - i * rows), *part[1:])
                self.tensors.copy(names[expert], source, inside(into[expert - first], part, inner))
