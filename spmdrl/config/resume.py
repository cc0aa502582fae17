"""Tells which settings may change when a run goes on from its folder, and how two sets of them differ.

Laws 2 and 3 say which: layout, machine and pace do not change the answer. All other settings do, and a run that went
on with others would be neither the first run nor the second.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.classifier import scored_by
from spmdrl.config.dump import to_dict
from spmdrl.config.engines import engine_name
from spmdrl.config.environment import acts_by
from spmdrl.config.fields import flag, leaves, shown
from spmdrl.config.given import AIM, CONTROLLER, METHOD, POWER, with_power, with_target
from spmdrl.config.judge import graded_by
from spmdrl.config.presets import with_preset
from spmdrl.config.rewards import weighted
from spmdrl.config.schema import Config, TrainingConfig
from spmdrl.config.yaml_file import SUFFIXES

FREE: dict[str, tuple[str, ...]] = {
    "where a run is, how long it goes on, how it is watched": (
        *("run.dir", "run.name", "run.steps", "run.device", "run.timeout", "run.lockstep_debug", "run.fresh"),
        *("run.allow_changes", "run.spike_factor", "run.deterministic", "run.grace"),
    ),
    "what is seen and kept of it": ("eval.*", "generate.*", "checkpoint.*", "tracking.*", "data.eval", "policy.mtp"),
    "law 2: which ranks hold what": ("parallel.*",),
    "law 2: how a rank computes the same": (
        *("policy.max_tokens_per_microbatch", "policy.activation_checkpointing"),
        *("policy.host_optimizer", "policy.reshard_after_forward", "policy.attention", "policy.share_prompts"),
        *("policy.reduce_gradients", "model.self_check"),
        *("policy.chunked_loss", "policy.liger", "policy.offload", "reference.offload", "lora.push"),
    ),
    "law 3: draws of an engine belong to the data, wherever and beside whatever it makes them": (
        *("rollout.tp", "rollout.dp", "rollout.ep", "rollout.assignment", "rollout.max_sequences"),
        "rollout.kv_cache_gib",
        *("rollout.gpu_memory_utilization", "rollout.sleep_level", "rollout.deterministic", "rollout.push_bucket_mib"),
        *("rollout.enforce_eager", "rollout.sglang_push"),
    ),
    "limits: a run that they did not stop is the same run": (
        *("rollout.logp_diff_warn", "rollout.logp_diff_stop", "filter.max_rounds", "filter.bad_sample"),
        *("optimizer.bad_steps", "reward.workers", "reward.timeout", "reward.on_timeout", "model.trust_remote_code"),
        *("reward.max_ungraded", "sandbox.*", "data.max_refused"),
    ),
}
"""Reason -> settings, or whole sections, that may differ."""
FIXED = (
    *("run.seed", "model.path", "model.dtype", "optimizer.lr", "optimizer.betas", "optimizer.eps"),
    *("optimizer.weight_decay", "optimizer.clip_grad_norm", "optimizer.schedule", "optimizer.warmup_steps"),
    *("optimizer.min_lr_ratio", "optimizer.decay_share"),
    # The state of an optimizer is in its backend's form.
    *("policy.backend", "policy.moe_aux_loss", "policy.moe_bias_rate"),
    *("lora.rank", "lora.alpha", "lora.targets", "reference.enabled", "reference.path", "reference.refresh_every"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_prompt_tokens", "rollout.max_new_tokens"),
    *("rollout.temperature", "rollout.top_p", "rollout.oversample", "rollout.partial_steps", "rollout.staleness"),
    *("rollout.routing_replay", "rollout.quantization"),
    # From the same seed and logits another engine draws another token.
    "rollout.engine",
    *("algo.*", "correction.*", "shaping.*", "critic.*", "process_reward.*", "safety.*"),
    *("filter.keep", "filter.metric", "filter.low", "filter.high", "filter.resample"),
    *("filter.replay_steps", "data.train", "data.prompt_column", "data.answer_column", "data.template", "data.system"),
    *("data.prefill", "data.chat", "data.chat_template", "data.template_kwargs", "data.limit", "data.shuffle"),
    *("env", "reward.function", "reward.more", "reward.gate", "reward.kwargs"),
    *("reward.model", "reward.model_coef"),
    *("data.messages_column", "data.completion_column", "data.text_column", "data.tools_column"),
    *("data.rows_per_step", "data.epochs", "data.max_tokens", "data.too_long"),
    *("data.chosen_column", "data.rejected_column", "data.label_column", "data.margin_column"),
    *(
        "preference.*",
        "reference.mix",
        "reference.precompute",
        "distill.*",
        "teacher.*",
        "reward_model.*",
        "data.output_column",
        "data.steps_column",
        "data.labels_column",
    ),
    *("sft.train_on", "sft.loss", "sft.neftune", "sft.add_tokens"),
)
"""Settings, or whole sections, that change the answer."""


def listed(name: str, names: tuple[str, ...]) -> bool:
    """True where the setting or its section is among the names."""
    return name in names or f"{name.split('.')[0]}.*" in names


def may_change(name: str, schedule: str) -> bool:
    """True for a setting that a resume may change. schedule: `optimizer.schedule`, which may end with the run."""
    if name == "run.steps":
        return schedule == "constant"
    return any(listed(name, names) for names in FREE.values())


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of nested sections."""
    if not isinstance(nested, dict):
        return {prefix[:-1]: nested}
    return {k: v for name, value in nested.items() for k, v in flat(value, f"{prefix}{name}.").items()}


def settled(cfg: TrainingConfig) -> dict[str, Any]:
    """The settings that a resume must keep, redacted; the engine is the one that runs."""
    return {k: v for k, v in flat(to_dict(lasting(cfg))).items() if not may_change(k, cfg.optimizer.schedule)}


def file_digests(cfg: TrainingConfig) -> dict[str, list[str]]:
    """Setting -> [file, hash of its content] where a setting that a resume must keep names a file of the user's own.

    Such are functions in Python (`path/to/file.py:function`), templates in jinja, judges and files of reward models;
    what they import or name is not looked at.

    Raises:
        ValueError: a file that cannot be read.
    """
    found = {}
    for name, value in flat(to_dict(cfg)).items():
        for i, each in enumerate(value if isinstance(value, list) else [value]):
            word = weighted(each)[0] if name == "reward.more" else each
            path = word.rpartition(":")[0] if isinstance(word, str) and ".py:" in word else word
            named = isinstance(path, str) and path.endswith((".py", ".jinja", *SUFFIXES))
            if named and not may_change(name, ""):
                try:
                    if path.endswith(SUFFIXES):
                        read = {"reward.model": scored_by, "env": acts_by}.get(name, graded_by)
                        content = read(path).encode()
                    else:
                        content = Path(path).expanduser().read_bytes()
                except OSError as error:
                    raise ValueError(f"{flag(name)} {each}: cannot read {path} ({error.strerror})") from error
                place = f"{name} {i}" if isinstance(value, list) else name
                found[place] = [path, hashlib.sha256(content).hexdigest()]
    return found


OWN_SECTIONS = {
    "spmdrl.distill": "distill",
    "spmdrl.sft": "sft",
    "spmdrl.reward_model": "reward_model",
    "spmdrl.online_preference": "preference rollout",
    "spmdrl.preference": "preference",
    "spmdrl.train": "rollout",
}
"""Entry point -> sections of settings that tell its runs from those of the entry points below it."""


def entry_point(sections: Iterable[Any]) -> str:
    """Return the entry point whose settings have these sections; empty where it is none's."""
    there = set(sections)
    return next((name for name, own in OWN_SECTIONS.items() if there.issuperset(own.split())), "")


@dataclass
class Differences:
    """Differences between a run folder's settings and a run's."""

    other: str = ""
    """The entry point that wrote them, where it is another one than this run's."""
    lines: list[str] = field(default_factory=list)
    """Settings that a resume must keep, one line each: `--optimizer.lr: 0.0002 there, 0.001 here`."""
    notes: list[str] = field(default_factory=list)
    """Further lines for the user."""


def differences(path: Path, cfg: TrainingConfig, given: Collection[str] = ()) -> Differences:
    """Compare a run folder's `config.yaml` with the settings of this run; problems with the file become notes.

    A setting that the file lacks (it may be older than the setting) counts as its default. given: settings that a user
    named. ChatML that nobody named is what a folder without a template rendered its messages by.
    """
    out, there = Differences(), {}
    try:
        nested = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(nested, dict):
            raise TypeError("it holds no settings")
        there = flat(nested)
        if there.get(CONTROLLER) in ("fixed", "adaptive"):
            there = with_target(there, there[CONTROLLER] == "adaptive", float(AIM))
        if (power := there.pop(POWER, None)) is not None and METHOD in there:
            there[METHOD] = with_power(there[METHOD], power)
        wrote = entry_point(nested)
        out.other = wrote if wrote != entry_point(each.name for each in fields(cfg)) else ""
        unknown = sorted(set(there) - set(leaves(type(cfg))))
        if unknown:
            out.notes.append(f"{path} has settings that are not known here: {', '.join(unknown)}")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, AttributeError, TypeError) as error:
        what = " ".join(str(error).split())
        out.notes.append(f"{path} cannot be read ({what}): its settings are taken to be the defaults")
    plain = with_preset(type(cfg)(), cfg.algo.preset) if isinstance(cfg, Config) else type(cfg)()
    defaults = flat(to_dict(plain))
    for name, here in settled(cfg).items():
        then = there.get(name, defaults.get(name))
        why = ""
        if name == "rollout.engine" and isinstance(cfg, Config):
            # A file by another hand may say auto, which is taken for what it is here.
            then = then if then != "auto" else engine_name(replace(cfg, rollout=replace(cfg.rollout, engine="auto")))
            why = " (by auto)" if cfg.rollout.engine == "auto" else ""
        implied = name == "data.chat_template" and name not in given and (then, here) == ("", "chatml")
        if then != here and not implied:
            out.lines.append(f"{flag(name)}: {shown(then)} there, {shown(here)} here{why}")
    return out


def lasting(cfg: TrainingConfig) -> TrainingConfig:
    """The settings without those meant for this start alone, and with the engine that `auto` resolves to."""
    cfg = replace(cfg, run=replace(cfg.run, fresh=False, allow_changes=False))
    if isinstance(cfg, Config):
        cfg = replace(cfg, rollout=replace(cfg.rollout, engine=engine_name(cfg)))
    return cfg
