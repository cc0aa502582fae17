"""Trains a Megatron policy: accumulates gradients in DDP buffers and steps the distributed optimizer."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config.schema import OptimizerConfig
from spmdrl.policy.megatron import ranks, repairs
from spmdrl.policy.megatron.host_adamw import HostAdamW
from spmdrl.policy.optimizer import fill_state, restore_settings, settings_of
from spmdrl.policy.safe_pickle import vet

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True}
"""Options that make Megatron gather optimizer state in host memory and save it so that any layout can load it."""


class Trainer:
    """Gradient buffers of a model, reduced over data-parallel ranks, and its AdamW, sharded over the same ranks."""

    def __init__(self, models: list[Any], cfg: OptimizerConfig, dtype: torch.dtype, host_optimizer: bool = False):
        """models: the result of `model.build`. dtype: dtype of the forward pass. host_optimizer: use `HostAdamW`."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed import finalize_model_grads as finalize
        from megatron.core.optimizer import OptimizerConfig as Settings
        from megatron.core.optimizer import get_megatron_optimizer

        config = models[0].config
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        with repairs.quiet():
            self.models: list[Any] = [
                DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)
            ]
            for buffer in self._buffers():
                # A buffer can have several buckets, because a tied embedding has its own bucket. Megatron reads the
                # state of buckets at offsets that include padding, but omits the padding when it concatenates buckets.
                # So count padding as data.
                buffer.numel_unpadded = buffer.numel
                for bucket in buffer.buckets:
                    bucket.numel_unpadded = bucket.grad_data.numel()
            settings = Settings(
                optimizer="adam",
                lr=cfg.lr,
                min_lr=0.0,
                weight_decay=cfg.weight_decay,
                adam_beta1=cfg.betas[0],
                adam_beta2=cfg.betas[1],
                adam_eps=cfg.eps,
                clip_grad=0.0,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                optimizer_cpu_offload=host_optimizer,
            )
            if host_optimizer:
                # Without these options, the device would also store the float32 weights. Set them after construction,
                # because the constructor would check the version of TransformerEngine, which may not be installed.
                settings.use_precision_aware_optimizer = True
                settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            with repairs.OneCopy():
                self.optimizer: Any = get_megatron_optimizer(settings, self.models)
        for group in self.optimizer.param_groups:
            # `wd_mult` is 0 for vectors, which are not decayed. Megatron only applies it in its scheduler, which is not
            # used.
            group["weight_decay"] = cfg.weight_decay * group["wd_mult"]
        # This makes Megatron sum gradients over data-parallel ranks and never divide by ranks, micro-batches or tokens.
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = lambda models, tokens=None, **groups: finalize(models, None, **groups)

    def zero(self) -> None:
        """Zero the gradients."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def norm(self) -> float:
        """Return the global 2-norm of the gradients in float64, the same on every rank. Collective.

        Tied weights are counted once.
        """
        self.optimizer.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=next(self.models[0].parameters()).device)
        for gradient in (g for each in self._chained() for g in each.get_main_grads_for_grad_norm()):
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        # Reduce the sum over all optimizers at once, not per optimizer, because some pipeline stages may have no
        # optimizer for experts.
        dist.all_reduce(total, group=self.optimizer.get_grad_stats_parallel_group())
        return math.sqrt(total.item())

    def step(self, lr: float, norm: float, largest: float) -> None:
        """Take one AdamW step with gradients clipped to the norm `largest` (0 for no clipping). Collective.

        norm: the result of `self.norm()`.
        """
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32 as clip

        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for each in self._chained():
            parameters = [] if getattr(each, "is_stub_optimizer", False) else each.get_parameters()
            if largest and norm > largest and parameters:
                clip(parameters, largest, norm, each.config.use_precision_aware_optimizer)
        *before, last = self._chained()
        for each in before:
            # Each optimizer would all-gather all weights after its step. Only the last optimizer must do so; hide the
            # models from all others.
            chunks, each.model_chunks = each.model_chunks, []
            each.step_with_ready_grads()
            each.model_chunks = chunks
        last.step_with_ready_grads()

    def tensors_by_owner(self) -> dict[str, list[torch.Tensor | None]]:
        """Return this rank's tensors by owner, `gradients` or `optimizer`."""
        states = [s for each in self._optimizers() for s in each.state.values()]
        masters = [p for each in self._optimizers() for group in each.param_groups for p in group["params"]]
        known = {p.untyped_storage()._cdata for model in self.models for p in model.module.parameters()}
        moments: list[torch.Tensor | None] = [x for state in states for x in state.values() if torch.is_tensor(x)]
        own = [p for p in masters if p.untyped_storage()._cdata not in known]
        return {"gradients": [b.grad_data for b in self._buffers()], "optimizer": moments + own}

    def _buffers(self) -> list[Any]:
        return [b for model in self.models for b in [*model.buffers, *model.expert_parallel_buffers]]

    def _chained(self) -> list[Any]:
        """Return Megatron's optimizers; an MoE model has a separate one for expert weights."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _optimizers(self) -> list[Any]:
        return [each.optimizer for each in self._chained() if getattr(each, "optimizer", None) is not None]

    def _state(self, loading: bool) -> dict:
        for each in self._optimizers():
            if isinstance(each, HostAdamW):
                each.fill()
            elif isinstance(each, torch.optim.AdamW):
                # Megatron saves a step count, which torch's AdamW only has after the first step.
                fill_state(each)
        names = {}
        for i, model in enumerate(self.models):
            prefix = f"{i}." if len(self.models) > 1 else ""
            names |= {prefix + k: v for k, v in model.sharded_state_dict().items()}
        return {"optimizer": self.optimizer.sharded_state_dict(names, is_loading=loading, metadata=SHARDING)}

    def save(self, folder: Path) -> None:
        """Save optimizer state to `folder` with Megatron's dist checkpointing. Collective."""
        from megatron.core import dist_checkpointing

        folder.mkdir(parents=True, exist_ok=True)
        with repairs.quiet():
            dist_checkpointing.save(self._state(False), str(folder), _in_this_process())

    def load(self, folder: Path) -> None:
        """Load optimizer state that `save` wrote under this or any other layout. Collective."""
        from megatron.core import dist_checkpointing

        vet(folder)
        settings = [settings_of(each) for each in self._optimizers()]
        with repairs.quiet(), torch.no_grad():
            found: Any = dist_checkpointing.load(self._state(True), str(folder))
            self.optimizer.load_state_dict(found["optimizer"])
        for each, own in zip(self._optimizers(), settings, strict=True):
            restore_settings(each, own)
            for state in each.state.values():
                if "step" in state:
                    # Copy the step count, because Megatron passes the same tensor for all parameters, and a step would
                    # increment it once per parameter.
                    state["step"] = state["step"].clone()

    def take_weights(self) -> None:
        """Set the optimizer's float32 weights to the weights loaded into the model."""
        self.optimizer.reload_model_params()


def _in_this_process() -> Any:
    """Return a save strategy that writes Megatron's file format from this process.

    Megatron's own strategy starts a process that never exits.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed import checkpoint

    class Strategy(strategies.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict, checkpoint_dir):
            state, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            checkpoint.save(
                strategies.mcore_to_pyt_state_dict(state, False),
                storage_writer=checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1),
                planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=ranks.group(),
            )

    return Strategy("torch_dist", 1)
