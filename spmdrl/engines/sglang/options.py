"""Builds the arguments of SGLang's Engine from the settings of a run."""

import json
from pathlib import Path
from typing import Any

from spmdrl.config.engines import sleep_level, starts_empty
from spmdrl.config.schema import Config
from spmdrl.engines.engine import kv_bytes_per_token, longest_sequence, model_config, without_quantization
from spmdrl.spmd.world import World

CPU_KV_BYTES = 256 << 20
"""Maximum KV cache size on CPU, in bytes, unless the settings specify one."""
SPARE_TOKENS = 8
"""Upper bound on the number of context tokens that SGLang reserves for internal use."""


def options(cfg: Config, world: World, folder: Path) -> dict[str, Any]:
    """Return the arguments of SGLang's Engine."""
    rollout, whole = cfg.rollout, model_config(cfg)
    config = whole.get_text_config()
    longest = longest_sequence(cfg) + SPARE_TOKENS
    values: dict[str, Any] = {
        "model_path": str(folder),
        "trust_remote_code": cfg.model.trust_remote_code,
        "dtype": cfg.model.dtype,
        "device": world.device.type,
        # SGLang's tp_size counts all ranks of an engine, which data-parallel attention then divides.
        "tp_size": cfg.engine_ranks,
        **({"ep_size": rollout.ep} if rollout.ep > 1 else {}),
        **({"attn_dp_size": rollout.dp} if rollout.dp > 1 else {}),
        "context_length": longest,
        "max_running_requests": rollout.max_sequences,
        "disable_cuda_graph": rollout.enforce_eager or world.device.type == "cpu",
        "random_seed": 0,
        # Without this option, an idle scheduler would busy-wait during training and occupy a core.
        "sleep_on_idle": True,
    }
    if starts_empty(cfg):
        values |= {"load_format": "dummy", "json_model_override_args": json.dumps(without_quantization(whole))}
    if world.device.type == "cpu":
        # `max_total_tokens` sets the cache size. This fraction is only an upper bound and must not reduce the cache.
        share = 0.9 if rollout.kv_cache_gib else 0.1
        values |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "mem_fraction_static": share}
    else:
        values |= {
            "base_gpu_id": world.local_rank,
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "enable_memory_saver": sleep_level(cfg, False) > 0,
            "enable_weights_cpu_backup": sleep_level(cfg, False) == 1,
            "enable_deterministic_inference": rollout.deterministic or cfg.run.deterministic,
        }
        if rollout.quantization != "none":
            values["quantization"] = rollout.quantization
    if world.device.type == "cpu" or rollout.kv_cache_gib:
        per_token = kv_bytes_per_token(config, cfg.model.dtype, rollout.tp)
        size = int(rollout.kv_cache_gib * 2**30) or min(CPU_KV_BYTES, rollout.max_sequences * longest * per_token)
        values["max_total_tokens"] = max(longest, size // per_token)
    return values
