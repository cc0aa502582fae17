"""AdamW with a warm-up schedule and a global gradient norm."""

import math

import torch

from spmdrl.config.schema import OptimizerConfig


def make_optimizer(parameters, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW on master weights (https://arxiv.org/abs/1711.05101); matrices alone decay."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)


def learning_rate(cfg: OptimizerConfig, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total`."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = min(1.0, (step - cfg.warmup_steps) / max(1, total - cfg.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[cfg.schedule]
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape) if cfg.schedule != "constant" else cfg.lr
