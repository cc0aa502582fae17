"""Switches a HF model between attention over packs and transformers' own, for one sequence per forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def own_attention(hf: Any) -> str:
    """Return the name of transformers' default implementation for a model: sdpa where the model supports it."""
    return hf.get_correct_attn_implementation(None)


def use_attention(hf: Any, name: str) -> None:
    """Set the attention implementation of all layers of a model from the next forward on."""
    for config in _configs(hf):
        config._attn_implementation = name


@contextmanager
def with_attention(hf: Any, name: str) -> Iterator[None]:
    """Set the attention implementation of all layers of a model inside this context."""
    before = [(config, config._attn_implementation) for config in _configs(hf)]
    use_attention(hf, name)
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def _configs(hf: Any) -> list[Any]:
    found = {
        id(m.config): m.config for m in hf.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    return list(found.values())
