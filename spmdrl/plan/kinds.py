"""Groups the ranks of a job into kinds. One rank of each kind is planned and represents all others of that kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config.schema import Config
from spmdrl.spmd.roles import roles_of


@dataclass(frozen=True)
class Kind:
    """A group of ranks represented by one planned rank. The others are assumed to need no more memory or traffic."""

    name: str
    rank: int
    """The rank that is planned for this kind."""
    ranks: int
    """Number of ranks in this kind."""
    stage: int = 0
    """Pipeline stage of the planned rank."""
    alike: tuple[int, ...] = (0,)
    """All pipeline stages in this kind, each with the same number of ranks."""


def folder_of(path: str, trust_remote_code: bool = False) -> Path:
    """Return the folder that contains a model's config.json; the weights need not be there.

    Raises:
        ValueError: no folder with a config.json was found; the message suggests what to do.
    """
    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.shipped import shipped

    local = Path(path).expanduser()
    return local if (local / "config.json").is_file() else shipped(path) or resolve(path, trust_remote_code)


def config_of(cfg: Config) -> Any:
    """Return the transformers config of the policy model. Raises ValueError if its config.json is not found."""
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    return AutoConfig.from_pretrained(folder_of(cfg.model.path, trust), trust_remote_code=trust)


def stages_of(cfg: Config, hf_config: Any) -> tuple[list[int], list[bool]]:
    """Return the number of layers per pipeline stage, and for each layer whether it has experts.

    With FSDP there is one stage, and all layers are reported as False, because experts do not make FSDP ranks differ.
    """
    text = hf_config.get_text_config()
    count = text.num_hidden_layers
    if cfg.policy.backend != "megatron":
        return [count], [False] * count
    from spmdrl.policy.megatron.families import describe
    from spmdrl.policy.megatron.layout import as_list, check_model, stages
    from spmdrl.policy.megatron.policy import layout_of

    settings = describe(hf_config).settings
    layout = layout_of(cfg)
    check_model(layout, settings)
    freq: Any = settings.get("moe_layer_freq", 1) if settings.get("num_moe_experts") else 0
    sparse = as_list(freq) if isinstance(freq, list) else [bool(freq)] * count
    return stages(layout, count), [bool(x) for x in sparse]


def kinds_of(cfg: Config, world: int, layers: list[int], sparse: list[bool]) -> list[Kind]:
    """Return the kinds of ranks in a job.

    Among pipeline stages with identical layers, only the first is planned, as it has the most micro-batches in flight.
    Among the ranks of one stage, only the first is planned: FSDP pads all shards to the same length, and the first rank
    has the most rows.

    Args:
        cfg: the run's settings.
        world: number of ranks of the job.
        layers: number of layers per pipeline stage. Without pipeline parallelism, the list has one number.
        sparse: for each layer of the model, whether it has experts.
    """
    roles = roles_of(cfg.parallel, world)
    each = len(roles.trainers) // len(layers)
    found: dict[tuple, list[int]] = {}
    first = 0
    for stage, count in enumerate(layers):
        mine = tuple(sparse[first : first + count])
        first += count
        found.setdefault((stage == 0, stage == len(layers) - 1, mine), []).append(stage)
    kinds = []
    for (begins, ends, _), stages in found.items():
        name = "ranks that train" if len(layers) == 1 else _name_of(stages, begins, ends)
        kinds.append(Kind(name, roles.trainers[stages[0] * each], each * len(stages), stages[0], tuple(stages)))
    if roles.scorers not in (roles.trainers, roles.samplers):
        kinds.append(Kind("ranks that score", roles.scorers[0], len(roles.scorers)))
    if roles.split:
        kinds.append(Kind("ranks that sample", roles.samplers[0], len(roles.samplers)))
    return kinds


def _name_of(stages: list[int], first: bool, last: bool) -> str:
    if first or last:
        return "first stage" if first else "last stage"
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
