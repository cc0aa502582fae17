"""Implements the training step of all backends, which splits batches into micro-batches and skips non-finite steps."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from spmdrl.config.engines import Part
from spmdrl.config.schema import OptimizerConfig, TrainingConfig
from spmdrl.data.batch import Batch
from spmdrl.data.microbatch import microbatch_count, microbatches, units_of
from spmdrl.hub.build import DTYPES
from spmdrl.hub.folder import fp8_blocks
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import Vision
from spmdrl.policy.attention.ulysses import check_same
from spmdrl.policy.contract import Head, HeadFunction, Objective, Second, Shared, Write
from spmdrl.policy.grad_guard import AnomalousStep, Guard, LossScale, SummedLoss
from spmdrl.policy.model_files import fixed_files
from spmdrl.policy.optimizer import learning_rate
from spmdrl.policy.vision import check_images
from spmdrl.spmd.copies import on_host
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.storage import Parked, moves, storage_bytes
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.reshard import Piece, catalogue
from spmdrl_kernels import raise_deferred


class Learner:
    """Base class for `Policy` (`contract.py`) backends, which implement the methods at the end of this class."""

    hf_config: Any
    """The transformers config that the model was built from."""
    can_share = False
    """True if the backend can compute a prompt once for all its samples (`--policy.share-prompts`)."""
    vision: Vision | None = None
    """Facts of a model that reads images."""
    frozen_numbers = 0
    """Number of parameters of a trained model that `--model.freeze` freezes; they have no optimizer state."""
    keeps_masters = False
    """True if saved optimizer state always includes the master weights, even if `model/` stores them unrounded."""

    def __init__(
        self,
        cfg: TrainingConfig,
        world: World,
        total_updates: int,
        trainable: bool = True,
        path: str = "",
        head: Head = "lm",
        optimizer: OptimizerConfig | None = None,
        routing_replay: bool = False,
        adapt: bool = False,
        labels: int = 1,
        average: bool = False,
    ):
        """Build one model. Collective.

        Args:
            cfg: the run's settings.
            world: the ranks of the run and their device mesh.
            total_updates: total number of optimizer steps in the run, for the learning rate schedule.
            trainable: False for a frozen model, which is stored in the compute dtype and has no optimizer.
            path: path of the model, in any form that `--model.path` accepts; empty to use `--model.path`.
            head: a `contract.Head`; a `value` head that is missing from the folder is initialised to 0.
            optimizer: optimizer settings; None to use the policy's, `cfg.optimizer`.
            routing_replay: route tokens to the experts in `token["experts"]` (`hub/routing.py`).
            adapt: train only LoRA adapters (`fsdp/lora.py`) if the rank in `cfg.lora` is not 0.
            labels: number of outputs per token of a `score` or `steps` head.
            average: True for a frozen model that tracks a moving average of the policy's weights; FSDP stores it in the
                dtype of the master weights.

        Raises:
            ValueError: the backend does not support the model; the message names the path or the flag.
        """
        self.cfg, self.world, self.labels = cfg, world, labels
        self.head: Head = head
        self.settings = optimizer or cfg.optimizer
        self.total_updates, self.updates_due, self.updates_done, self.version = total_updates, 0, 0, 0
        self.folder = resolve(path or cfg.model.path, cfg.model.trust_remote_code)
        self.blocks = fp8_blocks(self.folder)
        self.share = False
        """True if the samples of a prompt are packed together and the prompt is computed once for all of them."""
        self.multiple = 1
        """The number of micro-batches must be a multiple of this number."""
        self.compute = self.stored = DTYPES[cfg.model.dtype]
        """The dtypes of the forward pass and of the weights in a checkpoint."""
        self.master = torch.float64 if self.compute == torch.float64 else torch.float32
        """The dtype of master weights, gradients, optimizer moments, and the tensors that `logprobs` returns."""
        self.guard = Guard(self.settings.bad_steps, cfg.run.spike_factor)
        self.loss_scale = LossScale() if self.compute == torch.float16 else None
        """Loss scaler: the loss is multiplied by the scale before backward, and the gradient is divided by it
        (`gradient`). None unless the forward pass runs in float16."""
        self.away: list[Parked] = []
        self.parameters_away = False
        self.build(trainable, path or cfg.model.path, routing_replay, adapt and cfg.lora.rank > 0, average)

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Split a batch into the same number of micro-batches on every rank; some can be empty. Collective."""
        check_same(batch, self.world.sp_group, self.world.device)
        check_images(batch, self.vision)
        budget = self.cfg.policy.max_tokens_per_microbatch
        units = units_of(batch, budget, self.share)
        count = self.world.data_peers.most(microbatch_count(torch.tensor([u.tokens for u in units]), budget))
        return microbatches(batch, -(-count // self.multiple) * self.multiple, budget, units)

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements `Policy.logprobs`."""
        shape = (batch.n_tokens,) if self.labels == 1 else (batch.n_tokens, self.labels)
        found = self.read(batch, temperature, second=second) or (torch.zeros(shape), torch.zeros(shape))
        return found[0].to(self.master), found[1].to(self.master)

    @torch.no_grad()
    def read(
        self, batch: Batch, temperature: float, function: HeadFunction | None = None, second: Second = "entropy"
    ) -> tuple[torch.Tensor, ...]:
        """Implements `Policy.read`; without a function, return the two outputs of the head."""
        micros = self.microbatches(batch.like(place=torch.arange(batch.n_tokens)))
        out: list[torch.Tensor] = []
        for micro, numbers in zip(micros, on_host(self.numbers(micros, temperature, second, function)), strict=True):
            out = out or [torch.zeros(batch.n_tokens, *x.shape[1:], dtype=x.dtype) for x in numbers]
            for into, x in zip(out, numbers if len(micro) else (), strict=len(micro) > 0):
                into[micro.token["place"]] = x
        raise_deferred()
        return tuple(out)

    def values(self, batch: Batch) -> torch.Tensor:
        """Implements `Policy.values`."""
        return self.logprobs(batch, 1.0)[0]

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Implements `Policy.update`; steps whose loss or gradient is not finite are skipped.

        Non-finite steps are counted in the metric `updates_nonfinite` and excluded from the objective's statistics, and
        the logged loss is nan. In float16, a loss scale that is too large can make the gradient infinite or nan. As
        long as the scale can still be halved, a step with such a gradient is skipped and counted in
        `updates_overflowed` instead, and the scale is halved.

        Raises:
            NonFiniteError: on every rank, after `--optimizer.bad-steps` non-finite steps in a row.
        """
        assert not (lacking := objective.columns - batch.columns), f"the batch lacks {sorted(lacking)}"
        metrics, before = Metrics(), self.updates_done
        for index in range(steps):
            share = batch.kept(batch.seq["update"] == index)
            shared = objective.prepare(share, index)
            runs = share if shared.active is None else share.kept(shared.active)
            micros = self.microbatches(runs)
            summed: Any = SummedLoss(objective, torch.zeros((), dtype=torch.float64, device=self.world.device))
            stats = self.gradient(micros, summed, shared)
            finite = self._optimizer_step(metrics, share, index, summed.total, shared.on_policy)
            if finite:
                # Micro-batch losses add up to the loss of a step; the logged loss is the mean over steps.
                stats.scale_sum("loss", 1 / steps)
                metrics.merge(stats)
            else:
                metrics.add_sum("loss", math.nan)
            metrics.add_sum("microbatches", len(micros) / self.world.data_size)
        # If no step was taken, the engine already has these weights, so the version stays the same.
        self.version += self.updates_done > before
        return metrics

    def _optimizer_step(self, metrics: Metrics, share: Batch, index: int, loss: torch.Tensor, on_policy: bool) -> bool:
        """Take or skip an optimizer step; return False if the loss or the gradient is not finite.

        If a smaller loss scale might make the gradient finite, return True anyway (`update`). loss: total loss of this
        rank's sequences.
        """
        lr = learning_rate(self.settings, self.updates_due, self.total_updates)
        norm = self.gradient_norm()
        raise_deferred()
        bad = torch.tensor([not math.isfinite(loss.item())], dtype=torch.int32)
        bad = bool(all_reduce(bad, "max", self.world.training_group))
        facts = self.updates_done, self.version, norm, not bad, self.guard.median, on_policy
        overflowed, scale = False, self.loss_scale
        if scale is not None and not bad:
            # If the loss scale can still shrink, it may be the reason why the gradient overflowed.
            overflowed = not math.isfinite(norm) and scale.can_shrink
            scale.adapt(math.isfinite(norm))
        finite = overflowed or self.guard.passes(AnomalousStep(share, index, *facts))
        if finite and not overflowed and norm > 0:
            # Skip steps with an exactly zero gradient, so that weights and moments stay unchanged.
            self.step(lr, norm)
            self.updates_done += 1
        self.updates_due += 1
        metrics.add_sum("updates_skipped", (finite and norm == 0) / self.world.data_size)
        metrics.add_sum("updates_nonfinite", (not finite) / self.world.data_size)
        self.zero_grad()
        if scale is not None:
            metrics.add_sum("updates_overflowed", overflowed / self.world.data_size)
            metrics.add("loss_scale", scale.scale)
        metrics.add("grad_norm", norm)
        metrics.add("lr", lr)
        return finite

    # ── memory ───────────────────────────────────────────────────────────────

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Policy.bytes_by_owner`."""
        device = self.world.device.type
        return {owner: storage_bytes(tensors, device) for owner, tensors in self.tensors_by_owner().items()}

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Implements `Policy.offload`; offloading to `host` is a no-op on CPU."""
        if not moves(place, self.world.device):
            return
        self.reshard()
        for owner, leaving in self.tensors_by_owner().items():
            if parameters or owner != "parameters":
                parked = Parked(leaving, "gone" if owner == "gradients" else place, self.world.device)
                if parked.bytes:
                    self.away.append(parked)
                    self.parameters_away |= owner == "parameters"

    def onload(self) -> None:
        """Implements `Policy.onload`."""
        while self.away:
            self.away[-1].bring_back()
            self.away.pop()
        self.parameters_away = False

    # ── checkpoints ──────────────────────────────────────────────────────────

    @cached_property
    def fixed(self) -> dict[str, bytes]:
        """Implements `Policy.fixed`."""
        parts = self.folder, self.hf_config, self.compute, self.cfg, self.head
        return fixed_files(*parts) if self.world.is_first else {}

    def save(self, folder: Path) -> None:
        """Implements `Policy.save`."""
        self.saving()(folder, self.world)

    @torch.no_grad()
    def take_over(self, other: Any, share: float = 1.0) -> None:
        """Implements `Policy.take_over`."""
        for mine, theirs in zip(self.pieces(), other.pieces(), strict=True):
            if (mine.name, mine.shape, mine.box) != (theirs.name, theirs.shape, theirs.box):
                raise ValueError(
                    f"{mine.name} {mine.shape} cannot be averaged with {theirs.name} {theirs.shape}: "
                    "--reference.refresh-every needs a reference of the policy's architecture"
                )
            own, source = mine.tensor, theirs.tensor
            mixed = (1 - share) * own + share * source if share != 1 and own.is_floating_point() else source
            # Due to rounding, the average of two equal numbers can differ from them, which must not change a buffer.
            own.copy_(torch.where(own == source, own, mixed) if mine.exact else mixed)

    def checkpoint_bytes(self) -> int:
        """Implements `Policy.checkpoint_bytes`: counts weights, optimizer moments and saved master weights."""
        trains = self.total_updates > 0
        adapted = trains and self.cfg.lora.rank > 0 and getattr(self, "adapters", None) is not None
        parts: list[Part] = ["base", "adapter"] if adapted else ["base"]
        entries = [catalogue(self.pieces(part), self.world.role_group) for part in parts]
        sizes = [sum(math.prod(entry.shape) for entry in each) for each in entries]
        masters = sizes[-1] * (adapted or (trains and (self.stored != self.master or self.keeps_masters)))
        moments = 2 * trains * (sizes[-1] - self.frozen_numbers)
        return sizes[0] * self.stored.itemsize + (masters + moments) * self.master.itemsize

    # ── methods of a backend ─────────────────────────────────────────────────

    def build(self, trainable: bool, path: str, routing_replay: bool, adapt: bool, average: bool) -> None:
        """Build the model, load its weights and create the optimizer. Arguments are as in `__init__`; path is set."""
        raise NotImplementedError

    def pieces(self, part: Part = "model") -> list[Piece]:
        """See `Policy.pieces`."""
        raise NotImplementedError

    def saving(self, copy: bool = False) -> Write:
        """See `Policy.saving`."""
        raise NotImplementedError

    def tensors_by_owner(self) -> dict[str, list[torch.Tensor | None]]:
        """Return this rank's tensors by owner: parameters, gradients, optimizer."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Free parameters that a forward pass all-gathered; a no-op in backends that gather none."""

    def numbers(
        self, micros: list[Batch], temperature: float, second: Second = "entropy", function: HeadFunction | None = None
    ) -> Any:
        """Yield the head's two tensors [T] or `function`'s results per micro-batch, without gradient. Collective."""
        raise NotImplementedError

    def gradient(self, micros: list[Batch], objective: Objective, shared: Shared) -> Metrics:
        """Compute gradients, summed over micro-batches and data-parallel ranks, and return statistics. Collective."""
        raise NotImplementedError

    def gradient_norm(self) -> float:
        """Return the global 2-norm of the gradients, which is the same on every rank. Collective."""
        raise NotImplementedError

    def step(self, lr: float, norm: float) -> None:
        """Clip the gradients as configured, given their norm `norm`, and take an optimizer step. Collective."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Free the gradients; a no-op in backends whose `gradient` starts by zeroing them."""
