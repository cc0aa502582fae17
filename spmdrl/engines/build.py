"""Builds a run's engine by name, and checks that the engine supports the model and the settings."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from spmdrl.config.engines import engine_name, vllm_wants_gpu
from spmdrl.config.fields import flag
from spmdrl.config.judge import engine_judges
from spmdrl.config.schema import Config
from spmdrl.data.template_ends import end_of_turn_tokens
from spmdrl.engines.engine import Engine, kv_bytes_per_token, longest_sequence, model_config
from spmdrl.hub.build import sees_images
from spmdrl.hub.ends import named_ends
from spmdrl.hub.folder import read_config
from spmdrl.hub.vision import tower_sizes
from spmdrl.spmd.world import World

GIB = 1 << 30
WRONG_ON_CPU = ("qwen3_5",)
"""Families that read images and whose delta-net layers vLLM's CPU build computes wrongly, or refuses (float32)."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config fields that hold a model's number of experts per layer."""
VLLM_TEMPERATURE = (0.01, 2.0)
"""Temperature range that vLLM 0.32 supports (`vllm.sampling_params`): it silently clamps temperatures below 0.01 to
0.01 and rejects temperatures above 2."""


def check_engine(cfg: Config, on_cpu: bool) -> None:
    """Check the engine and the model folder before anything is built.

    Raises:
        ValueError: the engine is not installed, or does not support the settings.
    """
    name = engine_name(cfg)
    check_kind(cfg, name, on_cpu)
    check_tp(cfg, name)
    check_experts(cfg)
    check_kv_cache(cfg, name, on_cpu)
    kind = cfg.rollout.quantization
    if name != "hf" and kind != "none" and (kind != "fp8" or on_cpu):
        raise ValueError(f"--rollout.quantization {kind}: {name} takes only fp8, on a GPU; or take --rollout.engine hf")
    if name != "hf" and cfg.rollout.deterministic and on_cpu:
        raise ValueError(
            f"--rollout.deterministic: {name}'s batch-invariant kernels need a GPU; take --rollout.engine hf"
        )
    temperatures = {"--rollout.temperature": cfg.rollout.temperature, "--eval.temperature": cfg.eval.temperature}
    temperatures |= {f"{file}: temperature": judge.temperature for file, judge in engine_judges(cfg)}
    for setting, temperature in temperatures.items():
        if name == "vllm" and not (temperature == 0 or VLLM_TEMPERATURE[0] <= temperature <= VLLM_TEMPERATURE[1]):
            raise ValueError(
                f"{setting} {temperature:g}: vllm takes {VLLM_TEMPERATURE[0]:g} to {VLLM_TEMPERATURE[1]:g}, "
                "or 0 for greedy where that is allowed; or take --rollout.engine hf"
            )
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--rollout.engine vllm: vLLM is not installed; run launch/install.sh, or use --rollout.engine hf"
        )
    if name == "vllm" and on_cpu and vllm_wants_gpu():
        raise ValueError(
            "--rollout.engine vllm: the installed vLLM is a build for GPUs, and this run is on the CPU; take "
            "--rollout.engine hf, or --run.device cuda on a machine with a GPU"
        )


def build_engine(cfg: Config, world: World, stop: set[int]) -> Engine:
    """Start the engine, given settings that passed `check_engine`. Collective over the ranks that sample."""
    name = engine_name(cfg)
    if name == "vllm":
        from spmdrl.engines.vllm.engine import VLLMEngine

        return VLLMEngine(cfg, world, stop)
    if name == "sglang":
        from spmdrl.engines.sglang.engine import SGLangEngine

        return SGLangEngine(cfg, world, stop)
    assert name == "hf", f"no engine is built for --rollout.engine {name}"
    from spmdrl.engines.hf.engine import HFEngine

    return HFEngine(cfg, world, stop)


def check_kind(cfg: Config, engine: str, on_cpu: bool) -> None:
    """Raise ValueError if the model is multimodal and the engine cannot run it.

    transformers has no causal language model class for models that take images or audio; the HF engine runs the
    families that `hub/vision.py` lists. vLLM has classes for all of them, but its processors of other families need
    torchvision, which must not be installed beside its CPU build.
    """
    from transformers import AutoModelForCausalLM

    model = model_config(cfg)
    if sees_images(model):
        if engine == "vllm" and on_cpu and model.model_type in WRONG_ON_CPU:
            raise ValueError(
                f"--rollout.engine vllm: vLLM on a CPU cannot run {model.model_type}; take --rollout.engine hf"
            )
        return
    own = "AutoModelForCausalLM" in (getattr(model, "auto_map", None) or {})
    if own or type(model) in AutoModelForCausalLM._model_mapping:
        return
    if engine == "hf":
        raise ValueError(
            f"--rollout.engine hf: transformers has no causal language model for {model.model_type}; take "
            "--rollout.engine vllm on a GPU"
        )
    if engine == "vllm" and on_cpu:
        raise ValueError(f"--rollout.engine vllm: vLLM on a CPU cannot run {model.model_type}; it needs a GPU")


def check_tp(cfg: Config, engine: str) -> None:
    """Raise ValueError if `--rollout.tp` ranks cannot split a model's heads, or a dense model's MLPs, evenly."""
    model, tp = model_config(cfg), cfg.rollout.tp
    if problem := tp_problem(model, engine, tp, cfg.model.path) or tower_problem(model, engine, tp, cfg.model.path):
        raise ValueError(problem)
    if engine == "hf" and tp > 1:
        from spmdrl.engines.hf.start import plan_of

        plan_of(model, tp)


def tp_problem(config: Any, engine: str, tp: int, name: str = "the model") -> str:
    """Return an error message if a model cannot be sharded over `tp` ranks, else "".

    The message says why, and which values of `--rollout.tp` would work.

    config: the transformers config of the model. If the config does not give the number of heads, the function returns
    "" and leaves the check to the engine.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", tp)
    # A model with latent attention has no separate key-value heads, even if its config specifies their number.
    kv = heads if hasattr(text, "kv_lora_rank") else getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "intermediate_size", None)
    if not isinstance(width, int) or getattr(text, "num_experts_per_tok", None):
        width = 0

    def fits(n: int) -> bool:
        # vLLM and SGLang replicate KV heads if there are more ranks than KV heads.
        return heads % n == 0 and width % n == 0 and (kv % n == 0 or (engine != "hf" and n % kv == 0))

    if fits(tp):
        return ""
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
    return (
        f"--rollout.tp {tp}: {name} has {heads} attention heads and {kv} key-value heads"
        f"{f', and MLPs {width} wide' if width % tp else ''}, which {tp} ranks cannot share; {engine} takes {sizes}"
    )


def tower_problem(config: Any, engine: str, tp: int, name: str = "the model") -> str:
    """Return an error message if vLLM cannot shard a vision tower over `tp` ranks, else ""."""
    if engine != "vllm" or not sees_images(config):
        return ""
    tower = tower_sizes(config)
    heads, width = tower.heads, tower.inner
    if heads % tp == 0 and width % tp == 0:
        return ""
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and width % n == 0)
    return (
        f"--rollout.tp {tp}: the vision tower of {name} has {heads} heads and MLPs {width} wide, which {tp} ranks "
        f"cannot share; vllm takes {sizes}"
    )


def check_experts(cfg: Config) -> None:
    """Raise ValueError if `--rollout.ep` or `.dp` exceeds 1 for a dense model, or if `.ep` does not divide the number
    of experts.
    """
    rollout = cfg.rollout
    if rollout.ep == rollout.dp == 1:
        return
    config = model_config(cfg).get_text_config()
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    flag = f"--rollout.ep {rollout.ep}" if rollout.ep > 1 else f"--rollout.dp {rollout.dp}"
    if not experts:
        raise ValueError(f"{flag}: this setting divides experts, and {cfg.model.path} has none; take 1")
    if experts % rollout.ep:
        raise ValueError(
            f"{flag}: {cfg.model.path} has {experts} experts, which {rollout.ep} ranks cannot divide equally; "
            "change --rollout.tp or --rollout.dp together with it, or take --rollout.ep 1"
        )


def check_kv_cache(cfg: Config, engine: str, on_cpu: bool) -> None:
    """Check the size of each rank's KV cache if `--rollout.kv-cache-gib` sets this size.

    The HF engine's cache has no fixed size and is not checked.

    Raises:
        ValueError: the cache is too small for the longest sequence or, on CPU, larger than the free memory.
    """
    gib = cfg.rollout.kv_cache_gib
    if engine == "hf" or not gib:
        return
    import psutil

    from spmdrl.engines.sglang.options import SPARE_TOKENS
    from spmdrl.engines.vllm.cpu import CPU_BLOCK
    from spmdrl.engines.vllm.options import GPU_BLOCK

    config = model_config(cfg).get_text_config()
    longest = longest_sequence(cfg)
    if engine == "vllm":
        # The cache consists of blocks, and vLLM reserves one of them.
        block = CPU_BLOCK if on_cpu else GPU_BLOCK
        tokens = (-(-longest // block) + 1) * block
    else:
        tokens = longest + SPARE_TOKENS
    per_token = kv_bytes_per_token(config, cfg.model.dtype, cfg.rollout.tp)
    if int(gib * GIB) < tokens * per_token:
        least = math.ceil(tokens * per_token / GIB * 1e6) / 1e6
        raise ValueError(
            f"--rollout.kv-cache-gib {gib:g}: one sequence of {longest} tokens takes {per_token} bytes a token on "
            f"every rank of {engine}; give at least {least}, or 0 to size it by the sequences"
        )
    free = psutil.virtual_memory().available / GIB
    if on_cpu and gib > free:
        raise ValueError(f"--rollout.kv-cache-gib {gib:g}: only {free:.1f} GiB of memory are free; give less")


def stop_tokens(folder: Path, tokenizer, template: str = "") -> set[int]:
    """Return the token ids that end a response.

    The result combines the tokenizer's end-of-sequence token, the end tokens listed in the folder's files
    (`hub/ends.py`), and the tokens that end a turn in the chat template.

    template: the job's chat template (`data/template_ends.py`), or empty if the job renders no dialogues.
    """
    return {tokenizer.eos_token_id, *named_ends(folder), *end_of_turn_tokens(tokenizer, template)} - {None}


def prompt_limit(cfg: Config, folder: Path, setting: str = "rollout.max_new_tokens") -> int:
    """Return the maximum prompt length, in tokens, allowed by the settings and the model's context length.

    setting: name of the setting that limits the number of new tokens, for the error message.

    Raises:
        ValueError: there is no room for a prompt.
    """
    context = context_length(folder, cfg.model.trust_remote_code)
    if context <= cfg.rollout.max_new_tokens:
        raise ValueError(
            f"{flag(setting)} {cfg.rollout.max_new_tokens} leaves no room for a prompt: {cfg.model.path} reads at "
            f"most {context} tokens"
        )
    return min(cfg.rollout.max_prompt_tokens, context - cfg.rollout.max_new_tokens)


def context_length(folder: Path, trust_remote_code: bool) -> int:
    """Return the model's maximum sequence length, in tokens."""
    config = read_config(folder, trust_remote_code).get_text_config()
    found = getattr(config, "max_position_embeddings", None) or 1 << 30
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{folder}: its config.json has max_position_embeddings {found!r}, which must be a number")
    return found
