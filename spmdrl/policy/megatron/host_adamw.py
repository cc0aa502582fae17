"""CPU-offloaded AdamW for Megatron's distributed optimizer (`--policy.host-optimizer`).

This class replaces Megatron's HybridDeviceOptimizer, which cannot resume from our checkpoints. The parameter groups of
that optimizer contain classes, which our checkpoints must not contain, and its first load updates the model with random
gradients. HybridDeviceOptimizer also fails on float32 parameters. Megatron treats this class as a "precision-aware"
optimizer, which means that the optimizer itself stores the float32 weights, here in host memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from spmdrl.policy.optimizer import new_state


@dataclass
class HostBuffers:
    """Host buffers for one parameter at a time, pinned if the parameter is on a GPU."""

    gradient: torch.Tensor
    """The gradient, in float32."""
    weights: torch.Tensor
    """The updated weights, in the parameter's dtype."""
    arrived: Any = None
    """CUDA event recorded after the gradient is copied to host memory; None on CPU."""
    left: Any = None
    """CUDA event recorded after the updated weights are copied to the device; None before the first copy and on CPU."""

    def fetch(self, p: torch.Tensor) -> None:
        """Start copying a parameter's gradient to host memory asynchronously."""
        if self.left is not None:
            self.left.synchronize()
        self.gradient[: p.numel()].copy_(p.decoupled_grad.flatten(), non_blocking=True)  # type: ignore[attr-defined]
        self.arrived = self._mark(p)

    def send(self, p: torch.Tensor, master: torch.Tensor) -> None:
        """Round the float32 weights `master` to the parameter's dtype and start copying them into the parameter."""
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
    """AdamW (https://arxiv.org/abs/1711.05101) with float32 weights and moments in host memory.

    Parameters are this rank's shards of the model, on the device and in any dtype. A step reads the gradients
    (`decoupled_grad`) and updates the parameters one by one. The optimizer needs 12 bytes of host memory per element,
    plus buffers for two shards. For each parameter, `state` has "master_param" in addition to the three entries of
    torch's AdamW.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        """params: parameter groups. Other settings passed by Megatron are ignored."""
        groups = [dict(group) for group in params]
        for p in (p for group in groups for p in group["params"]):
            if not p.is_leaf:
                # torch optimizers reject parameters that are views, such as shards of float32 parameters, unless they
                # retain gradients.
                p.retain_grad()
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @property
    def sub_optimizers(self) -> list[torch.optim.AdamW]:
        """The optimizers with the step counts that Megatron reads."""
        return [self]

    def _all(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def fill(self) -> None:
        """Create state for parameters that have none, with master weights copied from the parameters."""
        for p in (p for p, _ in self._all() if p not in self.state):
            master = p.detach().to("cpu", torch.float32, copy=True)
            self.state[p] = {"master_param": master} | new_state(master)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step with the gradients that Megatron stored in `decoupled_grad`."""
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
                # Copy the next gradient while the host updates this parameter.
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
                # The buffers are freed after this step, so pending copies to the device must finish first.
                buffers.left.synchronize()

    @torch.no_grad()
    def take(self, p: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Copy saved tensors into a parameter's state. Master weights are named "master_param" or "param"."""
        self.fill()
        state = self.state[p]
        for name, value in tensors.items():
            if name == "step":
                # Copy the step count, because Megatron passes the same tensor for all parameters, and a step would
                # increment it once per parameter.
                state[name] = value.detach().to("cpu", torch.float32, copy=True)
            else:
                state["master_param" if name == "param" else name].copy_(value)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Copy freshly loaded model parameters to the float32 master weights."""
        for p, state in self.state.items():
            state["master_param"].copy_(p)

    def dummy_step(self) -> None:
        """Create the initial state, so that Megatron can load a checkpoint into it.

        Megatron's own optimizer would create the state by taking a step with random gradients.
        """
        self.fill()

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Do nothing. Megatron calls this after a load to sync copies of the state, but there is only one here."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, except that tensors keep their dtype and stay in host memory."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index, tensors in state_dict["state"].items():
            self.take(self._all()[index][0], tensors)
