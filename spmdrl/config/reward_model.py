"""Settings for reward-model training, with their rules."""

from dataclasses import dataclass
from typing import Literal

from spmdrl.config.declare import NOT_NEGATIVE, Job, hides, section, setting
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.preference import PAIRS, PreferenceDataConfig
from spmdrl.config.schema import OptimizerConfig
from spmdrl.config.supervised import SupervisedConfig, SupervisedRunConfig, supervised_problems


@hides(Job.REWARD_MODEL)
@dataclass
class ScoredDataConfig(PreferenceDataConfig):
    """Source of the rows: pairs of responses, or responses with labelled steps."""

    margin_column: str = setting("margin", only_with=lambda c: c.reads_pairs)
    """Column with the margin by which the chosen response should outscore the rejected one. The column is optional."""
    output_column: str = setting("output", only_with=lambda c: c.reads_pairs and len(c.reward_model.outputs) > 1)
    """Column that names which of several `--reward-model.outputs` the row's preference applies to."""
    steps_column: str = setting("completions", only_with=lambda c: not c.reads_pairs)
    """Column with the steps of a response, as a list of texts."""
    labels_column: str = setting("labels", only_with=lambda c: not c.reads_pairs)
    """Column with a list of labels, one per step: true or false, or a number in [0, 1]. Steps whose label is null are
    not trained on."""


@dataclass
class RewardModelMethod:
    """The kind of rows, the scores and the loss of the reward model."""

    rows: Literal["pairs", "steps"] = "pairs"
    """Kind of rows: `pairs` of responses or, for a process reward model, responses with labelled `steps`."""
    separator: str = setting("\n\n", only_with=lambda c: not c.reads_pairs)
    """Text that ends every step but the last. A step's score is read at the token that contains the step's last
    character."""
    last_step: bool = setting(False, only_with=lambda c: not c.reads_pairs)
    """Train only on the label of each response's last step."""
    outputs: tuple[str, ...] = setting((), only_with=lambda c: c.reads_pairs)
    """Names of the scores that the model outputs; each is trained on the rows that name it. Empty: a single score."""
    centre: float = setting(0.0, NOT_NEGATIVE, only_with=lambda c: c.reads_pairs)
    """Weight of a loss that keeps scores centred around 0: the squared sum of a pair's scores. A common value is 0.01.
    0: off."""


@hides(Job.REWARD_MODEL)
@dataclass
class RewardModelConfig(SupervisedConfig):
    """Reward-model training on pairs of responses or on labelled steps. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig, name="reward_model")
    optimizer: OptimizerConfig = section(OptimizerConfig, lr=1e-5)
    data: ScoredDataConfig = section(ScoredDataConfig, train=PAIRS)  # type: ignore[assignment]
    reward_model: RewardModelMethod = section(RewardModelMethod)

    @property
    def reads_pairs(self) -> bool:
        """True if rows contain two responses, or False if they contain labelled steps."""
        return self.reward_model.rows == "pairs"


def check_reward_model(config: RewardModelConfig, world_size: int) -> None:
    """Check all settings together. Raises ConfigError with one line per problem."""
    names, longest = config.reward_model.outputs, config.data.max_tokens * (2 if config.reads_pairs else 1)
    problems = Problems(config, supervised_problems(config, world_size, longest))
    if len(set(names)) < len(names) or any(name in ("", "mean") or name.startswith("LABEL_") for name in names):
        problems.add(
            "reward_model.outputs", "give each score a different name, other than mean and LABEL_0, LABEL_1, ..."
        )
    problems += [] if config.reads_pairs else _step_problems(config)
    if config.policy.backend == "megatron":
        problems.add("policy.backend", "only the fsdp backend trains a new head; take fsdp")
    if config.lora.rank:
        problems.add("lora.rank", "a new head cannot be trained with adapters; take 0")
    refuse(problems)


def _step_problems(config: RewardModelConfig) -> list[str]:
    """Return a line for each setting that is invalid for a process reward model."""
    chosen, problems = config.reward_model, []
    if not chosen.separator:
        problems.append("--reward-model.separator: is empty; name the text that ends steps, or leave the setting out")
    if "\\n" in chosen.separator or "\\t" in chosen.separator:
        problems.append(
            f"--reward-model.separator {chosen.separator}: contains a backslash and a letter; for line breaks write "
            f"$'{chosen.separator}' in a shell, or a text in double quotes in YAML"
        )
    pairs = [spec for spec in (*config.data.train, config.data.eval) if spec.startswith("builtin:reverse-pairs")]
    if pairs:
        known = "such as builtin:reverse-steps"
        problems.append(f"{pairs[0]} holds pairs: name rows of steps by --data.train and --data.eval, {known}")
    return problems
