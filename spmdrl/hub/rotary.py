"""Detects rotary embeddings whose frequencies depend on the sequence length, from a model's config."""

from typing import Any, TypeGuard


def moves(kind: Any) -> TypeGuard[str]:
    """Return True if this rope type's frequencies depend on the sequence length."""
    return isinstance(kind, str) and (kind == "longrope" or grows(kind))


def grows(kind: str) -> bool:
    """Return True if this rope type recomputes its frequencies for every length above its limit (dynamic NTK)."""
    return "dynamic" in kind


def limits(hf_config: Any) -> dict[str, int]:
    """Return, per rope type, the length in tokens beyond which frequencies change. Constant types are omitted.

    `longrope` uses one set of factors up to that length and another beyond it. With `dynamic`, the frequencies of
    longer sequences depend on their exact length (transformers, `modeling_rope_utils.py`).
    """
    config = hf_config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    return _limits(rope, positions)


def _limits(rope: Any, positions: int) -> dict[str, int]:
    # Some configs have a single dict of rope parameters, others have one per layer type.
    if not isinstance(rope, dict):
        return {}
    kind, found = rope.get("rope_type", rope.get("type")), {}
    if moves(kind):
        found[kind] = rope.get("original_max_position_embeddings") or positions
    for part in rope.values():
        found |= _limits(part, positions)
    return found
