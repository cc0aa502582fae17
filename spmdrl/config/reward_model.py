"""Settings of the training of a reward model, and the rules for them."""

from dataclasses import dataclass, field
from functools import partial

from tyro.conf import Suppress

from spmdrl.config.fields import refuse, shown
from spmdrl.config.preference import PreferenceDataConfig
from spmdrl.config.rules import _at_least_0, _Rule
from spmdrl.config.schema import LoraConfig, OptimizerConfig
from spmdrl.config.supervised import GenerateConfig, SupervisedConfig, SupervisedRunConfig, supervised_problems


@dataclass
class ScoredDataConfig(PreferenceDataConfig):
    """Rows: pairs of responses."""

    label_column: Suppress[str] = "label"
    margin_column: str = "margin"
    """Column with the number by which the better response is better, if there is one."""
    output_column: str = "output"
    """With several `--reward-model.outputs`: column with the name of the one that a row's preference is of."""


@dataclass
class RewardModelMethod:
    """The head and the loss."""

    outputs: tuple[str, ...] = ()
    """Names of the scores, each learnt from the rows that name it. Empty: one score."""
    centre: float = 0.0
    """Weight of the squared sum of both scores of a pair, which keeps scores around 0 (0.01 is usual)."""


@dataclass
class RewardModelConfig(SupervisedConfig):
    """Training of a reward model on preferences. Every rank runs this same program."""

    run: SupervisedRunConfig = field(default_factory=partial(SupervisedRunConfig, name="reward_model"))
    optimizer: OptimizerConfig = field(default_factory=partial(OptimizerConfig, lr=1e-5))
    lora: Suppress[LoraConfig] = field(default_factory=LoraConfig)
    data: ScoredDataConfig = field(default_factory=ScoredDataConfig)  # type: ignore[assignment]
    generate: Suppress[GenerateConfig] = field(default_factory=GenerateConfig)
    reward_model: RewardModelMethod = field(default_factory=RewardModelMethod)


OWN_RULES: dict[str, _Rule] = {"reward_model.centre": _at_least_0}


def check_reward_model(config: RewardModelConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    names = config.reward_model.outputs
    problems = supervised_problems(config, world_size, OWN_RULES, 2 * config.data.max_tokens)
    if len(set(names)) < len(names) or any(name in ("", "mean") or name.startswith("LABEL_") for name in names):
        problems.append(f"--reward-model.outputs {shown(names)}: give each score a name of its own, and not mean")
    if config.policy.backend == "megatron":
        problems.append("--policy.backend megatron: a new head is of the fsdp backend; take fsdp")
    if config.lora.rank:
        problems.append(f"--lora.rank {config.lora.rank}: a new head has no adapter; take 0")
    refuse(problems)
