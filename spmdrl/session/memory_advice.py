"""Flags that would free memory of a device that has no room."""

from dataclasses import dataclass

from spmdrl.config.engines import sleep_level
from spmdrl.config.schema import Config
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.storage import moves
from spmdrl.spmd.world import World

GIB = 1 << 30


@dataclass(frozen=True)
class Held:
    """Bytes on a rank's device when room ran out."""

    on_device: dict[str, int]
    """By owner."""
    cache: int
    """The engine's KV cache, when it is there."""
    weights: int
    """The engine's weights, when they are there."""
    trained: set[str]
    """Models that learn."""
    training: int
    """The most that training took beside what has an owner."""
    shared: bool
    """The rank trains and samples."""
    samples: bool
    """The rank has an engine."""


def three_flags(cfg: Config, world: World, held: Held, phase: str) -> list[str]:
    """The three flags that would free most, the best one first. phase: rollout or training."""
    learns = sum(size for owner, size in held.on_device.items() if owner.split()[0] in held.trained)
    now = [held.on_device.get(owner, 0) for owner in ("KV cache", "engine weights")]
    frozen = sum(held.on_device.values()) - learns - sum(now)
    if phase == "rollout":
        options = while_sampling(cfg, world, held, learns, frozen)
    else:
        options = while_training(cfg, world, held, learns, sum(now))
    # Those that free nothing by the table come last, in this order.
    options.append((0, f"more ranks for --parallel.dp-shard than {len(world.roles.trainers)}"))
    options.append((0, f"--rollout.push-bucket-mib below {cfg.rollout.push_bucket_mib}"))
    if cfg.model.dtype != "bfloat16":
        options.append((0, "--model.dtype bfloat16"))
    options.append((0, f"--rollout.max-sequences below {cfg.rollout.max_sequences}"))
    return [flag for _, flag in sorted(options, key=lambda option: -option[0])[:3]]


def while_sampling(cfg: Config, world: World, held: Held, learns: int, frozen: int) -> list[tuple[float, str]]:
    """(bytes that it would free, what to set). learns, frozen: bytes of the models that train and of the others."""
    away = "disk" if kind_of(world.device) == "cpu" else "host"
    options: list[tuple[float, str]] = []
    if not moves(cfg.policy.offload, world.device) and held.shared:
        options.append((learns, f"--policy.offload {away}"))
    if not moves(cfg.reference.offload, world.device) and held.shared and frozen:
        options.append((frozen, f"--reference.offload {away}"))
    if held.cache and held.samples:
        if cfg.rollout.kv_cache_gib or kind_of(world.device) == "cpu":
            smaller = f"--rollout.kv-cache-gib {held.cache / 2 / GIB:.2g}"
        else:
            smaller = f"--rollout.gpu-memory-utilization below {cfg.rollout.gpu_memory_utilization}"
        options.append((held.cache / 2, smaller))
    options.append((held.weights / 2, f"a larger --rollout.tp than {cfg.rollout.tp}"))
    return options


def while_training(cfg: Config, world: World, held: Held, learns: int, engine: int) -> list[tuple[float, str]]:
    """(bytes that it would free, what to set). learns: bytes of the models that train; engine: those of the engine."""
    options: list[tuple[float, str]] = []
    level = sleep_level(cfg, kind_of(world.device) == "cpu")
    if held.shared and level < 2:
        options.append((engine, f"--rollout.sleep-level {2 if level else 1}"))
    tokens = cfg.policy.max_tokens_per_microbatch
    options.append((max(held.training, learns) / 2, f"--policy.max-tokens-per-microbatch below {tokens}"))
    if cfg.policy.activation_checkpointing == "none":
        options.append((max(held.training, learns) / 3, "--policy.activation-checkpointing full"))
    sharded = len(world.roles.trainers) > cfg.parallel.dp_replicate
    if cfg.policy.backend == "fsdp" and cfg.policy.reduce_gradients == "last" and sharded:
        options.append((held.training / 3, "--policy.reduce-gradients each"))
    if not cfg.policy.reshard_after_forward:
        options.append((learns / 4, "--policy.reshard-after-forward true"))
    return options
