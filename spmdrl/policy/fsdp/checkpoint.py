"""Saves and loads weights, adapters and optimizer state of an FSDP2 policy."""

from pathlib import Path
from typing import Any

import torch

from spmdrl.policy.contract import Write
from spmdrl.policy.fsdp import lora
from spmdrl.policy.optimizer import fill_state, restore_settings, settings_of
from spmdrl.policy.safe_pickle import vet
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.world import World
from spmdrl.weights.safetensors import MASTERS, has_masters, on_first, on_host, read_into, save_model, tree_on_host
from spmdrl.weights.shards import local


def saving(policy: Any, copy: bool = False) -> Write:
    """Implements `Policy.saving` for a `FsdpPolicy`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # Run everything that needs collectives over the policy's process groups now, because the returned function may run
    # while training uses these groups.
    pieces, fixed = policy.pieces(), policy.fixed
    adapter, settings, base = None, policy.adapters, {}
    if settings:
        adapter, base = lora.file_pieces(policy.parts()[1]), _base_facts(policy)
    state: dict[str, Any] = {}
    if policy.optimizer:
        fill_state(policy.optimizer)
        state["optimizer"] = get_optimizer_state_dict(policy.model, policy.optimizer)
        if policy.compute != policy.master and not policy.adapters:
            state[MASTERS] = {name: p.detach() for name, p in policy.parts()[0]}
    if copy:
        pieces, state = on_host(pieces, policy.stored), tree_on_host(state)
        adapter = on_host(adapter, policy.master) if adapter is not None else None

    def write(folder: Path, world: World) -> None:
        save_model(folder / "model", pieces, world, policy.stored, fixed, policy.untrained, policy.blocks)
        if adapter is not None:
            tensors = {name: x for bucket in on_first(adapter, world, policy.master) for name, x in bucket.items()}
            if world.is_first:
                lora.write_adapter(folder / "adapter", settings, tensors, base)
        if state:
            dcp.save(state, checkpoint_id=str(folder / "state" / "optimizer"), process_group=world.training_group)

    return write


def _base_facts(policy: Any) -> dict:
    """Return path and checksum of the base weights, to validate adapters at load time. Collective."""
    # The checksum is the sum of all elements' bit patterns modulo 2**64. It does not depend on the sharding, because
    # the sums over shards add up.
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [local(p).view(width[p.element_size()]).sum(dtype=torch.int64) for _, p in policy.parts()[0]]
    total = all_reduce(torch.stack(sums).sum(), "sum", policy.world.shard_group)
    return {"path": str(policy.cfg.model.path), "sum": int(total)}


def load(policy: Any, folder: Path) -> None:
    """Implements `Policy.load` for a `FsdpPolicy`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    base, adapters = policy.parts()
    state, where = {}, folder / "state" / "optimizer"
    saved = vet(where) if policy.optimizer else {}
    if policy.adapters:
        lora.read_adapter(adapters, folder / "adapter", policy.adapters, _base_facts(policy))
        base = []
    elif (folder / "adapter").exists():
        raise ValueError(f"{folder} has adapters: resume with its --lora.rank, or choose another --run.dir")
    elif has_masters(saved, base, where):
        state[MASTERS] = {name: p.detach() for name, p in base}
        base = []
    # A trained model only loads float32 weights, because 16-bit weights are rounded copies of its master weights.
    read_into(base + policy.buffers, folder / "model", policy.layout, torch.float32 if policy.optimizer else None)
    if policy.optimizer is None:
        return
    settings = settings_of(policy.optimizer)
    fill_state(policy.optimizer)
    state["optimizer"] = get_optimizer_state_dict(policy.model, policy.optimizer)
    dcp.load(state, checkpoint_id=str(where), process_group=policy.world.training_group)
    set_optimizer_state_dict(policy.model, policy.optimizer, optim_state_dict=state["optimizer"])
    restore_settings(policy.optimizer, settings)
