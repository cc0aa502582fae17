"""Prepares a HF model for training: packed form, recomputed layers, Liger's kernels, shards of FSDP2 or HSDP."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from spmdrl.config.schema import TrainingConfig
from spmdrl.hub.build import decoder_layers
from spmdrl.policy.attention.packing import again
from spmdrl.policy.contract import SCORES, Head
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.gloo import DirectAllGather, DirectReduceScatter
from spmdrl.spmd.world import World

GATHERED_WHOLE = {"cpu": 512 << 20, "cuda": 64 << 20}
"""Models of up to this many bytes (in the compute type) are sharded as one group: gathering each layer by itself would
cost more time than the memory is worth. On a CPU nothing is computed while a gather runs."""


def _shard(model: PackedLM | PackedScalar, world: World, compute: torch.dtype, reshard: bool, direct: bool) -> None:
    """Apply fully_shard to each decoder layer, then to the rest, over `world.shard_mesh`; to a small model as a whole.

    direct: on gloo, send directly (`spmd/gloo.py`) instead of around its ring.
    """
    # Under LoRA only trainable parameters use the master dtype.
    mesh, master = world.shard_mesh, max(model.parameters(), key=lambda p: p.requires_grad).dtype
    mixed = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master) if compute != master else MixedPrecisionPolicy()
    )
    layers = decoder_layers(model.hf)
    if sum(p.numel() for p in model.parameters()) * compute.itemsize <= GATHERED_WHOLE[kind_of(world.device)]:
        layers = []
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    # The root also gets the columns of a loss (old_logp, advantages, ...), which keep their type.
    fully_shard(model, mesh=mesh, mp_policy=replace(mixed, cast_forward_inputs=False), reshard_after_forward=False)
    for further in ("states", "plain", "off"):
        register_fsdp_forward_method(model, further)
    module: Any
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Gradients are sums: denominators are global and already in the loss.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if direct and kind_of(world.device) == "cpu" and world.size > 1:
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())


def recompute(hf: Any) -> None:
    """Recompute the forward of each decoder layer in its backward, instead of keeping its activations.

    transformers' own switch works only in training mode, which would also switch dropout on.
    """
    for layer in decoder_layers(hf):
        # The state of random generators need not be kept: in eval mode nothing draws.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=again
        )


def use_liger(hf: Any, device: torch.device) -> None:
    """Put Liger's kernels (https://arxiv.org/abs/2410.10989) between a model's matmuls, without the head.

    Raises:
        ValueError: no GPU, or a model type that Liger has no kernels for.
    """
    if device.type != "cuda":
        raise ValueError("--policy.liger: its kernels run on GPUs; leave it out on a CPU")
    from liger_kernel.transformers import monkey_patch

    known, kind = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, hf.config.model_type
    if kind not in known:
        raise ValueError(f"--policy.liger: Liger has no kernels for {kind}; it has {', '.join(sorted(known))}")
    # The loss is computed by this package: chunked in the head, with the run's own formula.
    monkey_patch._apply_liger_kernel_to_instance(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)


def sharded(
    hf: Any,
    cfg: TrainingConfig,
    world: World,
    head: Head,
    compute: torch.dtype,
    share: bool,
    trained: Callable[[str], bool],
) -> Any:
    """Wrap, freeze and shard a HF model; it stays on its device, which may be meta. Collective.

    compute: type of the forward. share: prompts run once for all their samples. trained: True for the names of
    parameters that train.
    """
    kind, sp = cfg.policy.attention, world.sp_group
    model = PackedLM(hf, kind, sp, share) if head == "lm" else PackedScalar(hf, kind, sp, share, after=head in SCORES)
    # Eval mode even for training: the loss compares logp with the engine's and with earlier passes, so the model must
    # not be random (dropout, LayerDrop, a router's jitter).
    model.eval()
    for name, p in model.named_parameters():
        p.requires_grad_(trained(name))
    # The lockstep recorder records collectives, and direct sends are none.
    _shard(model, world, compute, cfg.policy.reshard_after_forward, not cfg.run.lockstep_debug)
    return model
