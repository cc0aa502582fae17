"""Settings of supervised fine-tuning, the rules for them, and its plan."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal

from tyro.conf import Suppress

from spmdrl.config.backends import backend_problems
from spmdrl.config.fields import leaves, refuse, shown
from spmdrl.config.plan import count, ranks
from spmdrl.config.rules import RULES, _at_least_0, _at_least_1, _positive, _Rule, rule_problems
from spmdrl.config.schema import (
    Config,
    EvalConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)


@dataclass
class SupervisedRunConfig(RunConfig):
    """The job as a whole."""

    name: str = "sft"
    """Name shown in trackers and used for the default run folder."""
    steps: int = 0
    """Optimizer steps. 0: as many as `--sft.epochs` take."""


@dataclass
class SupervisedParallelConfig(ParallelConfig):
    """How the ranks divide the model; all sizes but ep multiply to their number."""

    placement: Suppress[Literal["colocated", "split"]] = "colocated"
    rollout_ranks: Suppress[int] = 0
    scoring_ranks: Suppress[int] = 0


@dataclass
class SupervisedDataConfig:
    """Rows, and the dialogues or text in them."""

    train: tuple[str, ...] = ("builtin:reverse",)
    """Sources, each as `source` or, for a mixture, `source=weight`: a .jsonl, .jsonl.gz or .parquet file,
    `hf:<dataset>[:config[:split]]`, `ms:<dataset>[:config[:split]]` (ModelScope), `stream:<dataset>[:config[:split]]`
    (read while it trains), `builtin:<task>`."""
    eval: str = ""
    """A source whose loss is measured. Empty: none."""
    messages_column: str = ""
    """Column with messages. Empty: `messages`, `conversations` or the like."""
    prompt_column: str = ""
    """Column with the prompt, text or messages. Empty: `prompt`, `instruction`, `question` or the like."""
    completion_column: str = ""
    """Column with the completion, text or messages. Empty: `completion`, `response`, `output` or `answer`."""
    text_column: str = ""
    """Column with plain text, which is trained whole. Empty: `text`."""
    tools_column: str = "tools"
    """Column with JSON schemas of tools, a list or its JSON."""
    system: str = ""
    """System message of dialogues that have none. Empty: none."""
    chat: Literal["auto", "on", "off"] = "auto"
    """A text prompt with its completion is rendered by the chat template. `auto`: when the tokenizer has one; otherwise
    the completion follows the prompt. Messages are always rendered."""
    chat_template: str = ""
    """Chat template instead of the tokenizer's: `chatml`, a `.jinja` file, or the text."""
    limit: int = 0
    """Take at most so many rows of each source; 0: all."""


@dataclass
class SFTMethodConfig:
    """Rows of a step, and the tokens of them that are trained."""

    rows_per_step: int = 64
    """Rows of one optimizer step over all ranks."""
    epochs: float = 1.0
    """Times that the rows are gone through, where `--run.steps` is 0."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens with a loss: the assistant's turns, its last turn only, or all. Fields `loss` or `weight` (0 or 1) of a
    message go first."""
    max_tokens: int = 2048
    """Longest sequence."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """A longer one loses its end, or is left out; both are counted."""
    loss: Literal["nll", "dft"] = "nll"
    """`nll`: cross-entropy. `dft`: each token's is multiplied by its probability (https://arxiv.org/abs/2508.05629)."""
    neftune: float = 0.0
    """FSDP: noise on the embeddings of a sequence of L tokens, uniform up to neftune / sqrt(L x width) (NEFTune,
    https://arxiv.org/abs/2310.05914; 5 is usual). 0: none."""
    add_tokens: tuple[str, ...] = ()
    """Special tokens to add to the tokenizer, as of a chat template; embeddings get rows for them, which are saved."""
    max_refused: float = 0.05
    """Largest share of rows that may be refused, because a column, a role or the template does not fit. Each is named
    in the log and left out; if there are more, the job ends."""


@dataclass
class SftEvalConfig:
    """Evaluation during the job."""

    every: int = 20
    """Measure the loss on `--data.eval` before the first step, every N steps, and at the end. 0: never."""
    rows: int = 256
    """Rows of it; 0: all."""


@dataclass
class GenerateConfig:
    """Answers that the model gives to prompts of `--data.eval` during the job, for samples.jsonl."""

    every: int = 0
    """Sample before the first step, every N steps, and at the end. 0: never, and no engine is started."""
    prompts: int = 4
    """Prompts: the context of the last turn of the first rows."""
    max_new_tokens: int = 128
    """Longest answer."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    engine: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Sampler. `auto`: vLLM when installed for the job's device, else the HF engine."""


@dataclass
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning of a language model. Every rank runs this same program."""

    run: SupervisedRunConfig = field(default_factory=SupervisedRunConfig)
    parallel: SupervisedParallelConfig = field(default_factory=SupervisedParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=partial(OptimizerConfig, lr=2e-5))
    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)  # type: ignore[assignment]
    sft: SFTMethodConfig = field(default_factory=SFTMethodConfig)
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)


OWN_RULES: dict[str, _Rule] = {
    "run.steps": _at_least_0,
    "sft.rows_per_step": _at_least_1,
    "sft.epochs": _positive,
    "sft.max_tokens": (lambda x: x >= 2, "must be at least 2"),
    "sft.neftune": _at_least_0,
    "sft.max_refused": (lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
    "eval.rows": _at_least_0,
    "generate.every": _at_least_0,
    "generate.prompts": _at_least_1,
    "generate.max_new_tokens": _at_least_1,
    "generate.temperature": _at_least_0,
}


def split_weight(spec: str) -> tuple[str, float | None]:
    """Return the source and the weight of `source=weight`; None where none is given.

    Raises:
        ValueError: a weight that is no number above 0.
    """
    source, sign, weight = spec.rpartition("=")
    if not sign or "/" in weight or ":" in weight:
        return spec, None
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"--data.train {spec}: the weight after = must be a number above 0")
    return source, value


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    names = leaves(type(config))
    problems = rule_problems(config, {name: rule for name, rule in (RULES | OWN_RULES).items() if name in names})
    if not problems:
        problems += backend_problems(config, world_size)  # type: ignore[arg-type]
        problems += _together(config)
    refuse(problems)


def _together(config: SFTConfig) -> list[str]:
    data, problems, weights = config.data, [], []
    if not data.train:
        problems.append("--data.train: name a source of rows")
    for spec in data.train:
        try:
            weights.append(split_weight(spec)[1])
        except ValueError as e:
            problems.append(str(e))
    if any(weights) and None in weights:
        problems.append(f"--data.train {shown(data.train)}: give every source a weight, or none")
    longest, budget = config.sft.max_tokens, config.policy.max_tokens_per_microbatch
    if longest > budget:
        problems.append(
            f"--sft.max-tokens {longest}: a sequence must fit --policy.max-tokens-per-microbatch {budget}; lower it, "
            "or raise that"
        )
    if config.sft.neftune and config.policy.backend == "megatron":
        problems.append(f"--sft.neftune {config.sft.neftune}: is of the fsdp backend; take 0")
    if config.sft.add_tokens and config.lora.rank:
        problems.append(
            f"--sft.add-tokens {shown(config.sft.add_tokens)}: with --lora.rank the rows of new tokens would not be "
            "trained; take one of the two"
        )
    if config.generate.every and not (config.eval.every and data.eval):
        problems.append(
            f"--generate.every {config.generate.every}: its prompts come from --data.eval, which is missing"
        )
    if data.chat == "off" and data.chat_template:
        problems.append("--data.chat off: nothing reads --data.chat-template then; leave one of the two out")
    if "eval/" in config.checkpoint.best and not (config.eval.every and data.eval):
        problems.append(f"--checkpoint.best {config.checkpoint.best}: is not measured without --data.eval")
    return problems


def sampling_run(config: SFTConfig, folder: str) -> Config:
    """The reinforcement learning run whose engine samples for this job.

    folder: of the model.
    """
    sft, asked, parallel = config.sft, config.generate, config.parallel
    shared = {each.name: getattr(parallel, each.name) for each in fields(ParallelConfig)}
    rollout = RolloutConfig(
        engine=asked.engine,
        max_prompt_tokens=sft.max_tokens,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature or 1.0,
        max_sequences=max(1, min(64, asked.prompts)),
    )
    return Config(
        run=config.run,
        model=replace(config.model, path=folder),
        parallel=ParallelConfig(**shared),
        policy=config.policy,
        lora=config.lora,
        rollout=rollout,
        reference=ReferenceConfig(enabled="off"),
        eval=EvalConfig(every=0, temperature=asked.temperature),
    )


def sft_lines(config: SFTConfig, world_size: int) -> list[str]:
    """How the counts multiply out, printed at the start and by `--dry-run`."""
    sft, budget = config.sft, config.policy.max_tokens_per_microbatch
    length = f"{config.run.steps:,} steps" if config.run.steps else f"{sft.epochs:g} times through the rows"
    return [
        f"ranks    {ranks(config, world_size)}",  # type: ignore[arg-type]
        f"data     {', '.join(config.data.train)}",
        f"update   {count(sft.rows_per_step, 'row')} a step, at most {sft.max_tokens:,} tokens a sequence, in "
        f"micro-batches of {budget:,} tokens on a rank",
        f"run      {length}; seed {config.run.seed}",
    ]
