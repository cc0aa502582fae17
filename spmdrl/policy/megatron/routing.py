"""Routes tokens to experts in a Megatron policy, with routing replay, a load-balancing loss and balancing biases.

A packed micro-batch (`attention.Pack`) carries the information for its routers (`attention.Params.routing`). A router
receives this information whenever the forward pass of its layer starts, so the information always matches the
micro-batch, even when activation checkpointing recomputes the layer.

The loss is the load-balancing loss of https://arxiv.org/abs/2101.03961, computed per sequence as in DeepSeek-V3
(https://arxiv.org/abs/2412.19437, eq. 17 to 20). Sequences are never split over micro-batches or data-parallel ranks,
so this loss is the same in every layout. Megatron's own loss depends on how samples are grouped into micro-batches.

Shapes: S packed tokens on this rank (split over tp with sequence parallelism), B sequences, L MoE layers, E experts, K
experts per token.
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
    """Information about a packed micro-batch for routers; rows are in the order of a router's tokens."""

    sequence_S: torch.Tensor
    """Sequence index of each token, int64; B for padding and for all tokens of a dummy batch."""
    lengths_B: torch.Tensor
    """Number of tokens in each sequence over all ranks, float32."""
    weight: float
    """Weight of the per-token load-balancing loss: the configured coefficient divided by the number of tokens over all
    ranks; 0 disables the loss."""
    prescribed_SLK: torch.Tensor | None = None
    """Experts to route each token to, where FREE (-1) leaves the choice to the router. None leaves the choice to the
    router for all tokens."""


def plan(
    rows: torch.Tensor, lengths_B: torch.Tensor, real: bool, weight: float, prescribed_TLK: torch.Tensor | None
) -> Routing:
    """Return the `Routing` of one packed micro-batch, in host memory.

    rows: the part of `Pack.rows` for this rank's router tokens, int64 [S]. lengths_B: number of tokens in each
    sequence. real: False for a dummy batch. prescribed_TLK: as in `Routing`, for all packed tokens in order.
    """
    inside, ends = rows >= 0, lengths_B.cumsum(0)
    sequence = torch.where(inside & real, torch.searchsorted(ends, rows, right=True), len(ends))
    prescribed = None
    if prescribed_TLK is not None and real:
        prescribed = torch.where(inside[:, None, None], prescribed_TLK[rows.clamp(min=0)].long(), -1)
    return Routing(sequence, lengths_B.to(torch.float32), weight, prescribed)


class Router(TopKRouter):
    """Megatron's router with routing replay, token counts per expert and a load-balancing loss.

    Padding tokens are excluded from the counts and the loss.
    """

    place = 0
    """Index of the router's layer among the MoE layers of the model, starting at 0."""
    routing_of: Routing | None = None
    """The `Routing` of the current forward pass, or None if there is none."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Megatron calls `get_replay_topk` on this object instead of topk. It must not be a module, because the router
        # would then be a submodule of itself.
        self.router_replay: Any = SimpleNamespace(get_replay_topk=self._choose)
        self.forget()

    def forget(self) -> None:
        """Reset the token counts per expert and the loss to zero."""
        device = self.weight.device
        self.load_E = torch.zeros(len(self.weight), dtype=torch.float64, device=device)
        self.balance = torch.zeros((), dtype=torch.float64, device=device)

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices of the chosen experts, [S, K] each. scores: scores of all experts, [S, E].

        choose: Megatron's topk, for tokens whose experts are not prescribed.
        """
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        prescribed = self.routing_of.prescribed_SLK if self.routing_of else None
        if prescribed is None:
            return values, chosen
        chosen = torch.where(prescribed[:, self.place] >= 0, prescribed[:, self.place], chosen)
        return scores.gather(1, chosen), chosen

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Return Megatron's weights and choices, [S, E] each, for logits [S, 1, E]; count choices and add the loss."""
        probs, chosen = super().routing(logits, padding_mask)
        now = self.routing_of
        # Only count passes with gradients. This excludes the passes that compute old logp, and the first forward pass
        # with activation checkpointing.
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
        """Return this rank's part of the sum of length * E * sum(f * P) over sequences. Collective over tp and cp.

        For each expert, f is the expert's fraction of the sequence's routing choices, and P is its mean probability.
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
    """Returns a tensor unchanged; the backward also passes a gradient of 1 to an auxiliary loss."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], torch.ones((), dtype=grads[0].dtype, device=grads[0].device)


def routers(models: list[Any]) -> list[Router]:
    """Return this rank's routers in layer order."""
    return [m for model in models for m in model.modules() if isinstance(m, Router)]


def attach(model: nn.Module, arch: Architecture) -> None:
    """Set `place` on the routers of a GPTModel, and add layer hooks that pass each `Routing` to the routers."""
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
    """Return the load-balancing loss, averaged over layers and summed over tokens on this data-parallel rank.

    The loss of a token is 1 for perfectly balanced experts, and E / K if the same K experts are always chosen.
    Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(models[0].parameters()).device)
    for router in routers(models):
        total += router.balance
    dist.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return total / sum(as_list(models[0].arch.settings["moe_layer_freq"]))


@torch.no_grad()
def move_biases(models: list[Any], rate: float) -> None:
    """Add `rate` to the biases of experts with fewer tokens than this step's mean; subtract it if they have more.

    Source: https://arxiv.org/abs/2408.15664. The result only depends on token counts, not on the layout. Collective.
    """
    for router in routers(models):
        load = router.load_E
        dist.all_reduce(load, group=router.tp_dp_cp_group)
        bias: Any = router.expert_bias
        bias += rate * torch.sign(load.mean() - load).to(bias.dtype)
