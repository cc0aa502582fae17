"""AdamW, its checkpointed state and settings, and the learning rate schedule."""

import math

import torch

from spmdrl.config.schema import OptimizerConfig


def make_optimizer(parameters, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW (https://arxiv.org/abs/1711.05101) for master weights; only matrices are decayed."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    # The fused kernel updates all shards in one call instead of looping over DTensors. It does not support the meta
    # device.
    fused = all(p.device.type != "meta" for p in parameters)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused)


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's initial state for each parameter without state, so that checkpoints can save or load it.

    torch's state dict functions would create the state by taking a step with learning rate 0, which would shift the
    step count used for bias correction by one.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state):
        optimizer.state[p] = new_state(p)


def new_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the initial fused AdamW state of a parameter, on the parameter's device."""
    zeros = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=p.device)} | zeros


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the settings of each parameter group, for `restore_settings`."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def restore_settings(optimizer: torch.optim.Optimizer, settings: list[dict]) -> None:
    """Restore this run's settings after a load, which overwrites them with those of the saved run."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def learning_rate(cfg: OptimizerConfig, step: int, total: int) -> float:
    """Return the learning rate at optimizer step `step` (starting at 0) in a run of `total` steps."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    left = (total - step) / max(1, total - cfg.warmup_steps)
    done = 1 - max(0.0, min(1.0, left / cfg.decay_share))
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)
