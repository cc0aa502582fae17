"""Builds vLLM's LLM from the settings of a run, and adds advice to the error if vLLM fails to start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.engines import pushed_parts, sleep_level, starts_empty
from spmdrl.config.schema import Config
from spmdrl.engines.engine import longest_sequence, model_config, model_vision, without_quantization
from spmdrl.engines.vllm.cpu import CPU_BLOCK, CPU_KV_BYTES, cpu_kv_bytes
from spmdrl.engines.vllm.lora import lora_options
from spmdrl.engines.vllm.vision import vision_options
from spmdrl.hub.resolve import resolve

GPU_BLOCK = 16
"""Number of tokens per KV block in vLLM's CUDA build, for most attention kernels."""
LONGEST = 400
"""Maximum number of characters of vLLM's error message to include in spmdrl's own."""


def set_environment(device: torch.device, dtype: str) -> None:
    """Set the environment variables that vLLM reads at import, except those already set by the user.

    dtype: `--model.dtype`.
    """
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if not os.environ.keys() & {"VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH"}:
        # vLLM then installs no log handlers, so its warnings go to the rank's log file instead of the console.
        values["VLLM_CONFIGURE_LOGGING"] = "0"
    if device.type == "cpu":
        # Cores are not pinned, because every rank of a node would be pinned to the same ones. Compiling vLLM's small
        # sampling helper takes more time than it saves.
        values |= {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    else:
        # FlashInfer's all-reduce, which is untested here, keeps workspaces that vLLM's sleep mode does not free.
        values["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        # vLLM never takes FlashInfer's sampler for requests with a seed, as ours are, but would import it at its start.
        values["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if dtype == "float32":
            # Triton, and so vLLM's attention, would multiply float32 matrices in TF32, whose mantissa has 10 bits:
            # log p of single tokens would differ by 0.01.
            values["TRITON_F32_DEFAULT"] = "ieee"
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def refusals_as_warnings() -> Iterator[None]:
    """Make torch only warn about nondeterministic operations inside this context, even with `--run.deterministic`.

    vLLM's top_p uses a float cumsum, which adds in no fixed order on GPU, so evaluations with `--eval.top-p` below 1
    may differ between runs. Training is not affected, because it samples with top_p 1.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True)


@contextmanager
def quantizing(runner: Any, kind: str) -> Iterator[None]:
    """Quantize weights loaded inside this context to 8 bits, unless `kind` is `none`.

    vLLM quantizes a layer when its last weight arrives, with kernels selected by its current config. A failed load
    leaves layers on the meta device until they are finalized, so they are finalized after errors too; the engine then
    needs a complete set of weights.

    runner: vLLM's model runner, on GPU.
    """
    if kind == "none":
        yield
        return
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        try:
            yield
        except BaseException as failed:
            try:
                finalize_layerwise_reload(runner.model, runner.model_config)
            except Exception as error:  # The load error is the one to report.
                failed.add_note(f"vLLM could not finalize its layers either: {reason(error)}")
            raise
        finalize_layerwise_reload(runner.model, runner.model_config)


def reason(error: Exception) -> str:
    """Return vLLM's error in one line, prefixed with its type unless it is a RuntimeError or ValueError."""
    message = " ".join(str(error).split()).rstrip(".")
    plain = isinstance(error, RuntimeError | ValueError)
    return (message if plain else f"{type(error).__name__}: {message}")[:LONGEST]


def advice(error: Exception) -> str:
    """Return advice on which settings to change after vLLM failed to start with this error."""
    if "memory" not in str(error).lower():
        return (
            "Try --rollout.engine hf, or other values of --rollout.max-sequences, --rollout.kv-cache-gib, --rollout.tp"
        )
    return (
        "Lower its share by --rollout.gpu-memory-utilization or --rollout.kv-cache-gib, or free memory by "
        "--policy.offload host, a larger --rollout.tp, or ending other programs on the device"
    )


def layout(cfg: Config) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM for expert and data parallelism within an engine.

    Raises:
        ValueError: the installed vLLM lacks an argument.
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    rollout, options = cfg.rollout, {}
    if rollout.ep > 1:
        options["enable_expert_parallel"] = True
    if rollout.dp > 1:
        # Without async scheduling, every step runs the model, so all replicas reach the model's collectives together.
        options |= {"data_parallel_size": rollout.dp, "async_scheduling": False}
    known = {field.name for field in fields(EngineArgs)}
    if lacking := sorted(options.keys() - known):
        raise ValueError(
            f"--rollout.ep {rollout.ep}, --rollout.dp {rollout.dp}: vLLM {vllm.__version__} has no "
            f"{', '.join(lacking)}; take 1 for both, or the version that launch/locks has"
        )
    return options


def start_with_zeros() -> None:
    """Make vLLM's dummy loader fill parameters with zeros and leave buffers unchanged.

    By default it writes random numbers, which would remain in padding and constants that the trainer never sends.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()

    DummyModelLoader.load_weights = load_weights


def has_states(folder: Path, cfg: Config, longest: int) -> bool:
    """Return True if vLLM reports that the model has state other than keys and values (Mamba, Lfm2)."""
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
    except Exception:  # `build_llm` will get the same error and report it
        return False


def _cpu_options(cfg: Config, config: Any, folder: Path, longest: int) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM that only its CPU build needs. config: transformers' text config."""
    stateful = has_states(folder, cfg, longest)
    # For latent attention, vLLM sets the block size itself. On CPUs with AMX it would also pick a kernel that rejects
    # float32 and packs weights once at startup, so weights loaded later would have no effect.
    latent = getattr(config, "kv_lora_rank", None)
    options: dict[str, Any] = {"attention_backend": "CPU_MLA"} if latent else {"block_size": CPU_BLOCK}
    # Chunked prefill is disabled, because it would make samples depend on the chunks: after each chunk vLLM resets the
    # offset of the request's random generator, which CPU generators ignore.
    options["enable_chunked_prefill"] = False
    if stateful:
        # vLLM supports prefix caching of states only with chunked prefill.
        options["enable_prefix_caching"] = False
    # A state is as large as the keys and values of many tokens, so stateful models get the maximum cache size.
    sizes = config, cfg.rollout.max_sequences, longest, cfg.model.dtype, cfg.rollout.tp
    return options | {"kv_cache_memory_bytes": CPU_KV_BYTES if stateful else cpu_kv_bytes(*sizes)}


def _gpu_options(cfg: Config, config: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM that only its GPU build needs. config: transformers' text config."""
    options: dict[str, Any] = {
        "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization,
        "enable_sleep_mode": sleep_level(cfg, False) > 0,
    }
    if cfg.rollout.quantization != "none":
        options["quantization"] = cfg.rollout.quantization
    if cfg.rollout.tp > 1:
        # Compiled models would use FlashInfer's all-reduce and its workspaces despite `set_environment`.
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if getattr(config, "num_experts_per_tok", None):
        # Other kernels change the layout of experts at startup, and would misread weights loaded in place.
        options["moe_backend"] = "triton"
    return options


def build_llm(cfg: Config, on_cpu: bool, routed: bool) -> Any:
    """Build vLLM's LLM for the ranks of one TP group. Collective over them.

    routed: True if completions must report the experts of their tokens (GPU only).

    Raises:
        RuntimeError: vLLM failed to start; the message suggests settings to change.
    """
    from vllm import LLM

    capacity, longest = cfg.rollout.max_sequences, longest_sequence(cfg)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    whole = model_config(cfg)
    config = whole.get_text_config()
    # Comes first, because vLLM looks for the model's class in whatever follows.
    images = vision_options(cfg, vision, on_cpu) if (vision := model_vision(cfg)) else {}
    options = images | (_cpu_options(cfg, config, folder, longest) if on_cpu else _gpu_options(cfg, config))
    if kv_bytes := int(cfg.rollout.kv_cache_gib * 2**30):
        options["kv_cache_memory_bytes"] = kv_bytes
    if routed:
        options["enable_return_routed_experts"] = True
    options |= layout(cfg)
    if cfg.engine_teachers():
        options["max_logprobs"] = cfg.distill.top_k  # pyright: ignore[reportAttributeAccessIssue]
    if starts_empty(cfg):
        start_with_zeros()
        options |= {"load_format": "dummy", "hf_overrides": without_quantization(whole)}
    if cfg.engine_ranks > 1 or not on_cpu:
        # Otherwise all single-rank engines would use the first GPU.
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
