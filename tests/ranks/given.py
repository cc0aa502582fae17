"""Jobs on given rows, in process: what their entry points do after they have read their flags."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.supervised import SupervisedConfig
from spmdrl.data.distribute import balance
from spmdrl.session.session import Session
from spmdrl.supervised.entry import with_steps
from spmdrl.supervised.rows import open_mixture
from spmdrl.tracking.metrics import Timer
from tests.ranks.demo import Interrupted, dying
from tests.ranks.test_shared_prompts import float64_norm


def with_sections(cfg: Any, *changes: dict[str, dict]) -> Any:
    """Returns settings with values by section; later ones win."""
    for sections in changes:
        for name, values in sections.items():
            cfg = dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **values)})
    return cfg


def small(folder: str, source: str, rows: int, template: str) -> dict[str, dict]:
    """Settings of a job of few steps with the small policy."""
    return dict(
        run={"dir": str(folder), "seed": 3},
        model={"path": "tiny"},
        data={"train": (source,), "eval": source, "chat_template": template, "rows_per_step": rows, "max_tokens": 512},
        eval={"rows": 10},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
    )


def small_run(folder: str) -> dict[str, dict]:
    """Settings of a run of four steps on the demo's prompts in float64, which samples by the HF engine."""
    return dict(
        run={"dir": str(folder), "steps": 4, "seed": 3},
        model={"path": "tiny", "dtype": "float64"},
        # Qwen2's norms go through float32, where shared prompts round otherwise: see test_shared_prompts.
        policy={"max_tokens_per_microbatch": 256, "share_prompts": False},
        rollout={
            "engine": "hf",
            "prompts_per_step": 8,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "max_prompt_tokens": 16,
            "assignment": "static",
            "temperature": 0.8,
        },
        eval={"every": 0},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
        data={"limit": 64},
    )


def opened(world, cfg: SupervisedConfig, build: Callable, stop_after: int = 0) -> Any:
    """Opens a job that stops as if it was killed once step `stop_after` is done; 0: never."""
    Path(cfg.run.dir).mkdir(exist_ok=True)
    return dying(build(Session(with_steps(cfg, open_mixture(cfg)), world, Timer())), stop_after)


def weights(model: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns the weights of a model, whole."""
    return {f"{prefix}{name}": p.full_tensor().detach().clone() for name, p in model.named_weights()}


def trained(run: Any, train: Callable) -> dict[str, torch.Tensor]:
    """Trains; returns the weights, and those of a reference that moves."""
    with suppress(Interrupted):
        train(run)
    run.close()
    return weights(run.policy) | (weights(run.models.reference, "reference.") if run.models.keep_reference else {})


def gradient(world, run: Any, batch: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns the gradient of a step, whole, and what it says of itself with a prefix; closes the job."""
    shared = run.objective.prepare(batch, 0)
    active = shared.active
    batch = batch if active is None else batch.select(torch.nonzero(active).flatten())
    stats = run.policy.gradient(run.policy.microbatches(batch), run.objective, shared)
    parameters = [(name, p) for name, p in run.policy.model.named_parameters() if p.grad is not None]
    found = {name: p.grad.full_tensor().detach().clone() for name, p in parameters}
    run.close()
    sums = run.report(stats.reduce(lambda x, op: world.data_peers.sum(x) if op == "sum" else x))
    return found | {f"{prefix}{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}


def second_gradient(world, run: Any) -> dict[str, torch.Tensor]:
    """Returns the weights after the first step (`weight.`), and the gradient of the second."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = float64_norm
    batch = None
    for step in (0, 1):
        batch = balance(run.rows(step), world)
        run.score(batch)
        if step == 0:
            run.policy.update(batch, run.objective)
    return weights(run.policy, "weight.") | gradient(world, run, batch, "stat.")
