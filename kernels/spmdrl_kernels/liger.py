"""Wraps LinkedIn's Liger kernels (package liger-kernel) in the interface of `linear_logprob`, for comparison.

Source: https://github.com/linkedin/Liger-Kernel. Liger's fused linear cross-entropy returns no entropy and does not
divide the vocabulary over ranks.
"""

import torch
import torch.distributed as dist

from spmdrl_kernels.checks import check_values


def liger_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float | torch.Tensor,
    entropy: bool,
    softcap: float | None,
    mask: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    valid_vocab: int | None,
) -> tuple[torch.Tensor, None]:
    """Return logp_T, and None for the entropy; arguments are as in `linear_logprob`.

    Raises ValueError if Liger is not installed or lacks a requested feature, or if an argument is out of range.
    """
    plain = not isinstance(temperature, torch.Tensor) and temperature == 1.0
    unsupported = {
        "entropy=True": entropy,
        "group": group is not None,
        "softcap together with a temperature": softcap is not None and not plain,
    }
    if missing := [name for name, requested in unsupported.items() if requested]:
        raise ValueError(f"backend='liger' does not support {', '.join(missing)}: use backend='triton' or 'torch'")
    if valid_vocab is not None and not 1 <= valid_vocab <= len(weight_VD):
        raise ValueError(f"valid_vocab must lie in [1, {len(weight_VD)}], the rows of the weight: {valid_vocab}")
    heat = temperature
    if isinstance(heat, torch.Tensor) and heat.ndim and mask is not None:
        heat = heat[mask]
    check_values(targets_T if mask is None else targets_T[mask], heat, valid_vocab or len(weight_VD))
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise ValueError(f"backend='liger' needs the package liger-kernel: {error}") from error
    if not plain:
        # Liger has no temperature. Without a softcap, dividing the hidden states has the same effect as dividing the
        # logits, except that bf16 states are rounded once more.
        by = temperature[:, None] if isinstance(temperature, torch.Tensor) and temperature.ndim else temperature
        hidden_TD = (hidden_TD / by).to(hidden_TD.dtype)
    if mask is not None:
        targets_T = torch.where(mask, targets_T, -100)
    nll_T = liger_fused_linear_cross_entropy(
        hidden_TD, weight_VD[:valid_vocab], targets_T, reduction="none", softcap=softcap, ignore_index=-100
    )
    return -nll_T.to(torch.float32), None
