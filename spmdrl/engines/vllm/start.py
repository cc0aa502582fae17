"""Starts vLLM inside a rank's process, restores what it changes there, and limits it to the ranks of engines."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.engines.vllm.classes import restored_classes
from spmdrl.engines.vllm.copies import rank_within_engine
from spmdrl.engines.vllm.cpu import Packed, name_shared_memory
from spmdrl.engines.vllm.options import build_llm, set_environment
from spmdrl.engines.vllm.world import world_of
from spmdrl.spmd.exchange import broadcast_text
from spmdrl.spmd.world import World

PROMPTS = (3, 20)
"""Lengths of the trial prompts of a new engine, in tokens."""


def model_of(llm: Any) -> Any:
    """Return the model object inside vLLM's LLM."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def rehearse(llm: Any, cfg: Config) -> None:
    """Sample two tokens after short prompts, with any weights. Collective over the engine.

    Raises:
        RuntimeError: vLLM fails. Some kernels refuse a model or a type only when they run.
    """
    from vllm import SamplingParams

    if cfg.rollout.dp > 1:
        return
    engine = llm.llm_engine
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=2, ignore_eos=True, logprobs=0, detokenize=False)
    longest = engine.model_config.max_model_len - 2
    try:
        for length in sorted({min(n, longest) for n in PROMPTS if longest > 0}):
            engine.add_request(f"trial {length}", {"prompt_token_ids": [0] * length}, params)
        while engine.has_unfinished_requests():
            engine.step()
        llm.reset_prefix_cache()
    except Exception as error:
        raise RuntimeError(
            f"--rollout.engine vllm: vLLM cannot run {cfg.model.path} in {cfg.model.dtype} on this device: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Take --rollout.engine hf, or another --model.dtype"
        ) from error


def start_llm(cfg: Config, world: World, routed: bool) -> tuple[Any, Packed | None]:
    """Start vLLM's LLM for this rank; return it with the packed weights of a CPU. Collective over the sampling ranks.

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
        shared = name_shared_memory(broadcast_text(secrets.token_hex(8), world.rollout_group))
    with world_of(world.roles.samplers), rank_within_engine(cfg, world):
        packed = Packed() if on_cpu else None
        with restored_classes() as own_classes:
            llm = build_llm(cfg, on_cpu, routed)
            own_classes(model_of(llm))
        rehearse(llm, cfg)
        if packed:
            # The rehearsal packed weights that the first push replaces.
            packed.clear()
    for name in set(shared):
        # All ranks of the group have mapped it; without a name it is freed with the last process, however that ends.
        Path(f"/dev/shm/{name}_{world.engine_tp_rank % cfg.rollout.tp}").unlink(missing_ok=True)
    torch.set_rng_state(rng)
    if local_world is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world
    return llm, packed
