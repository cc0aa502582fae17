"""Runs the sequences of a packed batch one by one through plain transformers (the form `apart` of `heads.py`)."""

from typing import Any

import torch

from spmdrl.hub.encode import encode, in_order
from spmdrl.hub.vision import Vision
from spmdrl.policy.attention.ulysses import TokenSlice
from spmdrl.policy.forward_plan import ForwardPlan, Noise, noise_of


def states_apart(
    hf: Any,
    vision: Vision | None,
    tokens_T: torch.Tensor,
    positions_T: torch.Tensor,
    plan: ForwardPlan,
    noise: Noise | None,
    forwards: int,
    looks: bool,
) -> torch.Tensor:
    """Return hidden states [T, D] of a packed batch.

    vision: facts of a model that reads images, else None. positions_T: int64 [T] or, with images, [T, 3]. noise,
    forwards, looks: as in `Packed.run`.
    """
    lengths = plan.lengths
    given: list[dict[str, Any]] = [{"input_ids": ids[None]} for ids in tokens_T.split(lengths)]
    if noise is not None:
        embedded = hf.get_input_embeddings()(tokens_T)[None]
        embedded = embedded + noise_of(noise, TokenSlice(len(tokens_T)), embedded)
        given = [{"inputs_embeds": part} for part in embedded.split(lengths, 1)]
    if positions_T.dim() == 2:
        for each, rows_n3 in zip(given, positions_T.split(lengths), strict=True):
            each["position_ids"] = rows_n3.T[:, None]
    # The outputs of further passes are unused, but their backward must run, because ranks with more sequences run one
    # too.
    more = max(forwards - len(lengths), 0)
    given += [{"input_ids": tokens_T[None, :2]}] * more
    images, states = [*(plan.images or [()] * len(lengths)), *[()] * more], []
    for each, size, seen in zip(given, [*lengths, *[0] * more], images, strict=True):
        if looks:
            assert vision is not None
            each = each | encode(hf, vision, in_order(list(seen)), tokens_T.device)
        states.append(hf.base_model(**each, use_cache=False).last_hidden_state[0, :size])
    return torch.cat(states)
