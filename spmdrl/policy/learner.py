"""What an update is, whatever shards the model: shares of the batch, micro-batches, one guarded optimizer step each."""

import math
from typing import Any

import torch

from spmdrl.config.schema import Config, OptimizerConfig
from spmdrl.data.batch import Batch
from spmdrl.data.packing import microbatch_count, microbatches, units_of
from spmdrl.policy.contract import Loss, Prepare
from spmdrl.policy.heads import Second
from spmdrl.policy.optimizer import learning_rate
from spmdrl.policy.ulysses import check_same
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.mesh import World
from spmdrl.tracking.metrics import Metrics


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; names where it was seen first."""


class Learner:
    """The part of the Policy contract (`contract.py`) that backends share. They add what the last methods say."""

    def __init__(self, cfg: Config, world: World, total_updates: int, optimizer: OptimizerConfig | None):
        """total_updates: of the run, for the schedule. optimizer: None takes the policy's, `cfg.optimizer`."""
        self.cfg, self.world = cfg, world
        self.settings = optimizer or cfg.optimizer
        self.total_updates, self.updates_done, self.version = total_updates, 0, 0
        self.share = False
        """Samples of a prompt are packed together and run it once."""
        self.multiple = 1
        """Of which the number of micro-batches must be one."""
        self.master = torch.float32
        """Type of what `logprobs` gives."""

    def microbatches(self, batch: Batch) -> list[Batch]:
        """As many on every rank; some may be empty. Collective."""
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
        out = torch.zeros(2, batch.n_tokens, dtype=self.master)
        token = dict(batch.token, place=torch.arange(batch.n_tokens))
        micros = self.microbatches(Batch(batch.lengths, token, batch.seq))
        for micro, numbers in zip(micros, self.numbers(micros, temperature, second), strict=True):
            if len(micro):
                out[:, micro.token["place"]] = torch.stack(list(numbers)).to("cpu", self.master)
        return out[0], out[1]

    def values(self, batch: Batch) -> torch.Tensor:
        """See the contract."""
        return self.logprobs(batch, 1.0)[0]

    def update(self, batch: Batch, loss: Loss, prepare: Prepare, temperature: float) -> Metrics:
        """See the contract.

        Raises:
            NonFiniteError: loss or gradient norm is NaN or infinite, on every rank alike.
        """
        metrics = Metrics()
        before = self.updates_done
        for share in range(self.cfg.algo.updates_per_step):
            part = batch.select(torch.nonzero(batch.seq["update"] == share).flatten())
            shared = prepare(part, share)
            active = shared.get("active")
            micros = self.microbatches(part if active is None else part.select(torch.nonzero(active).flatten()))
            metrics.merge(self.gradient(micros, loss, shared, temperature))
            metrics.add_sum("microbatches", len(micros) / self.world.data_size)
            self._optimizer_step(metrics)
        # Without a step the engine holds these very weights already.
        self.version += self.updates_done > before
        return metrics

    def _optimizer_step(self, metrics: Metrics) -> None:
        lr = learning_rate(self.settings, self.updates_done, self.total_updates)
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm} at optimizer step {self.updates_done}; weights are unchanged. "
                "Lower --optimizer.lr, or look at the last batch in samples.jsonl"
            )
        if norm > 0:
            # A step without signal leaves weights and moments as they are.
            self.step(lr, norm)
            self.updates_done += 1
        metrics.add_sum("updates_skipped", (norm == 0) / self.world.data_size)
        self.zero_grad()
        metrics.add("grad_norm", norm)
        metrics.add("lr", lr)

    # ── what a backend adds ──────────────────────────────────────────────────

    def numbers(self, micros: list[Batch], temperature: float, second: Second) -> Any:
        """The head's two tensors [T] of each micro-batch, one after the other, without gradient. Collective."""
        raise NotImplementedError

    def gradient(self, micros: list[Batch], loss: Loss, shared: dict, temperature: float) -> Metrics:
        """Gradient of the losses' sum over micro-batches and data, and their statistics. Collective."""
        raise NotImplementedError

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradient; the same on every rank. Collective."""
        raise NotImplementedError

    def step(self, lr: float, norm: float) -> None:
        """One optimizer step, the gradient scaled down to `--optimizer.clip-grad-norm`. Collective."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget the gradient."""
        raise NotImplementedError
