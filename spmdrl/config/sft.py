"""Settings of supervised fine-tuning, and the rules for them."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from spmdrl.config.fields import refuse, shown
from spmdrl.config.rules import _at_least_0, _Rule
from spmdrl.config.supervised import SupervisedConfig, SupervisedRunConfig, supervised_problems


@dataclass
class SFTMethod:
    """The tokens that are trained, and the loss."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens with a loss: the assistant's turns, its last turn only, or all. Fields `loss` or `weight` (0 or 1) of a
    message go first."""
    loss: Literal["nll", "dft"] = "nll"
    """`nll`: cross-entropy. `dft`: each token's is multiplied by its probability (https://arxiv.org/abs/2508.05629)."""
    neftune: float = 0.0
    """FSDP: noise on the embeddings of a sequence of L tokens, uniform up to neftune / sqrt(L x width) (NEFTune,
    https://arxiv.org/abs/2310.05914; 5 is usual). 0: none."""
    add_tokens: tuple[str, ...] = ()
    """Special tokens to add to the tokenizer, as of a chat template; embeddings get rows for them, which are saved."""


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning of a language model. Every rank runs this same program."""

    run: SupervisedRunConfig = field(default_factory=partial(SupervisedRunConfig, name="sft"))
    sft: SFTMethod = field(default_factory=SFTMethod)


OWN_RULES: dict[str, _Rule] = {"sft.neftune": _at_least_0}


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    problems = supervised_problems(config, world_size, OWN_RULES, config.data.max_tokens)
    if config.sft.neftune and config.policy.backend == "megatron":
        problems.append(f"--sft.neftune {config.sft.neftune}: is of the fsdp backend; take 0")
    if config.sft.add_tokens and config.lora.rank:
        problems.append(
            f"--sft.add-tokens {shown(config.sft.add_tokens)}: with --lora.rank the rows of new tokens would not be "
            "trained; take one of the two"
        )
    refuse(problems)
