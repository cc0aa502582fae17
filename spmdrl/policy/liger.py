"""Records what Liger's kernels replace in a model, so that the self-check can run the model without them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ORIGINALS: dict[tuple[str, str], Any] = {}
"""Maps (Python module, name) to the original transformers function that Liger replaced in this process."""


def remember(hf: Any, apply: Callable[[], None]) -> None:
    """Call `apply`, which patches the model's modules and names in transformers, and record what it changes.

    Patched classes in transformers are restored immediately, so that later models are built from the originals.
    """
    names = {type(module).__module__ for module in hf.modules()}
    sources = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.")}
    modules = [(module, vars(module).get("forward")) for module in hf.modules()]
    apply()
    for name, before in sources.items():
        for key, new in list(vars(sys.modules[name]).items()):
            if callable(new) and key in before and before[key] is not new:
                if isinstance(new, type):
                    setattr(sys.modules[name], key, before[key])
                else:
                    _ORIGINALS.setdefault((name, key), before[key])
    hf.without_liger = [(module, old) for module, old in modules if vars(module).get("forward") is not old]


@contextmanager
def without_liger(hf: Any) -> Iterator[bool]:
    """Run a model without Liger inside this context, which yields True if Liger had replaced anything."""
    modules = vars(hf).get("without_liger", [])
    own = [(module, vars(module).get("forward")) for module, _ in modules]
    functions = {(name, key): getattr(sys.modules[name], key) for name, key in _ORIGINALS}
    try:
        _set_forwards(modules)
        for (name, key), function in _ORIGINALS.items():
            setattr(sys.modules[name], key, function)
        yield bool(modules or functions)
    finally:
        _set_forwards(own)
        for (name, key), function in functions.items():
            setattr(sys.modules[name], key, function)


def _set_forwards(forwards: list[tuple[Any, Any]]) -> None:
    """Set each module's forward, or delete it from the instance if it is None."""
    for module, forward in forwards:
        if forward is None:
            vars(module).pop("forward", None)
        else:
            module.forward = forward
