"""Wraps a HF model for packed sequences, shards it with FSDP2 or HSDP, and loads each rank's shards from files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from spmdrl.config.backends import way_to_gather
from spmdrl.config.schema import TrainingConfig
from spmdrl.hub.build import decoder_layers, give_memory, vision_layers
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.lora import initial_values, is_adapter, plain_name
from spmdrl.policy.contract import SCORES, Head
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.gloo import DirectAllGather, DirectReduceScatter
from spmdrl.spmd.world import World
from spmdrl.weights.folder import Tensors
from spmdrl.weights.shards import local, shard_box
from spmdrl.weights.sources import Sources


def _shard(model: PackedLM | PackedScalar, world: World, compute: torch.dtype, way: str, direct: bool) -> None:
    """Apply fully_shard over `world.shard_mesh` to the model, and to each layer unless `way` is `whole`.

    compute: dtype of the forward pass. way: the result of `way_to_gather`. direct: with gloo, send directly between
    ranks (`spmd/gloo.py`) instead of using gloo's ring algorithm.
    """
    # Use the dtype of a trainable parameter if there is one, because with LoRA only adapters have the master dtype.
    mesh, master = world.shard_mesh, max(model.parameters(), key=lambda p: p.requires_grad).dtype
    mixed = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master) if compute != master else MixedPrecisionPolicy()
    )
    for layer in decoder_layers(model.hf) if way != "whole" else ():
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=way == "layers")
    # A vision tower keeps its rotary tables in float32, while its other inputs already have the compute dtype.
    uncast = replace(mixed, cast_forward_inputs=False)
    for layer in vision_layers(model.hf) if way != "whole" else ():
        fully_shard(layer, mesh=mesh, mp_policy=uncast, reshard_after_forward=way == "layers")
    # FSDP must not cast the root inputs, which include the loss's per-token inputs (old_logp, advantages, ...).
    fully_shard(model, mesh=mesh, mp_policy=uncast, reshard_after_forward=False)
    for further in ("states", "plain", "off"):
        register_fsdp_forward_method(model, further)
    module: Any
    for module in model.modules():
        # Skip this on a single rank, where FSDP would only divide a copy of the gradients by 1.
        if hasattr(module, "set_gradient_divide_factor") and mesh.size() > 1:
            # Gradients must be summed, not averaged, because the loss is already normalised globally.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if direct and kind_of(world.device) == "cpu":
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())


def sharded(
    hf: Any,
    cfg: TrainingConfig,
    world: World,
    head: Head,
    compute: torch.dtype,
    share: bool,
    trained: Callable[[str], bool],
) -> tuple[Any, str]:
    """Return a sharded HF model with its head, and how to gather it (`way_to_gather`). Collective.

    The model stays on its device, which can be the meta device. compute: dtype of the forward pass. share: compute a
    prompt once for all its samples. trained: predicate on parameter names that returns False for frozen parameters.
    """
    kind, sp = cfg.policy.attention, world.sp_group
    model = PackedLM(hf, kind, sp, share) if head == "lm" else PackedScalar(hf, kind, sp, share, after=head in SCORES)
    # Models are also trained in eval mode, which disables dropout, LayerDrop and router jitter. The loss compares logp
    # with the engine's and with earlier passes, so the forward pass must be deterministic.
    model.eval()
    for name, p in model.named_parameters():
        p.requires_grad_(trained(name))
    way = way_to_gather(cfg.policy.gather, sum(p.numel() for p in model.parameters()) * compute.itemsize)
    # The lockstep recorder only sees collectives, so direct sends are disabled while it is active.
    _shard(model, world, compute, way, not cfg.run.lockstep_debug)
    return model, way


# ── weights ──────────────────────────────────────────────────────────────────

Names = dict[int, tuple[Any, list[str]]]
"""id() of a tensor -> the tensor and its names in the HF model. Tied weights have several names."""


def names_of(hf: Any) -> Names:
    """Return a model's parameters and persistent buffers, each with all of its names."""
    found: Names = {}
    persistent = hf.state_dict().keys()
    buffers = [(name, b) for name, b in hf.named_buffers(remove_duplicate=False) if name in persistent]
    for name, tensor in [*hf.named_parameters(remove_duplicate=False), *buffers]:
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    return found


def check_folder_fits(names: Names, sources: Sources, new_head: bool) -> None:
    """Check that a folder has all non-adapter weights in the right shapes. new_head: `score` may be missing.

    Raises:
        ValueError: tensors are missing or have the wrong shape, or fp8 weights have no scales.
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
    """Allocate a sharded model on this rank's device and load its weights from a HF folder.

    Each rank only reads its own shards, directly into its tensors. Adapters are not in the folder and are initialised;
    a `score` head that is missing from the folder is set to zero.

    model: the result of `sharded`, with parameters on the meta device. new_head: whether the folder may lack the
    `score` head. seed: seed of the run, for initialising adapters. blocks: the result of `fp8_blocks`.

    Raises:
        ValueError: a tensor is missing or has the wrong shape, or tied weights have different values.
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
        # A folder can contain a tied weight under several names; the values must be the same.
        if any(sources.tensors.differs(name, box, mine) for name in sources.read_from(other)):
            raise ValueError(
                f"{sources.tensors.folder}: config.json ties {other} to {present[0]}, but the folder has different "
                "values for them: set tie_word_embeddings to false in config.json, or remove one of them"
            )
