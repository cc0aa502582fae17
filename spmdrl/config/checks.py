"""What the values of a run must satisfy together, and what they multiply out to.

Everything here runs before a model is built. `check` reports all problems at once, each with the flag to change.
"""

import ast
import importlib.util
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from spmdrl.config.fields import ConfigError, flag, get, nearest
from spmdrl.config.placement import (
    how_to_have_more,
    placement_problems,
    ranks_line,
    role_problems,
    samplers,
    shown,
    trainers,
)
from spmdrl.config.rules import RULES
from spmdrl.config.schema import Config

TRACKERS = ("jsonl", "tensorboard", "wandb")
VLLM_RANK = 512
"""Largest rank of an adapter inside vLLM 0.32 (`vllm.config.lora.MaxLoRARanks`)."""
GROUP_BASELINES = (
    *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_pass_k", "gdpo", "prime"),
    *("optimal_token_baseline", "gigpo", "win_rate"),
)
"""Advantage estimators that compare the samples of one prompt, so one sample gives no signal."""


def check(config: Config, world_size: int) -> None:
    """Check all values together; nothing is built or read but the files that settings name.

    Args:
        config: a run's settings, with or without its preset filled in.
        world_size: ranks of the job.

    Raises:
        ConfigError: listing every problem, one line each: the flag to change, its value and what would be valid.
    """
    problems = [
        f"{flag(name)} {_shown(get(config, name))}: {message}"
        for name, (valid, message) in RULES.items()
        if not valid(get(config, name))
    ]
    bad = {problem.split(" ", 1)[0] for problem in problems}
    # What holds between settings is only asked of settings that are valid alone, so that one mistake is one line.
    roles = role_problems(config, world_size)
    if not any(name.startswith("--parallel.") for name in bad):
        problems += roles or _parallel_problems(config, trainers(config, world_size))
    problems += [
        line
        for line in _rollout_problems(config, 0 if roles else samplers(config, world_size))
        + _algo_problems(config)
        + _lora_problems(config)
        + _other_problems(config)
        + placement_problems(config)
        if line.split(" ", 1)[0] not in bad
    ]
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        raise ConfigError("\n  ".join([f"{count} to change:", *problems]))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else repr(value) if value == "" else str(value)


def axis_product(config: Config) -> int:
    """Ranks taken by all axes but dp_shard (ep lies inside dp_shard)."""
    axes = config.parallel
    return axes.dp_replicate * axes.sp * axes.cp * axes.tp * axes.pp


def _parallel_problems(config: Config, world_size: int) -> list[str]:
    """world_size: ranks that train."""
    axes, problems = config.parallel, []
    if config.policy.backend == "fsdp":
        problems = [
            f"--parallel.{axis.replace('_', '-')} {getattr(axes, axis)}: must be 1; the fsdp backend takes "
            "dp_replicate, dp_shard and sp (--policy.backend megatron has the others)"
            for axis in ("tp", "pp", "ep", "cp", "etp", "virtual_stages")
            if getattr(axes, axis) > 1
        ]
        problems += [
            f"{flag('policy.' + name)} {getattr(config.policy, name)}: needs --policy.backend megatron; take {plain}"
            for name, plain in (
                ("recompute", "full"),
                ("host_optimizer", False),
                ("moe_aux_loss", 0.0),
                ("moe_bias_rate", 0.0),
            )
            if getattr(config.policy, name) != plain
        ]
        if config.policy.liger and importlib.util.find_spec("liger_kernel") is None:
            problems.append("--policy.liger True: Liger is not installed; pip install liger-kernel, or leave it out")
        if axes.last_stage_layers:
            problems.append(f"--parallel.last-stage-layers {axes.last_stage_layers}: is of megatron's backend; take 0")
    else:
        problems = _megatron_problems(config, world_size)
    if problems:
        return problems
    rest = axis_product(config)
    if axes.dp_shard == -1:
        if world_size % rest:
            axis = max(("dp_replicate", "sp", "cp", "tp", "pp"), key=lambda name: getattr(axes, name))
            problems.append(
                f"--parallel.{axis.replace('_', '-')} {getattr(axes, axis)}: the axes but dp_shard multiply to {rest}, "
                f"which must divide {shown(config, world_size, 'train')}"
            )
        return problems
    if rest * axes.dp_shard != world_size:
        fits = f"{world_size // rest} or -1" if world_size % rest == 0 else "-1 with axes that divide the ranks"
        problems.append(
            f"--parallel.dp-shard {axes.dp_shard}: the axes multiply to {rest * axes.dp_shard} "
            f"but {'the job has' if config.parallel.placement == 'colocated' else 'there train'} {world_size} ranks; "
            f"dp-shard could be {fits}"
        )
    return problems


def _megatron_problems(config: Config, world_size: int) -> list[str]:
    """What that backend cannot do. Whether it can divide the model, the model says (`policy/megatron/layout.py`)."""
    axes, problems = config.parallel, []
    if importlib.util.find_spec("megatron") is None:
        problems.append(
            "--policy.backend megatron: megatron-core is not installed: "
            './launch/install.sh, or pip install "megatron-core>=0.16.1,<0.18" einops'
        )
    if axes.sp > 1:
        problems.append(f"--parallel.sp {axes.sp}: is of the fsdp backend; --parallel.cp divides sequences in megatron")
    if config.policy.liger:
        problems.append("--policy.liger True: is of the fsdp backend; Megatron has kernels of its own")
    if axes.placement == "split":
        problems.append("--parallel.placement split: not with the megatron backend; take colocated")
    if config.policy.attention != "auto":
        problems.append(f"--policy.attention {config.policy.attention}: is of the fsdp backend; leave it out")
    if config.lora.rank:
        problems.append(f"--lora.rank {config.lora.rank}: adapters are of the fsdp backend; take 0")
    if config.model.dtype == "float64":
        problems.append("--model.dtype float64: Megatron's optimizer has none; take float32")
    if config.policy.recompute != "full" and not config.policy.activation_checkpointing:
        problems.append(f"--policy.recompute {config.policy.recompute}: needs --policy.activation-checkpointing")
    rest = axes.pp * axes.etp * axes.ep
    if world_size and world_size % rest:
        stage = world_size // axes.pp
        fits = ", ".join(str(n) for n in range(1, stage + 1) if stage % (n * axes.etp) == 0)
        problems.append(
            f"--parallel.ep {axes.ep}: pp x etp x ep = {rest} must divide {world_size} ranks"
            + how_to_have_more(world_size)
            + (f"; --parallel.ep may be {fits}" if fits else f"; lower --parallel.etp {axes.etp}")
        )
    if axes.virtual_stages > 1 and axes.pp == 1:
        problems.append(f"--parallel.virtual-stages {axes.virtual_stages}: needs --parallel.pp of at least 2")
    if axes.last_stage_layers and axes.pp == 1:
        problems.append(f"--parallel.last-stage-layers {axes.last_stage_layers}: needs --parallel.pp of at least 2")
    return problems


def sglang_python() -> Path | None:
    """An interpreter that has SGLang: what `launch/install.sh --sglang` makes, else this one; None if neither has."""
    python = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
    # The stamp is written when everything is there.
    if (python.parents[1] / ".spmdrl" / "sglang").is_file():
        return python
    return Path(sys.executable) if importlib.util.find_spec("sglang") is not None else None


def _rollout_problems(config: Config, world_size: int) -> list[str]:
    """world_size: ranks that sample; 0 where it is not known."""
    rollout, problems = config.rollout, []
    if rollout.tp > 1 and world_size % rollout.tp:
        problems.append(f"--rollout.tp {rollout.tp}: must divide {shown(config, world_size, 'sample')}")
    if rollout.engine == "sglang" and sglang_python() is None:
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


def _lora_problems(config: Config) -> list[str]:
    lora, engine, problems = config.lora, config.rollout.engine, []
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
    if engine == "auto":
        engine = "hf" if importlib.util.find_spec("vllm") is None or config.model.dtype == "float64" else "vllm"
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


def _algo_problems(config: Config) -> list[str]:
    # Deliberately late and upwards: the valid names live with the functions, which need torch, and `--help` must not.
    from spmdrl.algos.aggregate import AGGREGATIONS
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES, SEQUENCE_LOSSES
    from spmdrl.algos.selection import SELECTIONS

    algo, rollout, problems = config.algo, config.rollout, []
    if algo.advantage in GROUP_BASELINES and rollout.samples_per_prompt < 2:
        problems.append(
            f"--rollout.samples-per-prompt {rollout.samples_per_prompt}: must be at least 2, "
            f"as {algo.advantage} compares the samples of a prompt"
        )
    if algo.updates_per_step >= 1 and rollout.prompts_per_step % algo.updates_per_step:
        near = [n for n in range(1, rollout.prompts_per_step + 1) if rollout.prompts_per_step % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - algo.updates_per_step))[:3])
        problems.append(
            f"--algo.updates-per-step {algo.updates_per_step}: must divide prompts_per_step {rollout.prompts_per_step} "
            f"(each update takes an equal share), such as {', '.join(map(str, near))}"
        )
    if algo.kl_coef and config.reference.enabled == "off":
        problems.append(
            f"--reference.enabled off: KL needs the reference while --algo.kl-coef is {algo.kl_coef}; "
            "take auto, or kl-coef 0"
        )
    if algo.kl_controller == "adaptive" and not algo.kl_coef:
        problems.append(
            "--algo.kl-controller adaptive: steers the KL coefficient, so --algo.kl-coef must start above 0"
        )
    if algo.preset == "distill" and not config.reference.path:
        problems.append("--reference.path '': distill learns from a teacher; name its model")
    if algo.loss in SEQUENCE_LOSSES and algo.aggregation not in ("", "seq-mean-token-mean"):
        problems.append(
            f"--algo.aggregation {algo.aggregation}: {algo.loss} has one loss for a sequence and takes their mean; "
            "leave it empty" + (", or take gspo_token" if algo.loss == "gspo" else "")
        )
    if algo.length_adaptive is not None and algo.lam is not None:
        problems.append(f"--algo.lam {algo.lam}: --algo.length-adaptive sets lambda by length; give one of the two")
    if config.safety.cost_model and algo.advantage == "prime":
        problems.append("--safety.cost-model: prime has no cost; choose another --algo.advantage")
    problems += _range_problems(config)
    cost = config.safety.cost or config.safety.cost_model
    if cost and algo.advantage in ("gdpo", "prime", "remax"):
        problems.append(
            f"--algo.advantage {algo.advantage}: looks at more than the reward, so a cost (--safety.cost, "
            "--safety.cost-model) has no advantage of its own; take gae, grpo or rloo"
        )
    if algo.advantage == "remax" and config.shaping != type(config.shaping)(mask_cut=config.shaping.mask_cut):
        problems.append("--algo.advantage remax: the greedy baseline is not shaped; leave the shaping settings at rest")
    if algo.advantage == "gae" and 0 < config.run.steps <= config.critic.warmup_steps:
        problems.append(
            f"--critic.warmup-steps {config.critic.warmup_steps}: the policy learns nothing in a run of "
            f"--run.steps {config.run.steps}; lower it"
        )
    correction, old_logp = config.correction, algo.old_logp
    if config.filter.replay_steps and old_logp == "auto":
        old_logp = "rollout"
    if algo.advantage == "optimal_token_baseline" and old_logp == "rollout":
        problems.append(
            "--algo.advantage optimal_token_baseline: needs a pass of the policy before the update; leave out "
            "--filter.replay-steps and --algo.old-logp rollout"
        )
    if correction.kind not in ("none", "auto") and old_logp == "rollout" and algo.loss not in ("reinforce", "gpg"):
        problems.append(
            f"--correction.kind {correction.kind}: with --algo.old-logp rollout the ratio of {algo.loss} is the "
            "correction already; take none, or old-logp policy"
        )
    if config.filter.replay_steps and old_logp == "policy":
        problems.append(
            f"--filter.replay-steps {config.filter.replay_steps}: what is replayed was sampled by older weights, whose "
            "logp the engine reported: take --algo.old-logp rollout or auto"
        )
    if config.reward.model and algo.advantage == "remax":
        problems.append(f"--reward.model {config.reward.model}: remax's greedy baseline has no score of a model in it")
    if config.reward.model and (config.filter.resample != "none" or config.filter.keep):
        which = "filter.resample" if config.filter.resample != "none" else "filter.keep"
        problems.append(
            f"{flag(which)} {get(config, which)}: looks at rewards before --reward.model adds its score; take one"
        )
    if config.filter.replay_steps and algo.loss in SELECTIONS:
        problems.append(f"--filter.replay-steps {config.filter.replay_steps}: not with --algo.loss {algo.loss}")
    if config.filter.keep == "accuracy_range" and config.filter.low > config.filter.high:
        problems.append(f"--filter.low {config.filter.low}: must not be above --filter.high {config.filter.high}")
    problems += _name_problems("algo.advantage", algo.advantage, ADVANTAGES, file_allowed=True)
    problems += _name_problems("algo.loss", algo.loss, LOSSES, file_allowed=True)
    problems += _name_problems("algo.aggregation", algo.aggregation, AGGREGATIONS, file_allowed=False)
    problems += _name_problems("filter.keep", config.filter.keep, FILTERS, file_allowed=True)
    return problems


def _range_problems(config: Config) -> list[str]:
    """Bounds that are given in pairs."""
    correction, algo, problems = config.correction, config.algo, []
    pairs = {
        ("shaping.clip_low", "shaping.clip_high"): (config.shaping.clip_low, config.shaping.clip_high),
        ("correction.low", "correction.high"): (correction.low, correction.high),
        ("correction.reject_low", "correction.reject_high"): (correction.reject_low, correction.reject_high),
        ("algo.cov_low", "algo.cov_high"): (algo.cov_low, algo.cov_high),
    }
    for (low_name, high_name), (low, high) in pairs.items():
        if low is not None and high is not None and low > high:
            problems.append(f"{flag(low_name)} {low}: must not be above {flag(high_name)} {high}")
    if correction.kind.startswith("tis") and correction.low is not None:
        problems.append(f"--correction.low {correction.low}: {correction.kind} truncates from above only; take icepop")
    if correction.kind == "auto" and (correction.low is not None or correction.high is not None):
        bound = "low" if correction.low is not None else "high"
        problems.append(f"--correction.{bound} {getattr(correction, bound)}: name the --correction.kind that it bounds")
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if algo.kl_controller == "adaptive" and algo.kl_horizon < samples / 5:
        problems.append(
            f"--algo.kl-horizon {algo.kl_horizon}: must be at least a fifth of the {samples} samples of a step"
        )
    return problems


def _name_problems(name: str, value: str, valid: Collection[str], file_allowed: bool) -> list[str]:
    if not value or value in valid:
        return []
    if file_allowed and ".py" in value:
        return _file_problems(name, value, default="")
    near = nearest(value, valid)
    hint = f"; did you mean {near[0]}?" if near else "."
    more = ", or path/to/file.py:function" if file_allowed else ""
    return [f"{flag(name)} {value}: unknown{hint} Valid: {', '.join(valid)}{more}"]


def _file_problems(name: str, value: str, default: str) -> list[str]:
    """A user's function must be at the top of an existing file. The file is read, not run."""
    path, _, function = value.rpartition(":") if not value.endswith(".py") else (value, "", default)
    if not function:
        return [f"{flag(name)} {value}: name the function too, as in {value.rstrip(':')}:my_function"]
    if not Path(path).is_file():
        return [f"{flag(name)} {value}: there is no file {path} (from {Path.cwd()})"]
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError, OSError) as error:
        return [f"{flag(name)} {value}: {path} cannot be read as Python: {error}"]
    defined: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name) for alias in node.names}
    if function not in defined and "*" not in defined:
        near = nearest(function, sorted(defined))
        return [f"{flag(name)} {value}: {path} defines no {function}" + (f"; did you mean {near[0]}?" if near else "")]
    return []


def _other_problems(config: Config) -> list[str]:
    problems = []
    for flag_name, name in (("--run.name", config.run.name), ("--tracking.project", config.tracking.project)):
        if not name or name == "." or any(part in name for part in ("/", "\\", "..", "\0")):
            path = "; use --run.dir for a path" if flag_name == "--run.name" else ""
            problems.append(f"{flag_name} {name!r}: must be one folder name without / or ..{path}")
    for tracker in config.tracking.trackers:
        problems += _name_problems("tracking.trackers", tracker, TRACKERS, file_allowed=False)
    if ".py" in config.reward.function:
        problems += _file_problems("reward.function", config.reward.function, default="compute_score")
    if config.checkpoint.background and config.policy.backend == "megatron":
        problems.append(
            "--checkpoint.background True: not with the megatron backend, which has no copy of its state; leave it out"
        )
    if "eval/" in config.checkpoint.best and not config.eval.every:
        problems.append(f"--checkpoint.best {config.checkpoint.best}: is not measured with --eval.every 0")
    if config.eval.every > 0 and not config.data.eval:
        problems.append(f"--eval.every {config.eval.every}: needs --data.eval, or 0 for no evaluation")
    return problems


def plan_lines(config: Config, world_size: int) -> list[str]:
    """How the counts multiply out, printed at the start and by `--dry-run`.

    Token counts are upper bounds, of sequences of full length. Micro-batches are what packing such sequences takes on
    one rank; shorter ones pack tighter.
    """
    rollout, axes, updates = config.rollout, config.parallel, config.algo.updates_per_step
    shard = axes.dp_shard if axes.dp_shard != -1 else trainers(config, world_size) // axis_product(config)
    engines = samplers(config, world_size) // rollout.tp
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    data_ranks = axes.dp_replicate * shard
    rank_sequences = math.ceil(sequences / data_ranks)
    per_update = sequences // updates
    budget = config.policy.max_tokens_per_microbatch
    microbatches = math.ceil(math.ceil(per_update / data_ranks) / max(1, budget // longest))
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "dp_shard": shard, "sp": axes.sp, "cp": axes.cp}
    sizes["tp"] = axes.tp
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    return [
        f"ranks    {ranks_line(config, world_size, mesh + (f', ep {axes.ep}' if axes.ep > 1 else ''))}",
        f"rollout  {rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt:,} samples = "
        f"{sequences:,} sequences a step; {_count(engines, 'engine')} of {_count(rollout.tp, 'rank')}, "
        f"{_count(sequences / engines, 'sequence')} each",
        f"tokens   at most {longest:,} a sequence ({rollout.max_prompt_tokens:,} prompt + "
        f"{rollout.max_new_tokens:,} new), {sequences * longest:,} a step, {rank_sequences * longest:,} a rank",
        f"update   {_count(updates, 'optimizer step')} a step, each on {_count(per_update, 'sequence')} "
        f"({per_update / data_ranks:,.4g} a rank), in at most {_count(microbatches, 'micro-batch', 'micro-batches')} "
        f"of {budget:,} tokens on a rank",
        f"run      {_count(config.run.steps, 'step')} = {config.run.steps * sequences:,} sequences, "
        f"{_count(config.run.steps * updates, 'optimizer step')}; seed {config.run.seed}",
    ]


def _count(n: float, one: str, many: str = "") -> str:
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,.4g}"
    return f"{shown} {one if n == 1 else many or one + 's'}"
