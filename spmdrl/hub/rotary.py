"""Rotary embeddings whose frequencies depend on the length of a sequence, as a model's config declares."""

from typing import Any, TypeGuard


def moves(kind: Any) -> TypeGuard[str]:
    """Return True if the frequencies of a rope type depend on the length of a sequence."""
    return isinstance(kind, str) and (kind == "longrope" or grows(kind))


def grows(kind: str) -> bool:
    """Return True if the frequencies of a rope type change again with every token beyond its length in `limits`."""
    return "dynamic" in kind


def limits(hf_config: Any) -> dict[str, int]:
    """Return, by rope type, the length in tokens beyond which frequencies change; types without changes are omitted.

    `longrope` uses one set of factors up to that length and another beyond it. With `dynamic`, frequencies depend on
    the length of every longer sequence (transformers, `modeling_rope_utils.py`).
    """
    config = hf_config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    return _limits(rope, positions)


def _limits(rope: Any, positions: int) -> dict[str, int]:
    # Some configs have one dict of rope parameters, others have one for each type of layer.
    if not isinstance(rope, dict):
        return {}
    kind, found = rope.get("rope_type", rope.get("type")), {}
    if moves(kind):
        found[kind] = rope.get("original_max_position_embeddings") or positions
    for part in rope.values():
        found |= _limits(part, positions)
    return found
