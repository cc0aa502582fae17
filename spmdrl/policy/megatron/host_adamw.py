"""AdamW in host memory for Megatron's distributed optimizer (`--policy.host-optimizer`).

Megatron's own, HybridDeviceOptimizer, cannot be resumed here: its groups hold classes, which no checkpoint of ours may
name, its first load steps the model along random gradients, and it fails on float32 parameters. This one stands in its
place, under its name, and is run by the same code: the "precision-aware" one, in which the optimizer holds the float32
weights and the device none of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from spmdrl.policy.optimizer import new_state


@dataclass
class Desk:
    """Memory on the host through which one parameter at a time goes; pinned where the parameter is on a GPU."""

    gradient: torch.Tensor
    """float32."""
    weights: torch.Tensor
    """In the parameter's type."""
    arrived: Any = None
    """CUDA event: the gradient is here. None on a CPU."""
    left: Any = None
    """CUDA event: the weights are gone from here."""

    def fetch(self, p: torch.Tensor) -> None:
        """Begin to bring a parameter's gradient."""
        if self.left is not None:
            self.left.synchronize()
        self.gradient[: p.numel()].copy_(p.decoupled_grad.flatten(), non_blocking=True)  # type: ignore[attr-defined]
        self.arrived = self._mark(p)

    def send(self, p: torch.Tensor, master: torch.Tensor) -> None:
        """Round float32 weights into a parameter, by as many bytes as it has."""
        rounded = self.weights[: p.numel()].view_as(p)
        rounded.copy_(master)
        p.detach().copy_(rounded, non_blocking=True)
        self.left = self._mark(p)

    def _mark(self, p: torch.Tensor) -> Any:
        if not p.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(p.device))
        return event


class HostAdamW(torch.optim.AdamW):
    """AdamW (https://arxiv.org/abs/1711.05101) whose float32 weights and moments are in host memory.

    Parameters are the shards of the model that this rank updates, on the device and in any type. A step reads their
    `decoupled_grad` and writes them, one after the other: the host holds 12 bytes of each element, and of the two
    largest shards at a time the gradient too. `state` has for each "master_param" and torch's own three.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        """params: groups; further settings are those of Megatron's own, which this has no use for."""
        groups = [dict(group) for group in params]
        for p in (p for group in groups for p in group["params"]):
            if not p.is_leaf:
                # A shard of a float32 parameter is a view of it.
                p.retain_grad()
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @property
    def sub_optimizers(self) -> list[torch.optim.AdamW]:
        """Optimizers whose states count steps, for Megatron."""
        return [self]

    def _all(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter with its group."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def fill(self) -> None:
        """Make the state, from the parameters as they are, unless it is there."""
        for p in (p for group in self.param_groups for p in group["params"] if p not in self.state):
            master = p.detach().to("cpu", torch.float32, copy=True)
            self.state[p] = {"master_param": master} | new_state(master)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step along the gradients that Megatron left at the parameters."""
        self.fill()
        todo = self._all()
        desks = [desk for p, _ in todo[:1] for desk in self._desks(p)]
        for i, (p, group) in enumerate(todo):
            desk, state = desks[i % 2], self.state[p]
            if not i:
                desk.fetch(p)
            if i + 1 < len(todo):
                # Travels while this one is computed.
                desks[(i + 1) % 2].fetch(todo[i + 1][0])
            if desk.arrived is not None:
                desk.arrived.synchronize()
            beta1, beta2 = group["betas"]
            adamw(
                [state["master_param"]],
                [desk.gradient[: p.numel()].view_as(p)],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            desk.send(p, state["master_param"])
        for desk in desks:
            if desk.left is not None:
                # The desks are let go.
                desk.left.synchronize()

    def _desks(self, p: torch.Tensor) -> list[Desk]:
        most, pin = max(p.numel() for p, _ in self._all()), p.is_cuda

        def room(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(most, dtype=dtype, pin_memory=pin)

        return [Desk(room(torch.float32), room(p.dtype)) for _ in range(2)]

    @torch.no_grad()
    def take(self, p: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Copy a saved state of one parameter into its own; the master is called "master_param" or "param"."""
        self.fill()
        state = self.state[p]
        for name, value in tensors.items():
            if name == "step":
                # Megatron gives all parameters one tensor, which each of them would count up.
                state[name] = value.detach().to("cpu", torch.float32, copy=True)
            else:
                state["master_param" if name == "param" else name].copy_(value)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Follow parameters that were read into the model."""
        for p, state in self.state.items():
            state["master_param"].copy_(p)

    def dummy_step(self) -> None:
        """Make the state before a load; Megatron's own steps along random gradients."""
        self.fill()

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Called by Megatron after a load; the state is nowhere else."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch; values are copied, and neither cast to the parameters' type nor moved to their device."""
        params = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index, tensors in state_dict["state"].items():
            self.take(params[index], tensors)


def install() -> None:
    """Put it in the place of Megatron's own. May be called again."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    made: Any = distrib_optimizer.DistributedOptimizer
    for module in (optimizer, distrib_optimizer):
        module.HybridDeviceOptimizer = HostAdamW  # type: ignore[attr-defined]
    inner = made._set_main_param_and_optimizer_states
    if getattr(inner, "_copies", False):
        return

    def take(self, model_param, tensors):
        # Megatron would put parts of what it read, wherever that is, in the place of the state.
        if not isinstance(self.optimizer, HostAdamW):
            return inner(self, model_param, tensors)
        group, place = self.model_param_group_index_map[model_param]
        self.optimizer.take(self.optimizer.param_groups[group]["params"][place], tensors)

    take._copies = True  # type: ignore[attr-defined]
    made._set_main_param_and_optimizer_states = take
