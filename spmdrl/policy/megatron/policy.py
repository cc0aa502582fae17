"""Implements `Policy` on Megatron-core with tensor, pipeline, context and expert parallelism.

The loss of a micro-batch is a sum, normalised by counts over all ranks and micro-batches, and gradients are summed over
data-parallel ranks. Therefore, the result does not depend on the layout (law 2).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.engines import Part
from spmdrl.config.schema import PolicyConfig, TrainingConfig
from spmdrl.data.batch import Batch
from spmdrl.hub.folder import drop_quantization, plain_errors
from spmdrl.policy.contract import Objective, Second, Shared, Write
from spmdrl.policy.heads import divisor_of, softcap_of
from spmdrl.policy.learner import Learner
from spmdrl.policy.megatron import convert
from spmdrl.policy.megatron.families import describe
from spmdrl.policy.megatron.layout import Layout
from spmdrl.policy.megatron.model import build as build_chunks
from spmdrl.policy.megatron.model import initialize, require
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.folder import Tensors
from spmdrl.weights.reshard import Piece
from spmdrl.weights.safetensors import Stored, fill, prediction_heads, save_model, stored


def layout_of(cfg: TrainingConfig) -> Layout:
    """Return the policy's layout from the settings."""
    axes = cfg.parallel
    sizes = (axes.tp, axes.cp, axes.pp, axes.virtual_stages, axes.ep, axes.etp)
    return Layout(*sizes, axes.sequence_parallel, axes.last_stage_layers, axes.first_stage_layers)


def balancing(cfg: PolicyConfig, hf_config: Any, demanded: bool) -> tuple[float, float]:
    """Return the load-balancing loss weight and the router bias update rate (`routing.py`).

    The weight is 0 for a dense model, and the rate is 0 if routers have no biases.

    Raises:
        ValueError: `demanded` is true, but the model lacks the experts or biases that a setting requires.
    """
    have = describe(hf_config).settings
    experts, bias = have.get("num_moe_experts"), have.get("moe_router_enable_expert_bias")
    if demanded and cfg.moe_aux_loss and not experts:
        raise ValueError(f"--policy.moe-aux-loss {cfg.moe_aux_loss}: {hf_config.model_type} has no experts; use 0")
    if demanded and cfg.moe_bias_rate and not bias:
        raise ValueError(
            f"--policy.moe-bias-rate {cfg.moe_bias_rate}: routers of {hf_config.model_type} have no bias; use 0"
        )
    return cfg.moe_aux_loss if experts else 0.0, cfg.moe_bias_rate if bias else 0.0


class MegatronPolicy(Learner):
    """Implements `Policy` (`policy/contract.py`) on Megatron-core."""

    keeps_masters = True

    def build(self, trainable: bool, path: str, routing_replay: bool, adapt: bool, average: bool) -> None:
        """Implements `Learner.build`. All models in a process share Megatron's process groups.

        Raises:
            ValueError: the model is not supported, or the layout is not valid for it.
        """
        from transformers import AutoConfig

        require()
        from megatron.core import parallel_state

        from spmdrl.policy.megatron.schedule import Pipeline
        from spmdrl.policy.megatron.training import Trainer

        cfg, world, trust = self.cfg, self.world, self.cfg.model.trust_remote_code
        with plain_errors(self.folder):
            self.hf_config = AutoConfig.from_pretrained(self.folder, trust_remote_code=trust)
            drop_quantization(self.hf_config, self.folder)
        self.grid = layout_of(cfg)
        if not parallel_state.model_parallel_is_initialized():
            initialize(self.grid, world.role_group)
        own = path == cfg.model.path
        if not own and not describe(self.hf_config).settings.get("num_moe_experts"):
            # A dense critic or reward model of an MoE policy has no experts to split.
            self.grid = replace(self.grid, ep=1, etp=1)
        more: dict[str, Any] = {}
        if cfg.policy.activation_checkpointing != "none" and trainable:
            more = dict(recompute_granularity=cfg.policy.activation_checkpointing)
            if cfg.policy.activation_checkpointing == "full":
                more |= dict(recompute_method="uniform", recompute_num_layers=1)
        self.chunks = build_chunks(
            self.hf_config, None, self.grid, self.compute, world.device, self.head, self.labels, **more
        )
        own &= trainable
        self.untrained: Stored = []
        if own and self.head == "lm":
            beside = self.chunks[0].arch.beside
            self.untrained = [x for x in stored(self.folder) if beside and x[1].startswith(beside)]
            if cfg.policy.mtp == "keep":
                self.untrained += prediction_heads(self.folder, self.hf_config)
        self.aux_loss, self.bias_rate = balancing(cfg.policy, self.hf_config, own) if trainable else (0.0, 0.0)
        for chunk in self.chunks:
            chunk.train(trainable).requires_grad_(trainable)
        self.trainer: Any = None
        if trainable:
            self.trainer = Trainer(self.chunks, self.settings, self.compute, cfg.policy.host_optimizer)
        text = self.hf_config.get_text_config()
        models = self.trainer.models if self.trainer else self.chunks
        caps = softcap_of(text), divisor_of(text)
        self.pipeline = Pipeline(models, self.grid, *caps, world.device, routing_replay, self.labels)
        # The interleaved schedule runs pp micro-batches at a time, so their number must be a multiple of pp.
        self.multiple = self.grid.pp if self.grid.virtual_stages > 1 else 1
        convert.load(self.chunks, self.folder, self.blocks)
        if self.trainer:
            self.trainer.take_weights()

    # ── forward, update ──────────────────────────────────────────────────────

    def exclude(self, ids: tuple[int, ...]) -> None:
        """Implements `Policy.exclude`."""
        assert self.head == "lm"
        self.pipeline.excluded = ids

    def numbers(
        self, micros: list[Batch], temperature: float, second: Second = "entropy", function: Any = None
    ) -> list:
        """Implements `Learner.numbers`, but does not support head functions."""
        assert function is None, "checks.py refuses teachers on this backend"
        return self.pipeline.forward(micros, temperature, second)

    def gradient(self, micros: list[Batch], objective: Objective, shared: Shared) -> Metrics:
        """Implements `Learner.gradient`."""
        self.trainer.zero()
        from spmdrl.policy.megatron.routing import mean_loss, routers

        weight, mine = 0.0, sum(micro.n_tokens for micro in micros)
        for router in routers(self.chunks):
            router.forget()
        if self.aux_loss:
            tokens = torch.tensor([mine]).to(self.world.device)
            weight = self.aux_loss / int(all_reduce(tokens, "sum", self.world.data_group))
        metrics = self.pipeline.forward_backward(micros, objective, shared, weight)
        if self.aux_loss:
            metrics.add("moe/aux_loss", mean_loss(self.chunks) / max(mine, 1), mine)
        return metrics

    def gradient_norm(self) -> float:
        """Implements `Learner.gradient_norm`, in float64."""
        return self.trainer.norm()

    def step(self, lr: float, norm: float) -> None:
        """Implements `Learner.step`."""
        from spmdrl.policy.megatron.routing import move_biases

        self.trainer.step(lr, norm, self.settings.clip_grad_norm)
        if self.bias_rate:
            move_biases(self.chunks, self.bias_rate)

    # ── weights, memory, checkpoints ─────────────────────────────────────────

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Implements `Policy.pieces`."""
        return convert.pieces(self.chunks)

    def tensors_by_owner(self) -> dict[str, list[torch.Tensor | None]]:
        """Implements `Learner.tensors_by_owner`."""
        parameters: list[torch.Tensor | None] = [p for chunk in self.chunks for p in chunk.parameters()]
        return {"parameters": parameters} | (self.trainer.tensors_by_owner() if self.trainer else {})

    def saving(self, copy: bool = False) -> Write:
        """Implements `Policy.saving`; weights are saved in the compute dtype, and in the optimizer state in float32."""
        assert not copy, "checks.py refuses --checkpoint.background"

        def write(folder: Path, world: World) -> None:
            save_model(folder / "model", self.pieces(), world, self.compute, self.fixed, self.untrained, self.blocks)
            if self.trainer:
                self.trainer.save(folder / "state" / "optimizer")

        return write

    def load(self, folder: Path) -> None:
        """Implements `Policy.load`."""
        fill(self.pieces(), Tensors(folder / "model"))
        if self.trainer:
            self.trainer.take_weights()
            self.trainer.load(folder / "state" / "optimizer")
