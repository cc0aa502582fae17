"""Shards a HF model in its packed form by FSDP2 or HSDP, and fills it: each rank reads its own parts of the weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from spmdrl.config.schema import TrainingConfig
from spmdrl.hub.build import decoder_layers, give_memory
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.lora import initial_values, is_adapter, plain_name
from spmdrl.policy.attention.packing import again
from spmdrl.policy.contract import SCORES, Head
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.gloo import DirectAllGather, DirectReduceScatter
from spmdrl.spmd.world import World
from spmdrl.weights.folder import Tensors
from spmdrl.weights.shards import local, shard_box
from spmdrl.weights.sources import Sources

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


# ── weights ──────────────────────────────────────────────────────────────────

Names = dict[int, tuple[Any, list[str]]]
"""id of a tensor -> the tensor and its names in the original model; tied weights have several."""


def names_of(hf: Any) -> Names:
    """Return the parameters and the persistent buffers of a model, each with all its names."""
    found: Names = {}
    persistent = hf.state_dict().keys()
    buffers = [(name, b) for name, b in hf.named_buffers(remove_duplicate=False) if name in persistent]
    for name, tensor in [*hf.named_parameters(remove_duplicate=False), *buffers]:
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    return found


def check_folder_fits(names: Names, sources: Sources, new_head: bool) -> None:
    """Check that a folder holds every parameter in its shape. new_head: the head `score` may be missing.

    Raises:
        ValueError: tensors that are missing or misshapen, or fp8 weights without scales.
    """
    wrong = []
    for _, known in names.values():
        present = [name for name in known if name in sources]
        wrong += [name for name in present if not sources.fits(name)]
        lacking = not present and not sources.may_lack(known[0]) and not is_adapter(known[0])
        if lacking and not (new_head and known[0] in ("score.weight", "score.bias")):
            wrong.append(known[0])
        for name in present:
            for tensor in sources.read_from(name):
                sources.tensors.check_scales(tensor)
    if wrong:
        listed = ", ".join(sorted(wrong)[:4])
        raise ValueError(
            f"the weights in {sources.tensors.folder} do not fit its config.json: missing or misshapen {listed}"
        )


@torch.no_grad()
def fill_model(
    model: Any, folder: Path, device: torch.device, new_head: bool, seed: int, blocks: tuple[int, int] | None = None
) -> None:
    """Allocate a sharded model on this rank's device and fill it with the values of a HF folder.

    A rank reads only its own shards, directly into its tensors. Adapters, which no folder holds, get their initial
    values; a head `score` that the folder lacks gets zeros.

    model: the result of `sharded`, with parameters on the meta device. new_head: the folder may lack the head `score`.
    seed: of the run, for adapters. blocks: as `fp8_blocks` returns them.

    Raises:
        ValueError: a folder that lacks a tensor, or holds one of another shape.
    """
    names = names_of(model.hf)
    shapes = {n: tuple(t.shape) for t, known in names.values() for n in known if not is_adapter(n)}
    with plain_errors(folder):
        sources = Sources(model.hf, shapes, Tensors(folder, blocks))
        check_folder_fits(names, sources, new_head)

    give_memory(model, device)
    with plain_errors(folder):
        for tensor, known in names_of(model.hf).values():
            _fill(tensor, known, sources, seed)


def _fill(tensor: torch.Tensor, names: list[str], sources: Sources, seed: int) -> None:
    box, mine = shard_box(tensor), local(tensor)
    if not mine.numel():
        return
    present = [name for name in names if name in sources]
    if not present:
        first = initial_values(names[0], tuple(tensor.shape), seed) if is_adapter(names[0]) else None
        mine.zero_() if first is None else mine.copy_(first[tuple(slice(a, b) for a, b in box)])
        return
    sources.copy(present[0], box, mine)
    for other in present[1:]:
        # A folder may hold a tied weight twice.
        if any(sources.tensors.differs(name, box, mine) for name in sources.read_from(other)):
            raise ValueError(
                f"{sources.tensors.folder}: config.json ties {other} to {present[0]}, but the folder holds different "
                "values for them: set tie_word_embeddings to false in config.json, or remove one of them"
            )
