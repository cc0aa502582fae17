"""Builds vLLM's LLM with the arguments and the environment that a run needs, and advises when vLLM refuses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.distillation import engine_teachers
from spmdrl.config.engines import pushed_parts, sleep_level, starts_empty
from spmdrl.config.placement import engine_ranks
from spmdrl.config.schema import Config
from spmdrl.hub.resolve import resolve
from spmdrl.rollout.engine import longest_sequence, without_quantization
from spmdrl.rollout.vllm.cpu import CPU_BLOCK, CPU_KV_BYTES, cpu_kv_bytes
from spmdrl.rollout.vllm.lora import lora_options

GPU_BLOCK = 16
"""Tokens in one KV block of vLLM's CUDA build, with most attention kernels."""
LONGEST = 400
"""Characters of vLLM's error in ours."""


def set_environment(device: torch.device) -> None:
    """Set the environment variables that vLLM reads at import; a user's own values stay."""
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if device.type == "cpu":
        # No core pinning: every rank of a node would take the same cores. Sampling's small compiled helper costs
        # more to build than it saves.
        values |= {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def refusals_as_warnings() -> Iterator[None]:
    """Make torch warn instead of refuse under `--run.deterministic` inside this context.

    vLLM's top_p takes running sums of floats, which a GPU adds in no fixed order. Training samples at top_p 1; an
    evaluation at `--eval.top-p` below 1 may draw a different token if two runs round differently.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True)


def reason(error: Exception) -> str:
    """Return vLLM's error in one line, with its type where the text alone says little, as that of a KeyError."""
    message = " ".join(str(error).split()).rstrip(".")
    plain = isinstance(error, RuntimeError | ValueError)
    return (message if plain else f"{type(error).__name__}: {message}")[:LONGEST]


def advice(error: Exception) -> str:
    """Say which settings to change after vLLM refused to start."""
    if "memory" not in str(error).lower():
        return (
            "Try --rollout.engine hf, or other values of --rollout.max-sequences, --rollout.kv-cache-gib, --rollout.tp"
        )
    return (
        "Give it less by --rollout.gpu-memory-utilization or --rollout.kv-cache-gib, or make room by --policy.offload "
        "host, a larger --rollout.tp, or ending what else runs on the device"
    )


def layout(cfg: Config) -> dict[str, Any]:
    """Return the arguments that spread experts over ranks and copy the attention.

    Raises:
        ValueError: the vLLM that is installed has no such argument.
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    rollout, options = cfg.rollout, {}
    if rollout.ep > 1:
        options["enable_expert_parallel"] = True
    if rollout.dp > 1:
        # A step then always runs the model, in which all copies meet.
        options |= {"data_parallel_size": rollout.dp, "async_scheduling": False}
    known = {field.name for field in fields(EngineArgs)}
    if lacking := sorted(options.keys() - known):
        raise ValueError(
            f"--rollout.ep {rollout.ep}, --rollout.dp {rollout.dp}: vLLM {vllm.__version__} has no "
            f"{', '.join(lacking)}; take 1 for both, or the version that launch/locks has"
        )
    return options


def start_with_zeros() -> None:
    """Make vLLM's loader of invented weights take zeros, and leave buffers as the model made them.

    Its random numbers would stay in the padding of weights and in constants, which no push reaches.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()

    DummyModelLoader.load_weights = load_weights


def has_states(folder: Path, cfg: Config, longest: int) -> bool:
    """Tell by vLLM's own knowledge of a family whether its layers keep states beside keys and values (Mamba, Lfm2)."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder),
        dtype=cfg.model.dtype,  # pyright: ignore[reportArgumentType]
        skip_tokenizer_init=True,
        max_model_len=longest,
        trust_remote_code=cfg.model.trust_remote_code,
    )
    try:
        return arguments.create_model_config().has_inner_state
    except Exception:  # `build_llm` asks vLLM again and reports what it says
        return False


def build_llm(cfg: Config, on_cpu: bool, routed: bool) -> Any:
    """Build vLLM's LLM for the ranks of one TP group. Collective over them.

    routed: completions must report the experts of their tokens.

    Raises:
        RuntimeError: vLLM refused to start; says which settings to change.
    """
    from transformers import AutoConfig
    from vllm import LLM

    capacity, longest = cfg.rollout.max_sequences, longest_sequence(cfg)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    whole = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.model.trust_remote_code)
    config = whole.get_text_config()
    kv_bytes, stateful = int(cfg.rollout.kv_cache_gib * 2**30), on_cpu and has_states(folder, cfg, longest)
    if not kv_bytes and on_cpu:
        # A state has the size of many tokens' keys and values.
        sizes = config, capacity, longest, cfg.model.dtype, cfg.rollout.tp
        kv_bytes = CPU_KV_BYTES if stateful else cpu_kv_bytes(*sizes)
    options: dict[str, Any] = {"kv_cache_memory_bytes": kv_bytes} if kv_bytes else {}
    if on_cpu:
        # Latent attention has blocks of its own. On CPUs with AMX vLLM would take a kernel that packs weights once at
        # start, which loses those of later pushes, and refuses float32.
        latent = getattr(config, "kv_lora_rank", None)
        options |= {"attention_backend": "CPU_MLA"} if latent else {"block_size": CPU_BLOCK}
        # After a part of a prompt vLLM turns back the request's random generator, which a CPU's does not do.
        options["enable_chunked_prefill"] = False
        if stateful:
            # vLLM caches prefixes of states only where it may divide prompts.
            options["enable_prefix_caching"] = False
    else:
        options |= {
            "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization,
            "enable_sleep_mode": sleep_level(cfg, False) > 0,
        }
        if cfg.rollout.quantization != "none":
            options["quantization"] = cfg.rollout.quantization
        if getattr(config, "num_experts_per_tok", None):
            # Other kernels change the layout of experts at start and would misread weights loaded in place.
            options["moe_backend"] = "triton"
        if routed:
            options["enable_return_routed_experts"] = True
    options |= layout(cfg)
    if engine_teachers(cfg):
        options["max_logprobs"] = cfg.distill.top_k  # pyright: ignore[reportAttributeAccessIssue]
    if starts_empty(cfg):
        start_with_zeros()
        options |= {"load_format": "dummy", "hf_overrides": without_quantization(whole)}
    if engine_ranks(cfg) > 1 or not on_cpu:
        # Without it vLLM takes the first GPU for an engine of one rank, whichever rank that is.
        options["distributed_executor_backend"] = "external_launcher"
    if "adapter" in pushed_parts(cfg):
        options |= lora_options(cfg, config, on_cpu)
    try:
        return LLM(
            model=str(folder),
            dtype=cfg.model.dtype,  # pyright: ignore[reportArgumentType]
            tensor_parallel_size=cfg.rollout.tp,
            seed=0,
            enforce_eager=cfg.rollout.enforce_eager or on_cpu,
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=-(-capacity // cfg.rollout.dp),
            logprobs_mode="processed_logprobs",
            trust_remote_code=cfg.model.trust_remote_code,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )
    except Exception as error:
        raise RuntimeError(f"vLLM could not start for {cfg.model.path}: {reason(error)}. {advice(error)}") from error
