"""Routing replay: a mixture of experts is trained with the experts chosen by the engine ("R3",
https://arxiv.org/abs/2510.11370).

A router's choice of experts is discrete: it can differ between engine and trainer due to rounding, or after an update,
and each difference distorts the probability ratio (https://arxiv.org/abs/2507.18071). Routing replay records the choice
when a token is sampled and repeats it in training. The weights with which the outputs of the chosen experts are summed
are still computed by the trainer's router with the model's own formula, so the gradient is complete.

Routers in transformers choose experts with one `topk` call, whether they use softmax or sigmoid, bias, groups or
normalization. Choices are recorded and replaced at that call.

Dimensions: S tokens of a forward pass, L layers with experts, K experts per token.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from spmdrl.hub.build import language_model_class
from spmdrl.hub.folder import plain_errors, read_config

FREE = -1
"""Value that prescribes no expert, leaving the choice to the router."""
FLAG = "--rollout.routing-replay"


@dataclass(frozen=True)
class Experts:
    """A model's MoE layers, and the number of experts per token (`top_k`)."""

    layers: tuple[int, ...]
    """Indices of the decoder layers that have experts."""
    top_k: int

    @property
    def width(self) -> int:
        """Number of choices per token, L * K, which is the number of columns of `Episode.experts`."""
        return len(self.layers) * self.top_k


class _Choice(TorchFunctionMode):
    """Records the experts that a router chooses in one forward pass, and replaces them with prescribed ones, if any."""

    def __init__(self, router: Any, prescribed_SK: torch.Tensor | None):
        super().__init__()
        self.experts, self.top_k, self.prescribed, self.chosen = router.num_experts, router.top_k, prescribed_SK, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run one operation of the router, recording and replacing the `topk` that chooses experts."""
        out = func(*args, **(kwargs or {}))
        # Some routers also choose expert groups by topk, but over 3-dimensional scores or with a different k.
        if getattr(func, "__name__", "") != "topk" or out[1].dim() != 2 or out[1].shape[1] != self.top_k:
            return out
        scores_SE = args[0]
        if scores_SE.shape[1] != self.experts:
            return out
        self.chosen = out[1]
        if self.prescribed is None:
            return out
        self.chosen = torch.where(self.prescribed >= 0, self.prescribed.long(), out[1])
        return torch.return_types.topk((scores_SE.gather(1, self.chosen), self.chosen))  # type: ignore[attr-defined]


class Routers:
    """Records the choices of an HF model's routers, and replaces them with prescribed ones."""

    def __init__(self, hf: Any, recording: bool = False):
        """Patch a model's routers, before the model is sharded. recording: whether to keep the choices for `take`.

        Raises:
            ValueError: the model has no routers, or unsupported ones.
        """
        self.recording = recording
        self.last: dict[int, torch.Tensor] = {}
        found = [(name, m) for name, m in hf.named_modules() if _is_router(m)]
        if not found:
            raise ValueError(
                f"{FLAG}: no router was found in {type(hf).__name__}; the flag is for models with experts, leave it off"
            )
        if any(getattr(m, "topk_method", "") == "group_limited_greedy" for _, m in found):
            raise ValueError(
                f"{FLAG}: {type(hf).__name__} gives no weight to experts outside of the groups that its router "
                "chose (topk_method group_limited_greedy), so another choice cannot be replayed; leave it off"
            )
        assert len({m.top_k for _, m in found}) == 1, "all routers of a model must choose the same number of experts"
        layers = []
        for place, (name, router) in enumerate(found):
            path = re.match(r"(?:.*?\.)?(\d+)\.", name)
            assert path, f"{name} is in no layer"
            layers.append(int(path[1]))
            router.forward = partial(self._route, place, router, router.forward)
            # Experts are prescribed in the layer's forward, which activation checkpointing reruns with the same
            # arguments.
            layer = hf.get_submodule(name[: path.end() - 1])
            layer.forward = partial(_prescribe, router, place, layer.forward)
        self.experts = Experts(tuple(layers), found[0][1].top_k)

    def _route(self, place: int, router: Any, forward, *args, **kwargs):
        with _Choice(router, getattr(router, "prescribed", None)) as choice:
            out = forward(*args, **kwargs)
        if choice.chosen is None:
            raise ValueError(f"{FLAG}: {type(router).__name__} does not choose by topk; leave it off for this model")
        if self.recording:
            self.last[place] = choice.chosen
        return out

    def take(self) -> torch.Tensor:
        """Return the choices of the last forward pass, int16 [S, L, K] on the CPU. Requires `recording`."""
        taken = torch.stack([self.last[place] for place in range(len(self.experts.layers))], 1)
        self.last = {}
        return taken.to("cpu", torch.int16)


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__
    return name.endswith(("Router", "Gate")) and hasattr(module, "top_k") and hasattr(module, "num_experts")


def _prescribe(router: Any, place: int, forward, *args, **kwargs):
    experts_SLK = getattr(kwargs.get("packing"), "experts", None)
    router.prescribed = None if experts_SLK is None else experts_SLK[:, place]
    return forward(*args, **kwargs)


def experts_of(folder: Path, trust_remote_code: bool = False) -> Experts:
    """Return the `Experts` of an HF folder's model without reading its weights. Raises ValueError as `Routers` does."""
    config = read_config(folder, trust_remote_code)
    with plain_errors(folder), torch.device("meta"):
        return Routers(language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)).experts
