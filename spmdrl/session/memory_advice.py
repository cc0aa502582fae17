"""Suggests flags that would free memory after a device allocation failed."""

from spmdrl.config.backends import way_to_gather
from spmdrl.config.engines import sleep_level
from spmdrl.config.schema import Config
from spmdrl.hub.build import DTYPES
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.storage import moves
from spmdrl.spmd.world import World

GIB = 1 << 30


def three_flags(
    cfg: Config,
    world: World,
    phase: str,
    held: dict[str, int],
    engine: dict[str, int],
    trained: set[str],
    training: int,
    shared: bool,
) -> list[str]:
    """Return the three flags that would free the most memory, best first.

    Args:
        cfg: the run's settings.
        world: the run's ranks.
        phase: `rollout` or `training`.
        held: bytes on the rank's device by owner, such as `policy parameters`.
        engine: bytes of the engine's `KV cache` and `engine weights` while it is awake; empty without an engine.
        trained: names of the models that are trained.
        training: peak bytes of a training phase that have no owner, such as activations.
        shared: True if the rank both trains and samples.
    """
    on_cpu = kind_of(world.device) == "cpu"
    learns = sum(size for owner, size in held.items() if owner.split()[0] in trained)
    awake = sum(held.get(owner, 0) for owner in ("KV cache", "engine weights"))
    frozen = sum(held.values()) - learns - awake
    options: list[tuple[float, str]] = []
    """Pairs of (bytes freed, flag)."""
    if phase == "rollout":
        away, cache = "disk" if on_cpu else "host", engine.get("KV cache", 0)
        if shared and not moves(cfg.policy.offload, world.device):
            options.append((learns, f"--policy.offload {away}"))
        if shared and frozen and not moves(cfg.reference.offload, world.device):
            options.append((frozen, f"--reference.offload {away}"))
        if cache and (cfg.rollout.kv_cache_gib or on_cpu):
            options.append((cache / 2, f"--rollout.kv-cache-gib {cache / 2 / GIB:.2g}"))
        elif cache:
            share = cfg.rollout.gpu_memory_utilization
            options.append((cache / 2, f"--rollout.gpu-memory-utilization below {share}"))
        options.append((engine.get("engine weights", 0) / 2, f"a larger --rollout.tp than {cfg.rollout.tp}"))
    else:
        level, tokens = sleep_level(cfg, on_cpu), cfg.policy.max_tokens_per_microbatch
        if shared and level < 2:
            options.append((awake, f"--rollout.sleep-level {2 if level else 1}"))
        options.append((max(training, learns) / 2, f"--policy.max-tokens-per-microbatch below {tokens}"))
        if cfg.policy.activation_checkpointing == "none":
            options.append((max(training, learns) / 3, "--policy.activation-checkpointing full"))
        sharded = len(world.roles.trainers) > cfg.parallel.dp_replicate
        if cfg.policy.backend == "fsdp" and cfg.policy.reduce_gradients == "last" and sharded:
            options.append((training / 3, "--policy.reduce-gradients each"))
        whole = _forward_bytes(cfg, world, held.get("policy parameters", 0))
        if cfg.policy.backend == "fsdp" and way_to_gather(cfg.policy.gather, whole) != "layers":
            options.append((whole, "--policy.gather layers"))
    # Flags whose savings cannot be computed from the table come last, in this order.
    options.append((0, f"more ranks for --parallel.dp-shard than {len(world.roles.trainers)}"))
    options.append((0, f"--rollout.push-bucket-mib below {cfg.rollout.push_bucket_mib}"))
    if cfg.model.dtype != "bfloat16":
        options.append((0, "--model.dtype bfloat16"))
    options.append((0, f"--rollout.max-sequences below {cfg.rollout.max_sequences}"))
    return [flag for _, flag in sorted(options, key=lambda option: -option[0])[:3]]


def _forward_bytes(cfg: Config, world: World, shard: int) -> int:
    """Return the bytes of all policy weights in the model's dtype. shard: bytes of this rank's master weights."""
    width = DTYPES[cfg.model.dtype].itemsize
    return shard * (len(world.roles.trainers) // cfg.parallel.dp_replicate) * width // max(width, 4)
