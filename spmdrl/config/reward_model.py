"""Settings of the training of a reward model, and the rules for them."""

from dataclasses import dataclass
from typing import Literal

from spmdrl.config.declare import NOT_NEGATIVE, REWARD_MODEL, hides, section, setting
from spmdrl.config.fields import flag, refuse, shown
from spmdrl.config.preference import PreferenceDataConfig
from spmdrl.config.schema import OptimizerConfig
from spmdrl.config.supervised import SupervisedConfig, SupervisedRunConfig, supervised_problems


@hides(REWARD_MODEL)
@dataclass
class ScoredDataConfig(PreferenceDataConfig):
    """Rows: pairs of responses, or responses whose steps have labels."""

    margin_column: str = "margin"
    """Column with the number by which the better response is better, if there is one."""
    output_column: str = "output"
    """With several `--reward-model.outputs`: column with the name of the one that a row's preference is of."""
    steps_column: str = "completions"
    """Column with the steps of a response, a list of texts."""
    labels_column: str = "labels"
    """Column with a label for each step: true or false, or a number in [0, 1]; null where it is not trained."""


@dataclass
class RewardModelMethod:
    """The head and the loss."""

    rows: Literal["pairs", "steps"] = "pairs"
    """Rows to learn from: `pairs` of responses, or labelled `steps`, which make a process reward model."""
    separator: str = "\n\n"
    """Text that ends a step but the last one; a step's score is read at the token with its last character."""
    last_step: bool = False
    """Train on the label of the last step of each response alone."""
    outputs: tuple[str, ...] = ()
    """Names of the scores, each learnt from the rows that name it. Empty: one score."""
    centre: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the squared sum of both scores of a pair, which keeps scores around 0 (0.01 is usual)."""


@hides(REWARD_MODEL)
@dataclass
class RewardModelConfig(SupervisedConfig):
    """Training of a reward model on preferences. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig, name="reward_model")
    optimizer: OptimizerConfig = section(OptimizerConfig, lr=1e-5)
    data: ScoredDataConfig = section(ScoredDataConfig)  # type: ignore[assignment]
    reward_model: RewardModelMethod = section(RewardModelMethod)


def check_reward_model(config: RewardModelConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    names, steps = config.reward_model.outputs, config.reward_model.rows == "steps"
    problems = supervised_problems(config, world_size, config.data.max_tokens * (1 if steps else 2))
    if len(set(names)) < len(names) or any(name in ("", "mean") or name.startswith("LABEL_") for name in names):
        problems.append(f"--reward-model.outputs {shown(names)}: give each score a name of its own, and not mean")
    problems += _of_steps(config) if steps else _of_pairs(config)
    if config.policy.backend == "megatron":
        problems.append("--policy.backend megatron: a new head is of the fsdp backend; take fsdp")
    if config.lora.rank:
        problems.append(f"--lora.rank {config.lora.rank}: a new head has no adapter; take 0")
    refuse(problems)


def _of_steps(config: RewardModelConfig) -> list[str]:
    """One line for each setting to change about a process reward model."""
    chosen, problems = config.reward_model, []
    if not chosen.separator:
        problems.append("--reward-model.separator: is empty; name the text that ends steps, or leave the setting out")
    if "\\n" in chosen.separator or "\\t" in chosen.separator:
        problems.append(
            f"--reward-model.separator {chosen.separator}: holds a backslash and a letter; for line breaks write "
            f"$'{chosen.separator}' in a shell, or a text in double quotes in YAML"
        )
    problems += _unread(config, ("chosen_column", "rejected_column", "margin_column", "output_column"), "pairs")
    for name in ("outputs", "centre"):
        if getattr(chosen, name):
            problems.append(f"--reward-model.{name}: is of pairs, and --reward-model.rows is steps; leave it out")
    pairs = [spec for spec in (*config.data.train, config.data.eval) if spec.startswith("builtin:reverse-pairs")]
    if pairs:
        known = "such as builtin:reverse-steps"
        problems.append(f"{pairs[0]} holds pairs: name rows of steps by --data.train and --data.eval, {known}")
    return problems


def _of_pairs(config: RewardModelConfig) -> list[str]:
    """One line for each setting to change that only labelled steps read, or several outputs."""
    chosen, plain = config.reward_model, RewardModelMethod()
    others = _unread(config, ("steps_column", "labels_column"), "steps")
    if len(chosen.outputs) < 2 and config.data.output_column != ScoredDataConfig().output_column:
        others.append("--data.output-column: is read with several --reward-model.outputs; leave it out")
    read = [name for name in ("separator", "last_step") if getattr(chosen, name) != getattr(plain, name)]
    return [
        f"{flag('reward_model.' + name)}: is of --reward-model.rows steps, so take that too" for name in read
    ] + others


def _unread(config: RewardModelConfig, names: tuple[str, ...], kind: str) -> list[str]:
    """One line for each column that rows of the other kind have."""
    data, plain = config.data, ScoredDataConfig()
    given = [name for name in names if getattr(data, name) != getattr(plain, name)]
    return [f"{flag('data.' + name)}: is of --reward-model.rows {kind}; leave it out" for name in given]
