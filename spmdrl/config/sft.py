"""Settings for supervised fine-tuning, with their rules."""

from dataclasses import dataclass
from typing import Literal

from spmdrl.config.declare import NOT_NEGATIVE, POSITIVE, UNIT, section, setting
from spmdrl.config.divergence import DivergenceConfig, divergence_problems, divergence_words
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.supervised import (
    SupervisedConfig,
    SupervisedRunConfig,
    streams,
    supervised_lines,
    supervised_problems,
)


@dataclass
class SFTMethod:
    """Which tokens are trained on, and the loss."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train on: all assistant turns (`assistant`), only the last one (`last`), or all tokens (`all`). A
    message's `loss` or `weight` field (0 or 1) overrides this."""
    loss: Literal["nll", "dft"] = "nll"
    """Per-token loss. `nll`: cross-entropy. `dft`: cross-entropy times the token's probability
    (https://arxiv.org/abs/2508.05629)."""
    neftune: float = setting(0.0, NOT_NEGATIVE)
    """FSDP: scale of uniform noise added to the embeddings: at most neftune / sqrt(L x width) for a sequence of L
    tokens (NEFTune, https://arxiv.org/abs/2310.05914). A common value is 5. 0: no noise."""
    add_tokens: tuple[str, ...] = ()
    """Special tokens to add to the tokenizer, such as those of a chat template. New embedding rows are added for them
    and saved with the model."""


@dataclass
class SFTTeacher(DivergenceConfig):
    """A teacher whose token distributions the student learns instead of the tokens in the rows."""

    path: str = ""
    """The teacher, in any form that `--model.path` accepts. Empty: no teacher."""
    beta: float = setting(0.0, UNIT, only_with=lambda c: c.has_teacher)
    """Divergence to minimise. 0: forward KL(teacher || student). 1: reverse KL(student || teacher). Values between:
    GKD's generalised Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649)."""
    temperature: float = setting(1.0, POSITIVE, only_with=lambda c: c.has_teacher)
    """Temperature that divides the logits of teacher and student."""
    write: str = setting("", only_with=lambda c: c.has_teacher)
    """Folder to which the job writes the teacher's most likely tokens at all trained positions of `--data.train`,
    instead of training. Empty: train, and write nothing."""
    read: str = ""
    """Folder written by a job with `write`, from which the student learns without a teacher in memory. If
    `--teacher.path` is also given, it must be the teacher that was used to write the folder. Empty: no folder is
    read."""


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning for language models. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig, name="sft")
    sft: SFTMethod = section(SFTMethod)
    teacher: SFTTeacher = section(SFTTeacher)

    @property
    def has_teacher(self) -> bool:
        """True if the student learns from a teacher's token distributions instead of the tokens in the rows."""
        return bool(self.teacher.path or self.teacher.read)


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Check all settings together. Raises ConfigError with one line per problem."""
    problems = Problems(config, supervised_problems(config, world_size, config.data.max_tokens))
    if config.sft.neftune and config.policy.backend == "megatron":
        problems.add("sft.neftune", "needs --policy.backend fsdp; take 0")
    if "" in config.sft.add_tokens or len(set(config.sft.add_tokens)) < len(config.sft.add_tokens):
        problems.add("sft.add_tokens", "each must be a text, and all must differ")
    if config.sft.add_tokens and config.lora.rank:
        advice = "with --lora.rank the rows of new tokens would not be trained; take one of the two"
        problems.add("sft.add_tokens", advice)
    refuse(problems + (_teacher_problems(config) if config.has_teacher else []))


def _teacher_problems(config: SFTConfig) -> list[str]:
    teacher = config.teacher
    problems = Problems(config, divergence_problems(config, "teacher"))
    if config.sft.loss != "nll":
        problems.add("sft.loss", "the loss is the divergence from the teacher (--teacher.*); leave one of the two out")
    if config.sft.add_tokens:
        problems.add("sft.add_tokens", "the tokenizer of the teacher (--teacher.*) lacks them; take none")
    if teacher.write and teacher.read:
        problems.append("--teacher.write, --teacher.read: a job writes or learns; leave one of them out")
    elif name := "--teacher.write" * bool(teacher.write) or "--teacher.read" * bool(teacher.read):
        if not teacher.top_k:
            problems.append(f"{name}: files contain only a teacher's most likely tokens; set --teacher.top-k")
        if found := streams(config):
            problems.append(f"{name}: a stream's rows are not known before training ({found[0]}); take files")
    return problems


def sft_lines(config: SFTConfig, world_size: int) -> list[str]:
    """Return the lines of the job's plan, which are printed at startup and by `--dry-run`."""
    teacher = config.teacher
    if teacher.write:
        words = f"{teacher.path}: writes its {teacher.top_k:,} likeliest tokens into {teacher.write}, and the job ends"
    else:
        words = f"{teacher.read or teacher.path}: {divergence_words(teacher, teacher.temperature)}"
    return supervised_lines(config, world_size) + ([f"teacher  {words}"] if config.has_teacher else [])
