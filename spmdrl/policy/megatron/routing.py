"""Routes tokens to experts in a Megatron policy: routing replay, a load-balancing loss, biases that balance the load.

A packed micro-batch (`attention.Pack`) carries the information that routers need (`attention.Params.routing`). A router
gets this information each time the forward of its layer starts. So it belongs to the right pack even if activation
checkpointing runs the layer again later.

The loss is the load-balancing loss of https://arxiv.org/abs/2101.03961 within each sequence, as in DeepSeek-V3
(https://arxiv.org/abs/2412.19437, eq. 17 to 20). Sequences are never divided over micro-batches or data-parallel ranks,
so this loss is the same in every layout. Megatron's own loss depends on the division into micro-batches.

Shapes: S tokens of a pack on this rank (divided by tp under sequence parallelism), B sequences, L layers with experts,
E experts, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from spmdrl.policy.megatron.arch import Architecture
from spmdrl.policy.megatron.layout import as_list


@dataclass
class Routing:
    """The information about a pack that routers need; rows are in the order of the tokens that a router gets."""

    sequence_S: torch.Tensor
    """Index of the sequence of each token, int64; B for padding and for all tokens of a dummy pack."""
    lengths_B: torch.Tensor
    """Number of tokens of each sequence, counted over all ranks, float32."""
    weight: float
    """Weight of one token's load-balancing loss: the coefficient in the settings divided by the number of tokens over
    all ranks; 0 for no loss."""
    prescribed_SLK: torch.Tensor | None = None
    """Experts that the router must choose for each token; where the value is FREE (-1), the router chooses. None: the
    router chooses for all tokens."""


def plan(
    rows: torch.Tensor, lengths_B: torch.Tensor, real: bool, weight: float, prescribed_TLK: torch.Tensor | None
) -> Routing:
    """Return the Routing of one pack, in host memory.

    rows: the part of `Pack.rows` for the tokens that this rank's routers get, int64 [S]. lengths_B: number of tokens of
    each sequence. real: False for a dummy pack. prescribed_TLK: as in `Routing`, for all tokens of the pack in order.
    """
    inside, ends = rows >= 0, lengths_B.cumsum(0)
    sequence = torch.where(inside & real, torch.searchsorted(ends, rows, right=True), len(ends))
    prescribed = None
    if prescribed_TLK is not None and real:
        prescribed = torch.where(inside[:, None, None], prescribed_TLK[rows.clamp(min=0)].long(), -1)
    return Routing(sequence, lengths_B.to(torch.float32), weight, prescribed)


class Router(TopKRouter):
    """Megatron's router with routing replay; it counts the tokens of each expert and has a load-balancing loss.

    Padding tokens affect neither the counts nor the loss.
    """

    place = 0
    """Index of the router's layer among the model's layers with experts, from 0."""
    routing_of: Routing | None = None
    """The Routing of the pack whose forward runs; None if the layer runs without one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Megatron calls `get_replay_topk` of this object instead of topk. The object must not be a module, because the
        # router would then be a submodule of itself.
        self.router_replay: Any = SimpleNamespace(get_replay_topk=self._choose)
        self.forget()

    def forget(self) -> None:
        """Reset the counts of experts' tokens and the loss to zero."""
        device = self.weight.device
        self.load_E = torch.zeros(len(self.weight), dtype=torch.float64, device=device)
        self.balance = torch.zeros((), dtype=torch.float64, device=device)

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the chosen experts, [S, K] each. scores: [S, E], of all experts.

        choose: Megatron's topk, for tokens whose experts are not prescribed.
        """
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        prescribed = self.routing_of.prescribed_SLK if self.routing_of else None
        if prescribed is None:
            return values, chosen
        chosen = torch.where(prescribed[:, self.place] >= 0, prescribed[:, self.place], chosen)
        return scores.gather(1, chosen), chosen

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Return Megatron's weights and choices, [S, E] each, from logits [S, 1, E]; count choices and add the loss."""
        probs, chosen = super().routing(logits, padding_mask)
        now = self.routing_of
        # Only passes with a gradient count. This leaves out the passes that compute old logp, and the first pass under
        # activation checkpointing.
        if now is None or not self.training or not torch.is_grad_enabled():
            return probs, chosen
        real = now.sequence_S < len(now.lengths_B)
        self.load_E += (chosen & real[:, None]).sum(0)
        if now.weight:
            loss = self._loss(logits.flatten(0, 1), now)
            self.balance += loss.detach()
            probs = _WithLoss.apply(probs, loss * now.weight)
        return probs, chosen

    def _loss(self, logits_SE: torch.Tensor, now: Routing) -> torch.Tensor:
        """Return this rank's part of a sum with the term length * E * sum(f * P) for each sequence. Collective over tp
        and cp.

        For each expert, f is the share of the sequence's choices that it gets, and P its mean probability.
        """
        chosen, scores = compute_routing_scores_for_aux_loss(logits_SE, self.topk, self.score_function)
        sums = [
            x.new_zeros(len(now.lengths_B) + 1, x.shape[1]).index_add(0, now.sequence_S, x)[:-1]
            for x in (chosen.to(scores.dtype), scores)
        ]
        counts, mine = reduce_from_tensor_model_parallel_region(sums[0], self.tp_cp_group), sums[1]
        experts = logits_SE.shape[1]
        return ((counts * mine).sum(1) / now.lengths_B).sum() * (experts / self.topk)


class _WithLoss(torch.autograd.Function):
    """Returns a tensor unchanged. Its backward also sends a gradient of 1 to a loss that is not part of the result."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], torch.ones((), dtype=grads[0].dtype, device=grads[0].device)


def routers(models: list[Any]) -> list[Router]:
    """Return the routers of this rank in the order of their layers."""
    return [m for model in models for m in model.modules() if isinstance(m, Router)]


def attach(model: nn.Module, arch: Architecture) -> None:
    """Set `place` of a GPTModel's routers, and add hooks to its layers that pass a pack's Routing to the routers."""
    if not arch.settings.get("num_moe_experts"):
        return
    freq = as_list(arch.settings["moe_layer_freq"])
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.place = sum(freq[: layer.layer_number - 1])
            layer.register_forward_pre_hook(partial(_set_routing, router), with_kwargs=True)


def _set_routing(router: Router, layer: nn.Module, args: tuple, kwargs: dict) -> None:
    router.routing_of = getattr(kwargs.get("packed_seq_params"), "routing", None)


def mean_loss(models: list[Any]) -> torch.Tensor:
    """Return the mean over layers of `Router.balance`, the loss summed over the tokens of this data-parallel rank.

    The loss of a token is 1 if experts are used evenly, and E / K if the same K experts are always chosen. Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(models[0].parameters()).device)
    for router in routers(models):
        total += router.balance
    dist.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return total / sum(as_list(models[0].arch.settings["moe_layer_freq"]))


@torch.no_grad()
def move_biases(models: list[Any], rate: float) -> None:
    """Increase by `rate` the biases of experts with fewer tokens than the mean of this step; decrease those with more.

    Source: https://arxiv.org/abs/2408.15664. The result depends only on counts of tokens, and so not on the layout.
    Collective.
    """
    for router in routers(models):
        load = router.load_E
        dist.all_reduce(load, group=router.tp_dp_cp_group)
        bias: Any = router.expert_bias
        bias += rate * torch.sign(load.mean() - load).to(bias.dtype)
