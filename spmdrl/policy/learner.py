"""Updates a model on any backend: optimizer steps over shares of the batch, micro-batches, numerical guards."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from spmdrl.config.engines import Part
from spmdrl.config.schema import OptimizerConfig, TrainingConfig
from spmdrl.data.batch import Batch
from spmdrl.data.packing import microbatch_count, microbatches, units_of
from spmdrl.hub.build import DTYPES
from spmdrl.policy.attention.ulysses import check_same
from spmdrl.policy.contract import Head, HeadFunction, LossResult, Objective, Second, Shared, TokenLoss, Write
from spmdrl.policy.grad_guard import AnomalousStep, Guard
from spmdrl.policy.loss_scale import LossScale
from spmdrl.policy.model_files import fixed_files
from spmdrl.policy.optimizer import learning_rate
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.storage import Parked, moves, storage_bytes
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.reshard import Piece, catalogue


class SummedLoss:
    """Wraps an objective and adds up the losses of its micro-batches."""

    def __init__(self, objective: Objective, total: torch.Tensor):
        self.objective, self.total = objective, total
        self.columns, self.temperature, self.prepare = objective.columns, objective.temperature, objective.prepare
        self.second: Second = objective.second

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """See the contract."""
        result = self.objective.loss(micro, first_T, second_T, shared)
        self.total = self.total + result.loss.detach().double()
        return result

    def token_loss(self, micro: Batch, shared: Any, device: torch.device) -> TokenLoss | HeadFunction | None:
        """See the contract."""
        return self.objective.token_loss(micro, shared, device)


class Learner:
    """The part of the Policy contract (`contract.py`) that backends share. A backend implements the last methods."""

    folder: Path
    """The Hugging Face folder that the model was built from."""
    head: Head
    labels = 1
    """Numbers that a `score` head computes for a token."""
    hf_config: Any
    """The configuration (transformers) that the model was built with."""
    can_share = False
    """True if `--policy.share-prompts` has an effect; see `share`."""
    keeps_masters = False
    """True if the optimizer state holds the weights even where `model/` stores them without rounding."""

    def __init__(self, cfg: TrainingConfig, world: World, total_updates: int, optimizer: OptimizerConfig | None):
        """total_updates: optimizer steps that will be due. optimizer: None means the policy's, `cfg.optimizer`."""
        self.cfg, self.world = cfg, world
        self.settings = optimizer or cfg.optimizer
        self.total_updates, self.updates_due, self.updates_done, self.version = total_updates, 0, 0, 0
        self.share = False
        """Samples of a prompt are packed together, and the prompt runs once for all of them."""
        self.multiple = 1
        """The number of micro-batches must be a multiple of this."""
        self.stored = DTYPES[cfg.model.dtype]
        """Type of the weights in a checkpoint."""
        self.master = torch.float32
        """Type of the tensors that `logprobs` returns."""
        self.guard = Guard(self.settings.bad_steps, cfg.run.spike_factor)
        self.loss_scale = LossScale() if self.stored == torch.float16 else None
        """Scale of the loss in `gradient`, whose result is divided by it."""
        self.away: list[Parked] = []
        self.parameters_away = False

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Split a batch into micro-batches, the same number on every rank; some may be empty. Collective."""
        check_same(batch, self.world.sp_group, self.world.device)
        budget = self.cfg.policy.max_tokens_per_microbatch
        units = units_of(batch, budget, self.share)
        count = torch.tensor([microbatch_count(torch.tensor([u.tokens for u in units]), budget)])
        count = int(all_reduce(count.to(self.world.device), "max", self.world.data_group))
        return microbatches(batch, -(-count // self.multiple) * self.multiple, budget, units)

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the contract."""
        shape = (batch.n_tokens,) if self.labels == 1 else (batch.n_tokens, self.labels)
        out = torch.zeros(2, *shape, dtype=self.master)
        token = dict(batch.token, place=torch.arange(batch.n_tokens))
        micros = self.microbatches(Batch(batch.lengths, token, batch.seq))
        for micro, numbers in zip(micros, self.numbers(micros, temperature, second), strict=True):
            if len(micro):
                out[:, micro.token["place"]] = torch.stack(list(numbers)).to("cpu", self.master)
        return out[0], out[1]

    @torch.no_grad()
    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """See the contract."""
        token = dict(batch.token, place=torch.arange(batch.n_tokens))
        micros, out = self.microbatches(Batch(batch.lengths, token, batch.seq)), []
        for micro, numbers in zip(micros, self.head_outputs(micros, temperature, function), strict=True):
            out = out or [torch.zeros(batch.n_tokens, *x.shape[1:], dtype=x.dtype) for x in numbers]
            for into, x in zip(out, numbers if len(micro) else (), strict=len(micro) > 0):
                into[micro.token["place"]] = x.cpu()
        return tuple(out)

    def values(self, batch: Batch) -> torch.Tensor:
        """See the contract."""
        return self.logprobs(batch, 1.0)[0]

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """See the contract.

        A step whose loss or gradient is not finite is skipped and counted (`updates_nonfinite`); only its loss,
        grad_norm and lr are logged, the first two unchanged. In float16 an infinite gradient that a lower loss scale
        may cure is skipped and counted separately (`updates_overflowed`), and the scale is lowered.

        Raises:
            NonFiniteError: on every rank, after `--optimizer.bad-steps` such steps in a row.
        """
        assert not (lacking := objective.columns - batch.columns), f"the batch lacks {sorted(lacking)}"
        metrics, before = Metrics(), self.updates_done
        for index in range(steps):
            share = batch.select(torch.nonzero(batch.seq["update"] == index).flatten())
            shared = objective.prepare(share, index)
            active = shared.active
            micros = self.microbatches(share if active is None else share.select(torch.nonzero(active).flatten()))
            summed = SummedLoss(objective, torch.zeros((), dtype=torch.float64, device=self.world.device))
            stats = self.gradient(micros, summed, shared)
            finite = self._optimizer_step(metrics, share, index, summed.total, shared.on_policy)
            if finite:
                # Each step's loss is a sum over its tokens; the mean over steps is logged.
                stats.scale_sum("loss", 1 / steps)
                metrics.merge(stats)
            else:
                metrics.add_sum("loss", math.nan)
            metrics.add_sum("microbatches", len(micros) / self.world.data_size)
        # Without a step the engine already holds exactly these weights.
        self.version += self.updates_done > before
        return metrics

    def _optimizer_step(self, metrics: Metrics, share: Batch, index: int, loss: torch.Tensor, on_policy: bool) -> bool:
        """Take one guarded optimizer step; return False if it was skipped. loss: the loss of this rank's sequences."""
        lr = learning_rate(self.settings, self.updates_due, self.total_updates)
        norm = self.gradient_norm()
        bad = torch.tensor([not math.isfinite(loss.item())], dtype=torch.int32)
        bad = bool(all_reduce(bad, "max", self.world.training_group))
        median = self.guard.median
        step = AnomalousStep(share, index, self.updates_done, self.version, norm, not bad, median, on_policy)
        overflowed = self._overflows(norm) if not bad else False
        finite = overflowed or self.guard.passes(step)
        if finite and not overflowed and norm > 0:
            # A step with a zero gradient leaves weights and moments unchanged.
            self.step(lr, norm)
            self.updates_done += 1
        self.updates_due += 1
        metrics.add_sum("updates_skipped", (finite and norm == 0) / self.world.data_size)
        metrics.add_sum("updates_nonfinite", (not finite) / self.world.data_size)
        self.zero_grad()
        if self.loss_scale is not None:
            metrics.add_sum("updates_overflowed", overflowed / self.world.data_size)
            metrics.add("loss_scale", self.loss_scale.scale)
        metrics.add("grad_norm", norm)
        metrics.add("lr", lr)
        return finite

    def _overflows(self, norm: float) -> bool:
        """Adapt the loss scale to a step's gradient; return True if a lower scale may help, so the step is skipped."""
        if self.loss_scale is None:
            return False
        overflowed = not math.isfinite(norm) and self.loss_scale.can_shrink
        self.loss_scale.adapt(math.isfinite(norm))
        return overflowed

    # ── memory ───────────────────────────────────────────────────────────────

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract. On a CPU the device is the host."""
        return {kind: storage_bytes(tensors, self.world.device.type) for kind, tensors in self.held().items()}

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """See the contract. On a CPU `host` moves nothing."""
        if not moves(place, self.world.device):
            return
        self.reshard()
        for kind, leaving in self.held().items():
            if parameters or kind != "parameters":
                parked = Parked(leaving, "gone" if kind == "gradients" else place, self.world.device)
                if parked.bytes:
                    self.away.append(parked)
                    self.parameters_away |= kind == "parameters"

    def onload(self) -> None:
        """See the contract."""
        while self.away:
            self.away[-1].bring_back()
            self.away.pop()
        self.parameters_away = False

    # ── checkpoints ──────────────────────────────────────────────────────────

    @cached_property
    def fixed(self) -> dict[str, bytes]:
        """See the contract."""
        if not self.world.is_first:
            return {}
        return fixed_files(self.folder, self.hf_config, DTYPES[self.cfg.model.dtype], self.cfg, self.head)

    def saving(self, copy: bool = False) -> Write:
        """See the contract. The default makes no copy; a backend that can overrides this."""
        assert not copy, "checks.py refuses --checkpoint.background"
        return lambda folder, world: self.save(folder)

    def checkpoint_bytes(self) -> int:
        """See the contract: all weights; for trained ones two moments too, and masters if kept separately."""
        trains = self.total_updates > 0
        adapted = trains and self.cfg.lora.rank > 0 and getattr(self, "adapters", None) is not None
        parts: list[Part] = ["base", "adapter"] if adapted else ["base"]
        sizes = [
            sum(math.prod(entry.shape) for entry in catalogue(self.pieces(part), self.world.role_group))
            for part in parts
        ]
        dtype = self.stored
        masters = sizes[-1] * (adapted or (trains and (dtype != self.master or self.keeps_masters)))
        return sizes[0] * dtype.itemsize + (masters + 2 * trains * sizes[-1]) * self.master.itemsize

    # ── methods of a backend ─────────────────────────────────────────────────

    def pieces(self, part: Part = "model") -> list[Piece]:
        """See the contract."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """See the contract."""
        raise NotImplementedError

    def held(self) -> dict[str, list[torch.Tensor | None]]:
        """Return this rank's tensors by owner: parameters, gradients, optimizer."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Drop parameters that a forward gathered; does nothing in a backend that gathers none."""

    def numbers(self, micros: list[Batch], temperature: float, second: Second) -> Any:
        """Yield the head's two tensors [T] for each micro-batch in turn, without gradient. Collective."""
        raise NotImplementedError

    def head_outputs(self, micros: list[Batch], temperature: float, function: HeadFunction) -> Any:
        """Yield the numbers [T, ...] of a head function for each micro-batch in turn, without gradient. Collective."""
        raise NotImplementedError

    def gradient(self, micros: list[Batch], objective: Objective, shared: Shared) -> Metrics:
        """Sum the gradient over micro-batches and data positions; return the losses' statistics. Collective."""
        raise NotImplementedError

    def gradient_norm(self) -> float:
        """Return the global 2-norm of the gradient, the same on every rank. Collective."""
        raise NotImplementedError

    def step(self, lr: float, norm: float) -> None:
        """Take one optimizer step with the gradient scaled down to `--optimizer.clip-grad-norm`. Collective."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop the gradient."""
        raise NotImplementedError
