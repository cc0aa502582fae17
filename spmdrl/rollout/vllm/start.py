"""Starts vLLM inside a rank: what it changes in the process is put back, and it finds its own ranks only."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.rollout.vllm.copies import numbered_within
from spmdrl.rollout.vllm.cpu import Packed, name_shared_memory
from spmdrl.rollout.vllm.options import build_llm, set_environment
from spmdrl.rollout.vllm.world import world_of
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.world import World


def start_llm(cfg: Config, world: World, routed: bool) -> tuple[Any, Packed | None]:
    """Start vLLM's LLM for this rank; returns it with the packed weights of a CPU. Collective over ranks that sample.

    routed: as in `build_llm`.
    """
    on_cpu = world.device.type == "cpu"
    set_environment(world.device)
    if cfg.rollout.deterministic or (cfg.run.deterministic and not on_cpu):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    # vLLM reseeds torch and rewrites LOCAL_WORLD_SIZE; both belong to the run.
    rng, local_world = torch.get_rng_state(), os.environ.get("LOCAL_WORLD_SIZE")
    shared = []
    if on_cpu and cfg.rollout.tp > 1:
        shared = name_shared_memory(all_gather_text(secrets.token_hex(8), world.rollout_group)[0])
    with world_of(world.roles.samplers), numbered_within(cfg, world):
        packed = Packed() if on_cpu else None
        llm = build_llm(cfg, on_cpu, routed)
    for name in set(shared):
        # All ranks of the group have mapped it: without a name it is freed with the last, however that one ends.
        Path(f"/dev/shm/{name}_{world.engine_tp_rank % cfg.rollout.tp}").unlink(missing_ok=True)
    torch.set_rng_state(rng)
    if local_world is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world
    return llm, packed
