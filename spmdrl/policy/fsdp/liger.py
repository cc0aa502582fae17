"""Liger's Triton kernels for the operations between a model's matmuls: RMSNorm, rotary embedding, SwiGLU.

Source: https://github.com/linkedin/Liger-Kernel (https://arxiv.org/abs/2410.10989)
"""

from typing import Any

import torch


def use_liger(hf: Any, device: torch.device) -> None:
    """Put Liger's kernels into a transformers model that will train on `device`. The head is left unchanged.

    Raises:
        ValueError: no GPU, or a model type that Liger has no kernels for.
    """
    if device.type != "cuda":
        raise ValueError("--policy.liger: its kernels run on GPUs; leave it out on a CPU")
    from liger_kernel.transformers import monkey_patch

    known, kind = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, hf.config.model_type
    if kind not in known:
        raise ValueError(f"--policy.liger: Liger has no kernels for {kind}; it has {', '.join(sorted(known))}")
    # The loss is computed by this package: chunked in the head, with the run's own formula.
    monkey_patch._apply_liger_kernel_to_instance(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)
