"""AdamW, its state and settings in checkpoints, and the schedule of its learning rate."""

import math

import torch

from spmdrl.config.schema import OptimizerConfig


def make_optimizer(parameters, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW (https://arxiv.org/abs/1711.05101) for master weights; only matrices get weight decay."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    # The fused kernel updates all shards in one call instead of a loop over DTensors. The meta device has no fused
    # kernel.
    fused = all(p.device.type != "meta" for p in parameters)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused)


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's initial state for each parameter that has none, so that a checkpoint can save or load it.

    torch's state dict functions would create it by a step with learning rate 0. After that, bias correction would treat
    the first real step as the second.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state):
        optimizer.state[p] = new_state(p)


def new_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of torch's fused AdamW for a parameter before its first step, on the parameter's device."""
    zeros = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=p.device)} | zeros


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the settings of each parameter group, which `restore_settings` can restore."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def restore_settings(optimizer: torch.optim.Optimizer, settings: list[dict]) -> None:
    """Restore this run's settings after a load, which replaces them by the settings of the saved run."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def learning_rate(cfg: OptimizerConfig, step: int, total: int) -> float:
    """Return the learning rate of optimizer step number `step`, counted from 0, in a run of `total` steps."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    left = (total - step) / max(1, total - cfg.warmup_steps)
    done = 1 - max(0.0, min(1.0, left / cfg.decay_share))
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)
