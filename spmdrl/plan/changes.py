"""Lists changes to a job's settings for `sweep.py`. Each change sets one setting and any settings that depend on it."""

from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from spmdrl.config.fields import ConfigError, flag, get
from spmdrl.config.placement import samplers
from spmdrl.config.schema import Config
from spmdrl.plan.engine_boxes import EngineLayout
from spmdrl.plan.engine_bytes import kind_of
from spmdrl.session.job import job_of

SAMPLING = frozenset({"push", "rollout", "cache"})
TRAINING = frozenset({"logp", "update"})
EVERYWHERE = SAMPLING | TRAINING


@dataclass(frozen=True)
class Change:
    """Settings that change together, such as the pipeline stage count and the number of layers in the last stage."""

    values: tuple[tuple[str, Any], ...]
    """(dotted setting name, value) pairs. Changing the first setting requires changing the others."""
    frees: frozenset[str]
    """Places where the change can free memory: step phases, `cache` (the KV cache) or `host` (a node's host memory)."""

    @property
    def flags(self) -> str:
        """The change as command-line flags."""
        return " ".join(f"{flag(name)} {str(value).lower()}" for name, value in self.values)

    def __add__(self, other: "Change") -> "Change":
        """Return a change that applies both changes."""
        return Change(self.values + other.values, self.frees | other.frees)

    def conflicts(self, other: "Change") -> bool:
        """Return True if both changes set the same setting."""
        return not {name for name, _ in self.values}.isdisjoint(name for name, _ in other.values)


def changed(cfg: Config, change: Change) -> Config:
    """Return a copy of the settings with the change applied."""
    out = deepcopy(cfg)
    for name, value in change.values:
        section, _, last = name.rpartition(".")
        setattr(get(out, section), last, value)
    return out


def allowed(cfg: Config, world: int, change: Change, hf_config: Any) -> bool:
    """Return True if the changed settings pass all checks and their layout can shard the model."""
    made = changed(cfg, change)
    text = hf_config.get_text_config()
    try:
        job_of(made).check(made, world, here=False)
        if made.policy.backend == "megatron":
            from spmdrl.policy.megatron.families import describe
            from spmdrl.policy.megatron.layout import check_model
            from spmdrl.policy.megatron.policy import layout_of

            check_model(layout_of(made), describe(hf_config).settings)
        elif text.num_attention_heads % made.parallel.sp:
            return False
        EngineLayout(kind_of(made, True), hf_config, made.rollout.tp, made.rollout.dp, made.rollout.ep).check()
    except (ConfigError, ValueError):
        return False
    return True


def changes_of(cfg: Config, world: int, hf_config: Any) -> list[Change]:
    """Return the allowed changes, interleaved: the first change of each setting, then the second of each, and so on."""
    groups = [*([change] for change in _memory(cfg)), *_engine(cfg, world), *_layout(cfg, world, hf_config)]
    tried = [change for several in zip_longest(*groups) for change in several if change is not None]
    news = [c for c in tried if get(cfg, c.values[0][0]) != c.values[0][1]]
    return [change for change in dict.fromkeys(news) if allowed(cfg, world, change, hf_config)]


def _one(name: str, value: Any, frees: frozenset[str]) -> Change:
    return Change(((name, value),), frees)


def _memory(cfg: Config) -> list[Change]:
    """Return changes to policy settings that trade speed for memory, or memory for speed."""
    policy, longest = cfg.policy, cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    out = []
    if policy.offload == "none":
        out.append(_one("policy.offload", "host", SAMPLING))
    if policy.activation_checkpointing != "full":
        out.append(_one("policy.activation_checkpointing", "full", TRAINING))
    if policy.backend == "fsdp":
        other = "each" if policy.reduce_gradients == "last" else "last"
        out.append(_one("policy.reduce_gradients", other, TRAINING if other == "each" else frozenset()))
    if policy.backend == "megatron" and not policy.host_optimizer:
        out.append(_one("policy.host_optimizer", True, EVERYWHERE))
    divided = cfg.parallel.cp * cfg.parallel.sp
    for tokens in (policy.max_tokens_per_microbatch // 2, longest):
        if longest <= tokens < policy.max_tokens_per_microbatch and tokens % divided == 0:
            out.append(_one("policy.max_tokens_per_microbatch", tokens, TRAINING))
    if policy.offload == "host":
        out.append(_one("policy.offload", "disk", frozenset({"host"})))
        out.append(_one("policy.offload", "none", frozenset({"host"})))
    if policy.host_optimizer:
        out.append(_one("policy.host_optimizer", False, frozenset({"host"})))
    if policy.activation_checkpointing != "none":
        out.append(_one("policy.activation_checkpointing", "none", frozenset()))
    return out


def _engine(cfg: Config, world: int) -> list[list[Change]]:
    """Return changes to the engine's rank count and memory, one list per setting."""
    rollout, count = cfg.rollout, samplers(cfg, world)
    sizes = [n for n in (rollout.tp * 2, rollout.tp * 4, rollout.tp // 2) if n and count % n == 0]
    groups = [[_one("rollout.tp", n, SAMPLING if n > rollout.tp else frozenset()) for n in sizes]]
    if rollout.kv_cache_gib:
        smaller = [_one("rollout.kv_cache_gib", rollout.kv_cache_gib / 2, SAMPLING - {"cache"})]
        groups.append([*smaller, _one("rollout.kv_cache_gib", rollout.kv_cache_gib * 2, frozenset({"cache"}))])
    else:
        share = rollout.gpu_memory_utilization
        below = [x for x in (0.7, 0.5, 0.3) if x < share]
        above = [x for x in (0.7, 0.85) if x > share]
        groups.append([_one("rollout.gpu_memory_utilization", x, SAMPLING - {"cache"}) for x in below])
        groups.append([_one("rollout.gpu_memory_utilization", x, frozenset({"cache"})) for x in above])
    for name in ("ep", "dp"):
        if size := getattr(rollout, name):
            groups.append([_one(f"rollout.{name}", n, SAMPLING) for n in (size * 2, size // 2) if n])
    return groups


def _layout(cfg: Config, world: int, hf_config: Any) -> list[list[Change]]:
    """Return changes to the sizes of the training mesh axes, one list per axis."""
    axes = cfg.parallel
    rest = (("parallel.dp_shard", -1),) if axes.dp_shard != -1 else ()
    if cfg.policy.backend == "fsdp":
        # Fewer replicas make the shards smaller; more replicas reduce traffic between nodes.
        copies = [
            Change((("parallel.dp_replicate", n), *rest), EVERYWHERE if n < axes.dp_replicate else frozenset())
            for n in (1, 2)
        ]
        spread = [Change((("parallel.sp", n), *rest), TRAINING) for n in (axes.sp * 2, axes.sp * 4, 1)]
        return [spread, copies if axes.dp_replicate > 1 else copies[1:]]
    layers = hf_config.get_text_config().num_hidden_layers

    def sizes(axis: str, frees: frozenset[str]) -> list[Change]:
        size = getattr(axes, axis)
        return [
            Change(((f"parallel.{axis}", n), *rest), frees if n > size else frozenset())
            for n in (size * 2, size * 4, size // 2)
            if n
        ]

    deeper = [
        Change((("parallel.pp", n), *_stages(cfg, n, layers), *rest), EVERYWHERE if n > axes.pp else frozenset())
        for n in (axes.pp * 2, axes.pp * 4, axes.pp // 2)
        if 0 < n <= layers
    ]
    return [
        sizes("ep", EVERYWHERE),
        deeper,
        sizes("cp", TRAINING),
        sizes("tp", EVERYWHERE),
        [_one("parallel.virtual_stages", n, TRAINING if n == 1 else frozenset()) for n in (1, 2)],
    ]


def _stages(cfg: Config, pp: int, layers: int) -> list[tuple[str, Any]]:
    """Return the settings that `pp` stages require, such as a shorter last stage for an uneven split."""
    others = pp - 1
    if layers % pp == 0 or pp == 1:
        last = 0
    else:
        fits = [n for n in range(1, layers - others + 1) if (layers - n) % others == 0]
        last = min(fits, key=lambda n: (max(n, (layers - n) // others), n), default=0)
    out: list[tuple[str, Any]] = []
    if last != cfg.parallel.last_stage_layers:
        out.append(("parallel.last_stage_layers", last))
    if cfg.parallel.first_stage_layers:
        out.append(("parallel.first_stage_layers", 0))
    if cfg.parallel.virtual_stages > 1:
        out.append(("parallel.virtual_stages", 1))
    return out
