"""Limits vLLM's changes of transformers' classes to the engine's own model.

vLLM builds some families from transformers' own modules (its Transformers backend: Olmo2, Olmo3, SmolLM3, Starcoder2)
and changes their classes for `torch.compile`. The trainer's model has the same classes, and its forward would then
fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Changed:
    """A class before vLLM changed it."""

    cls: type
    bases: tuple[type, ...]
    names: dict[str, Any]

    def restore(self) -> type:
        """Restore the class, and return a subclass with vLLM's changes."""
        added = tuple(base for base in self.cls.__bases__ if base not in self.bases)
        changed = {name: x for name, x in vars(self.cls).items() if self.names.get(name) is not x}
        for name in ("__dict__", "__weakref__", "__bases__"):
            changed.pop(name, None)
        for name in changed:
            if name in self.names:
                setattr(self.cls, name, self.names[name])
            else:
                delattr(self.cls, name)
        self.cls.__bases__ = self.bases
        # vLLM finds the class's source by its name and module.
        return type(self.cls.__name__, (self.cls, *added), {**changed, "__module__": self.cls.__module__})


@contextmanager
def restored_classes() -> Iterator[Callable[[torch.nn.Module], None]]:
    """Record the classes outside vLLM that it changes inside this context, and restore them at the end.

    Yields a function to call there with the model that vLLM built: modules of a changed class get a subclass of it with
    vLLM's changes.
    """
    from vllm.compilation import decorators

    change, found, built = decorators._support_torch_compile, [], []

    def recorded(cls: type, *args: Any, **kwargs: Any) -> type:
        if not cls.__module__.startswith("vllm.") and cls not in [each.cls for each in found]:
            found.append(_Changed(cls, cls.__bases__, dict(vars(cls))))
        return change(cls, *args, **kwargs)

    decorators._support_torch_compile = recorded
    try:
        yield built.append
    finally:
        decorators._support_torch_compile = change
        own = {each.cls: each.restore() for each in found}
        for module in (module for model in built for module in model.modules()):
            if type(module) in own:
                module.__class__ = own[type(module)]
