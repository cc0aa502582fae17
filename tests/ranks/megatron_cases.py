"""Updates of one batch through either backend, for `test_megatron_policy.py`."""

import torch

from spmdrl.models import Models
from spmdrl.policy.backends import backend
from spmdrl.policy.weights import on_first
from tests.ranks.cases import config, synthetic_batch, update_models


def update(world, folder: str, sections: dict, kind: str, critic: str = "") -> tuple[dict, dict]:
    """(metrics, weights afterwards on rank 0) of one step on the same trajectories everywhere."""
    cfg = config(**sections)
    cfg.model.path, cfg.policy.backend = folder, kind
    make = backend(kind)
    models = Models(make(cfg, world, 100), make(cfg, world, 0, trainable=False) if cfg.algo.kl_coef else None)
    if critic:
        models.critic = make(cfg, world, 100, path=critic, head="value")
    values = update_models(cfg, world, models, synthetic_batch())
    weights = {}
    for name, model in (("policy", models.policy), ("critic", models.critic)):
        for bucket in on_first(model.pieces(), world, torch.float32) if model else ():
            weights |= {f"{name}/{k}": v.clone() for k, v in bucket.items()}
    return values, weights
