"""Tensor parallelism for the HF engine, by the plan that transformers keeps with each architecture.

`colwise` layers keep a range of their outputs; `rowwise` layers keep a range of their inputs and sum over the ranks
(https://arxiv.org/abs/1909.08053). Every rank holds and computes whole the modules that the plan does not name
(embeddings, norms, the head) or calls replicated (norms of a head's queries and keys).
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spmdrl.weights.reshard import Box


def plan_of(config: Any, ranks: int) -> dict[str, str]:
    """Return `colwise` or `rowwise` for each linear layer divided over `ranks`; `*` stands for a layer number.

    config: transformers' config of a language model.

    Raises:
        ValueError: the plan names more than linear layers (experts, fused projections), or there is no plan.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    # transformers' replicated styles differ only in their treatment of gradients, which do not exist here.
    plan = {n: s for n, s in plan.items() if n.startswith("layers.") and not s.startswith("replicated")}
    strange = sorted({style for style in plan.values() if style not in ("colwise", "rowwise")})
    if strange or not plan:
        name = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise ValueError(
            f"--rollout.tp {ranks}: the hf engine cannot divide {name} ({', '.join(strange) or 'no plan'}); "
            "take --rollout.engine vllm, or --rollout.tp 1"
        )
    return plan


def divide(model: Any, rank: int, group: dist.ProcessGroup) -> dict[str, Box]:
    """Cut a model's layers to this rank's part; return the box of each cut parameter.

    Raises:
        ValueError: the model cannot be divided (`plan_of`).
    """
    ranks, boxes = dist.get_world_size(group), {}
    plan = plan_of(model.config, ranks)
    prefix = f"{model.base_model_prefix}."
    for name, module in model.base_model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))
        if style is None:
            continue
        assert isinstance(module, nn.Linear), name
        dim = 0 if style == "colwise" else 1
        boxes[f"{prefix}{name}.weight"] = _keep(module, "weight", dim, rank, ranks)
        if style == "colwise" and module.bias is not None:
            boxes[f"{prefix}{name}.bias"] = _keep(module, "bias", 0, rank, ranks)
        if style == "rowwise":
            module.register_forward_hook(_summed(group))
    return boxes


def _keep(module: nn.Linear, name: str, dim: int, rank: int, ranks: int) -> Box:
    whole = getattr(module, name).detach()
    size = whole.shape[dim] // ranks
    assert size * ranks == whole.shape[dim], f"{name} {tuple(whole.shape)} over {ranks} ranks"
    part = whole.narrow(dim, rank * size, size).contiguous().clone()
    setattr(module, name, nn.Parameter(part, requires_grad=False))
    return tuple((rank * size, (rank + 1) * size) if d == dim else (0, n) for d, n in enumerate(whole.shape))


def _summed(group: dist.ProcessGroup):
    def hook(module: nn.Linear, _, output: torch.Tensor) -> torch.Tensor:
        if module.bias is not None:
            # Every rank has added the bias; the sum over ranks must contain it once.
            output = output - module.bias
        dist.all_reduce(output, group=group)
        return output if module.bias is None else output + module.bias

    return hook
