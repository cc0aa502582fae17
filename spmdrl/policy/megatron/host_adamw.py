"""AdamW in host memory for Megatron's distributed optimizer (`--policy.host-optimizer`).

This class replaces Megatron's HybridDeviceOptimizer, which cannot resume from our checkpoints: its groups contain
classes, which our checkpoints may not name; its first load updates the model with random gradients; and it fails on
float32 parameters. Megatron uses it as a "precision-aware" optimizer: the optimizer stores the float32 weights, so that
the device does not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from spmdrl.policy.optimizer import new_state


@dataclass
class HostBuffers:
    """Host buffers for one parameter at a time, in pinned memory if the parameter is on a GPU."""

    gradient: torch.Tensor
    """Gradient, float32."""
    weights: torch.Tensor
    """Updated weights in the parameter's type."""
    arrived: Any = None
    """CUDA event after the copy of the gradient to the host; None on a CPU."""
    left: Any = None
    """CUDA event after the copy of the weights to the device; None before the first copy and on a CPU."""

    def fetch(self, p: torch.Tensor) -> None:
        """Start copying a parameter's gradient to the host."""
        if self.left is not None:
            self.left.synchronize()
        self.gradient[: p.numel()].copy_(p.decoupled_grad.flatten(), non_blocking=True)  # type: ignore[attr-defined]
        self.arrived = self._mark(p)

    def send(self, p: torch.Tensor, master: torch.Tensor) -> None:
        """Round float32 weights to the parameter's type and copy them into it."""
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

    Parameters are this rank's shards of the model, on the device and in any type. A step reads the `decoupled_grad` of
    one parameter after the other and updates it. Host memory: 12 bytes per element, and the gradients of two shards.
    `state` has "master_param" and the three entries of torch's AdamW for each parameter.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        """params: parameter groups. Further settings of Megatron's optimizer are ignored."""
        groups = [dict(group) for group in params]
        for p in (p for group in groups for p in group["params"]):
            if not p.is_leaf:
                # A shard of a float32 parameter is a view of the parameter.
                p.retain_grad()
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @property
    def sub_optimizers(self) -> list[torch.optim.AdamW]:
        """The optimizers whose state counts steps; Megatron reads this property."""
        return [self]

    def _all(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def fill(self) -> None:
        """Create the state of parameters that have none, from their values."""
        for p in (p for p, _ in self._all() if p not in self.state):
            master = p.detach().to("cpu", torch.float32, copy=True)
            self.state[p] = {"master_param": master} | new_state(master)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step with the gradients that Megatron stored on the parameters."""
        self.fill()
        todo = self._all()
        most = max((p.numel() for p, _ in todo), default=0)
        types = [(torch.float32, p.dtype) for p, _ in todo[:1]] * 2
        pair = [HostBuffers(*(torch.empty(most, dtype=t, pin_memory=todo[0][0].is_cuda) for t in x)) for x in types]
        for i, (p, group) in enumerate(todo):
            buffers, state = pair[i % 2], self.state[p]
            if not i:
                buffers.fetch(p)
            if i + 1 < len(todo):
                # Start copying the next gradient while this parameter is updated.
                pair[(i + 1) % 2].fetch(todo[i + 1][0])
            if buffers.arrived is not None:
                buffers.arrived.synchronize()
            gradient = buffers.gradient[: p.numel()].view_as(p)
            moments = [state["exp_avg"]], [state["exp_avg_sq"]]
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            flags = dict(fused=True, amsgrad=False, maximize=False)
            adamw([state["master_param"]], [gradient], *moments, [], [state["step"]], **flags, **settings)
            buffers.send(p, state["master_param"])
        for buffers in pair:
            if buffers.left is not None:
                # Wait for the copies, because the buffers are freed after this.
                buffers.left.synchronize()

    @torch.no_grad()
    def take(self, p: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Copy a saved state into that of a parameter; master weights are named "master_param" or "param"."""
        self.fill()
        state = self.state[p]
        for name, value in tensors.items():
            if name == "step":
                # Copy it: Megatron passes the same tensor for all parameters, and each would increment it.
                state[name] = value.detach().to("cpu", torch.float32, copy=True)
            else:
                state["master_param" if name == "param" else name].copy_(value)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Copy parameters that were loaded into the model to the float32 master weights."""
        for p, state in self.state.items():
            state["master_param"].copy_(p)

    def dummy_step(self) -> None:
        """Create the state before a load; Megatron's version takes a step with random gradients instead."""
        self.fill()

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Do nothing: Megatron calls this after a load to copy the state, which exists only once in this class."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state like torch, but do not cast values to the parameters' type or move them to their device."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index, tensors in state_dict["state"].items():
            self.take(self._all()[index][0], tensors)
