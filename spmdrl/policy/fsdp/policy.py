"""Trains and runs any HF transformer under FSDP2 or HSDP, with packed sequences and float32 master weights.

With this backend, all models of a run use this class: policy, reference model, critic, reward model. They only differ
in their head and in whether they are trained.

The loss of a micro-batch is a sum, normalised by counts over all ranks and micro-batches, and gradients are summed (not
averaged) over ranks. So the result does not depend on packing or on the number of ranks (law 2).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from spmdrl.config.engines import Part
from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import COLUMN
from spmdrl.health.status import tick
from spmdrl.hub.build import empty_model
from spmdrl.hub.encode import vision_of
from spmdrl.hub.lora import attach, is_adapter, plain_name
from spmdrl.hub.routing import Routers
from spmdrl.policy.attention import packed
from spmdrl.policy.attention.packed import own_attention, use_attention
from spmdrl.policy.attention.ulysses import check_model
from spmdrl.policy.contract import SCORES, HeadFunction, Objective, OutputHead, Second, Shared, TokenLoss, Write
from spmdrl.policy.forward_plan import ForwardPlan, check_ids, for_losses, kept_plan
from spmdrl.policy.fsdp import lora
from spmdrl.policy.fsdp.checkpoint import load, saving
from spmdrl.policy.fsdp.layers import compile_layers, recompute, use_liger
from spmdrl.policy.fsdp.sharding import fill_model, sharded
from spmdrl.policy.grad_guard import scaled
from spmdrl.policy.heads import Form, stand_in
from spmdrl.policy.learner import Learner
from spmdrl.policy.optimizer import make_optimizer
from spmdrl.policy.vision import Passes, frozen_names, passes
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.exchange import all_reduce
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.experts import Layout
from spmdrl.weights.reshard import Piece
from spmdrl.weights.safetensors import prediction_heads
from spmdrl.weights.shards import local, pieces_of
from spmdrl_kernels.host import use_host_linear


class FsdpPolicy(Learner):
    """Implements `Policy` (`policy/contract.py`) on FSDP2."""

    can_share = True

    def build(self, trainable: bool, path: str, routing_replay: bool, adapt: bool, average: bool) -> None:
        """Implements `Learner.build`; the model is sharded before its weights are allocated."""
        cfg, head = self.cfg, self.head
        check_model(self.folder, cfg.model.trust_remote_code, self.world.sp_size)
        if average:
            # Each step only changes the average slightly. In 16-bit dtypes, rounding could undo the change, so the
            # average is stored in the master dtype, in checkpoints too.
            self.stored = self.master
        hf = self._hf_model(path, self.master if trainable and not adapt else self.stored, trainable)
        self.routers = Routers(hf) if routing_replay else None
        # The PEFT adapter configs, or None if there are no adapters.
        self.adapters: Any = attach(hf, cfg.lora, cfg.run.seed, self.master) if adapt else None
        use_host_linear(hf)
        if cfg.policy.activation_checkpointing != "none" and trainable:
            recompute(hf)
        self.share = cfg.policy.share_prompts and head not in SCORES
        self.vision = vision_of(hf)
        frozen = {f"hf.{n}" for n in frozen_names(hf, self.vision, cfg.model.freeze if trainable else (), path)}
        trained = is_adapter if adapt and trainable else (lambda name: trainable and name not in frozen)
        # Typed as Any, because fully_shard adds methods and replaces parameters with DTensors.
        self.model: Any
        self.model, self.gather = sharded(hf, cfg, self.world, head, self.compute, self.share, trained)
        if hf.config.get_text_config()._attn_implementation != packed.NAME:
            self.run_as("apart")
        fill_model(self.model, self.folder, self.world.device, self.new_head, cfg.run.seed, self.blocks)
        self.frozen_numbers = sum(p.numel() for name, p in self.model.named_parameters() if name in frozen)
        # FSDP does not shard persistent buffers such as routing biases: every rank has the full buffer.
        persistent = self.model.hf.state_dict().keys()
        self.buffers: list[tuple[str, Any]] = [(n, b) for n, b in self.model.hf.named_buffers() if n in persistent]
        self.optimizer: Any = make_optimizer(self.model.parameters(), self.settings) if trainable else None
        # Keep references to the sharded parameters, because the model holds plain tensors while its root is gathered.
        self.shards: list[Any] = list(self.model.parameters())
        self.gathering: list[Any] = [module for module in self.model.modules() if hasattr(module, "reshard")]

    def _hf_model(self, path: str, dtype: torch.dtype, trainable: bool) -> Any:
        cfg, head = self.cfg, self.head
        hf = empty_model(self.folder, dtype, cfg.model.trust_remote_code, packed.register(), head, self.labels)
        if head == "lm" and getattr(hf.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(f"{path}: an output head with a bias is not supported")
        keep = cfg.policy.mtp == "keep" and trainable and head == "lm" and path == cfg.model.path
        self.untrained = prediction_heads(self.folder, hf.config) if keep else None
        compiles = cfg.policy.compile_layers
        # The compiler already fuses what Liger's kernels fuse.
        use_liger(hf, "off" if compiles else cfg.policy.liger, self.world.device, self.compute)
        if compiles and self.world.device.type != "meta":
            compile_layers(hf)
        # A reward model can be initialised from a language model, whose folder has no score head. The folder of a
        # classifier must include the head.
        ends = "ForCausalLM", "ForConditionalGeneration"
        generates = any(name.endswith(ends) for name in hf.config.architectures or [])
        self.new_head = head == "value" or (head in SCORES and trainable and generates)
        self.layout, self.hf_config = Layout(hf), hf.config
        return hf

    # ── forward ──────────────────────────────────────────────────────────────

    @property
    def form(self) -> Form:
        """The `heads.Form` in which micro-batches are run."""
        return self.model.form

    def run_as(self, form: Form, attention: str = "") -> None:
        """Set the form in which micro-batches are run, starting with the next forward pass.

        attention: transformers' attention implementation for the form `apart`; empty for `own_attention`.
        """
        self.model.form, self.share = form, form == "tree"
        apart = attention or own_attention(self.model.hf)
        use_attention(self.model.hf, apart if form == "apart" else packed.NAME)

    def plan(self, batch: Batch) -> ForwardPlan:
        """Return the forward plan of a micro-batch, reusing the plan of an earlier pass if there is one.

        Raises:
            ValueError: the batch has token ids outside of the model's vocabulary.
        """
        tokens_T, mask_T, model = batch.token["tokens"], batch.token["mask"], self.model
        check_ids(tokens_T, model.vocabulary)
        routers = self.routers if "experts" in batch.token else None

        def make() -> ForwardPlan:
            experts = batch.token["experts"].unflatten(1, (-1, routers.experts.top_k)) if routers else None
            begins = batch.begins if self.share and batch.branches else None
            seen = batch.images, batch.token.get(COLUMN)
            return model.plan(tokens_T, batch.lengths, mask_T, begins, experts, None, *seen)

        return kept_plan(batch, (model.form, model.before, routers is None, model.shares(batch.lengths)), make)

    def _passes(self, micros: list[Batch]) -> list[Passes]:
        apart, sees = self.form == "apart", any(micro.images is not None for micro in micros)
        return passes(micros, apart, sees, self.world.data_group, self.world.device)

    def _forward(
        self,
        batch: Batch,
        ran: Passes,
        temperature: float,
        second: Second = "entropy",
        token_loss: TokenLoss | HeadFunction | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the head's tensors. Ranks without sequences run a dummy batch, because other ranks need their shards.

        ran: the element of `passes` for this micro-batch.
        """
        assert not self.away, "offloaded: memory.training_phase brings it back"
        tick()
        real = len(batch) > 0
        more: dict[str, Any] = {} if token_loss is None else {"token_loss": token_loss}
        if any(ran):
            more["forwards"], more["looks"] = ran
        if real and "noise" in batch.token:
            more["noise"] = to_device((batch.token["noise"], batch.token["noise_scale"]), self.world.device)
        # Run real and dummy batches on the same line, because the lockstep recorder compares line numbers across ranks.
        found = self.model(self.plan(batch if real else stand_in()), temperature, second, **more)
        # The products are empty, but they keep the dummy batch in the graph, so that FSDP's backward runs.
        return found if real else tuple(x.sum() * x.new_zeros(0, *x.shape[1:]) for x in found)

    def numbers(
        self, micros: list[Batch], temperature: float, second: Second = "entropy", function: HeadFunction | None = None
    ) -> Iterator[tuple]:
        """Implements `Learner.numbers`; gathered weights are freed at the end."""
        try:
            for micro, ran in zip(micros, self._passes(micros), strict=True):
                yield self._forward(micro, ran, temperature, second, function)
        finally:
            self.reshard()

    def output_head(self) -> OutputHead:
        """Implements `Policy.output_head`."""
        assert not self.parameters_away, "offloaded: memory.training_phase brings it back"
        self.reshard()
        weight: Any = self.model.hf.get_output_embeddings().weight
        return self.model.output_head(weight.full_tensor().detach().to(self.compute))

    def exclude(self, ids: tuple[int, ...]) -> None:
        """Implements `Policy.exclude`."""
        assert self.head == "lm"
        self.model.excluded = ids

    # ── update ───────────────────────────────────────────────────────────────

    def gradient(self, micros: list[Batch], objective: Objective, shared: Shared) -> Metrics:
        """Implements `Learner.gradient`; `reduce_gradients` in the settings controls when gradients are reduced.

        Across HSDP replicas, gradients are only reduced after the last micro-batch.
        """
        metrics, each = Metrics(), self.cfg.policy.reduce_gradients == "each"
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        for i, (micro, ran) in enumerate(zip(micros, self._passes(micros), strict=True)):
            last = i == len(micros) - 1
            self.model.set_requires_gradient_sync(each or last)
            self.model.set_requires_all_reduce(last)
            self.model.set_is_last_backward(each or last)
            # Weights outside of the layers are always kept until the last backward.
            self.model.set_reshard_after_backward(last, recurse=self.gather != "layers")
            placed = for_losses(micro, self.world.device)
            token_loss = scaled(objective.token_loss(placed, shared) if len(micro) else None, scale)
            run = ran, objective.temperature, objective.second, token_loss
            first_T, second_T, *chunked = self._forward(micro, *run)
            # A chunked loss already has its gradient; the loss is only computed again for the statistics.
            with torch.set_grad_enabled(not chunked):
                result = objective.loss(placed, first_T, second_T, shared)
            (chunked[0] if chunked else result.loss * scale).backward()
            metrics.merge(result.stats)
        if scale != 1 and (gradients := self.gradients()):
            # This cannot underflow, because gradients have the dtype of the master weights.
            torch._foreach_mul_(gradients, 1 / scale)
        return metrics

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's non-empty gradient shards, in parameter order."""
        shards = [local(p.grad) for p in self.shards if p.grad is not None]
        return [shard for shard in shards if shard.numel()]

    def gradient_norm(self) -> float:
        """Implements `Learner.gradient_norm`, in float64."""
        total, gradients = torch.zeros((), dtype=torch.float64, device=self.world.device), self.gradients()
        if gradients:
            squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square()
            # On CPU, `cumsum` adds in parameter order, while `sum` may use another order. There is no deterministic
            # `cumsum` on GPU.
            total = squares.cumsum(0)[-1] if squares.is_cpu else squares.sum()
        return math.sqrt(all_reduce(total, "sum", self.world.shard_group).item())

    def step(self, lr: float, norm: float) -> None:
        """Implements `Learner.step`."""
        largest = self.settings.clip_grad_norm
        if largest and norm > largest and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, largest / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Implements `Learner.zero_grad`."""
        self.optimizer.zero_grad(set_to_none=True)

    # ── weights, memory, checkpoints ─────────────────────────────────────────

    def named_weights(self) -> list[tuple[str, DTensor]]:
        """Return (HF name, shard) for every parameter. Tied weights appear once, and adapters have PEFT names."""
        assert not self.parameters_away, "offloaded: memory.training_phase brings it back"
        self.reshard()
        return [(plain_name(name.removeprefix("hf.")), p) for name, p in self.model.named_parameters()]

    def parts(self) -> tuple[list[tuple[str, DTensor]], list[tuple[str, DTensor]]]:
        """Split `named_weights` into base weights and adapters."""
        named = self.named_weights()
        return [x for x in named if not is_adapter(x[0])], [x for x in named if is_adapter(x[0])]

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Implements `Policy.pieces`."""
        base, adapters = self.parts()
        buffers = pieces_of(self.buffers, self.layout, exact=True)
        scale = self.adapters.lora_alpha / self.adapters.r if self.adapters else 1.0
        if part == "adapter":
            return lora.adapter_pieces(adapters, scale, self.layout)
        if part == "base" or not adapters:
            return pieces_of(base, self.layout) + buffers
        return lora.merged_pieces(base, adapters, scale, self.layout, self.world) + buffers

    def tensors_by_owner(self) -> dict[str, list[torch.Tensor | None]]:
        """Implements `Learner.tensors_by_owner`."""
        states = self.optimizer.state.values() if self.optimizer else []
        return {
            "parameters": list(self.shards),
            "gradients": [p.grad for p in self.shards],
            "optimizer": [x for state in states for x in state.values() if torch.is_tensor(x)],
        }

    def reshard(self) -> None:
        """Implements `Learner.reshard`: FSDP can leave modules unsharded after a forward pass without backward."""
        for module in self.gathering:
            module.reshard()

    def saving(self, copy: bool = False) -> Write:
        """Implements `Policy.saving`."""
        return saving(self, copy)

    def load(self, folder: Path) -> None:
        """Implements `Policy.load`."""
        load(self, folder)
