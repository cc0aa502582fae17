"""Settings for rows, evaluation and sampled answers, shared by jobs that train on a given data set.

This module also checks these settings for invalid values and conflicts.
"""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from spmdrl.config import schema
from spmdrl.config.backends import backend_problems
from spmdrl.config.declare import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    UNIT,
    Free,
    Job,
    at_least,
    hides,
    section,
    setting,
)
from spmdrl.config.fields import Problems
from spmdrl.config.named import name_weight
from spmdrl.config.plan import count, ranks
from spmdrl.config.rules import rows_and_checkpoint_problems, rule_problems


@dataclass
class SupervisedRunConfig(schema.RunConfig):
    """General job settings: folder, length, seed, device and time limits."""

    steps: int = setting(0, NOT_NEGATIVE, free=Free.WATCHED)
    """Number of optimizer steps. 0: as many as needed for `--data.epochs` passes over the rows."""


@hides(Job.SUPERVISED)
class SupervisedParallelConfig(schema.ParallelConfig):
    """How the model is parallelised. The product of the sizes of all axes but ep and etp is the number of ranks."""


@dataclass
class SupervisedOptimizerConfig(schema.OptimizerConfig):
    """AdamW and its learning-rate schedule."""

    lr: float = setting(2e-5, NOT_NEGATIVE)
    """Peak learning rate of AdamW."""
    decay_share: float = setting(1.0, SHARE, only_with=lambda c: c.optimizer.schedule != "constant")  # type: ignore[misc]
    """Fraction of the steps after warm-up over which the learning rate decays (linear, cosine), up to the end of the
    run. Below 1, the learning rate stays at its peak between warm-up and decay (warm-up, stable, decay:
    https://arxiv.org/abs/2404.06395)."""


@dataclass
class SupervisedDataConfig:
    """Source of the rows, and which columns hold their dialogues or text."""

    RENDERS_MESSAGES: ClassVar[bool] = True

    train: tuple[str, ...] = ("builtin:reverse",)
    """Data sources, each as `source` or, for a mixture, `source=weight`: a .jsonl, .jsonl.gz or .parquet file,
    `hf:<dataset>[:config[:split]]`, `ms:<dataset>[:config[:split]]` (ModelScope), `stream:<dataset>[:config[:split]]`
    (read during training), `builtin:<task>`."""
    eval: str = setting("", free=Free.KEPT)
    """Data source for measuring the loss during the job. Empty: no evaluation."""
    messages_column: str = setting("", unread_by=(Job.PREFERENCE,))
    """Column with the messages of a dialogue. Empty: detect it by common names (`messages`, `conversations`, ...)."""
    prompt_column: str = ""
    """Column with the prompt, as text or messages. Empty: detect it by common names (`prompt`, `instruction`,
    `question`, ...)."""
    completion_column: str = ""
    """Column with the completion, as text or messages. Empty: `completion`, `response`, `output` or `answer`."""
    text_column: str = setting("", unread_by=(Job.PREFERENCE,))
    """Column with plain text, whose tokens are all trained on. Empty: `text`."""
    tools_column: str = "tools"
    """Column with tool JSON schemas, as a list or as the JSON text of a list."""
    images_column: str = "images"
    """Column with a row's images, for models that read images. Messages mark their places by parts of type `image` or
    by `<image>`."""
    system: str = ""
    """System message to add to dialogues that have none. Empty: no system message is added."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether to render plain-text prompts and completions with the chat template or concatenate them as they are
    (`off`). `auto`: render them if the tokenizer has a template. Messages are always rendered."""
    chat_template: str = ""
    """Chat template to use instead of the tokenizer's: `chatml`, a `.jinja` file, or the text of a template."""
    template_kwargs: str = ""
    """JSON object with chat template variables, such as {"enable_thinking": false}; a row can override them."""
    limit: int = setting(0, NOT_NEGATIVE)
    """Maximum number of rows to read from each source. 0: all."""
    shuffle: bool = True
    """Reshuffle the rows every epoch, seeded by `--run.seed`; a stream is shuffled within blocks of rows. Off: keep the
    order of the file, as a curriculum needs."""
    rows_per_step: int = setting(64, COUNT)
    """Number of rows per optimizer step, across all ranks."""
    epochs: float = setting(1.0, POSITIVE)
    """Number of passes over the rows, if `--run.steps` is 0."""
    max_tokens: int = setting(2048, at_least(2))
    """Maximum sequence length in tokens."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """Treatment of sequences of more than `max_tokens` tokens: `truncate` cuts off the end, `drop` omits the row.
    The metrics data/truncated and data/dropped count both cases."""
    max_refused: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Maximum fraction of rows that can be refused because a column, a role or the template does not fit. Refused rows
    are logged and omitted; if there are more, the job ends."""


@dataclass
class HeldOutConfig:
    """Evaluation on `--data.eval` during the job."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(20, NOT_NEGATIVE)
    """Number of steps between evaluations of the loss on `--data.eval`, which also run before the first step and at the
    end. 0: never."""
    rows: int = setting(256, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Maximum number of `--data.eval` rows to evaluate. 0: all."""


@dataclass
class GenerateConfig:
    """Answers sampled from the model for `--data.eval` prompts during the job, written to samples.jsonl."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(0, NOT_NEGATIVE)
    """Number of steps between sampling rounds, which also run before the first step and at the end. 0: never; no engine
    is started."""
    prompts: int = setting(4, COUNT, only_with=lambda c: c.generate.every)
    """Number of prompts, taken from the first rows of `--data.eval` without their last turn."""
    max_new_tokens: int = setting(128, COUNT, only_with=lambda c: c.generate.every)
    """Maximum answer length in tokens."""
    temperature: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.generate.every)
    """Sampling temperature. 0: greedy decoding."""
    engine: Literal["auto", "vllm", "sglang", "hf"] = setting("auto", only_with=lambda c: c.generate.every)
    """Sampling engine. `auto`: vLLM if it is installed for the job's device and supports `--model.dtype`, otherwise the
    HF engine."""


@dataclass
class SupervisedConfig(schema.TrainingConfig):
    """A job that trains on a given data set. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig)
    parallel: SupervisedParallelConfig = section(SupervisedParallelConfig)
    optimizer: SupervisedOptimizerConfig = section(SupervisedOptimizerConfig)
    data: SupervisedDataConfig = section(SupervisedDataConfig)  # type: ignore[assignment]
    eval: HeldOutConfig = section(HeldOutConfig)
    generate: GenerateConfig = section(GenerateConfig, unread_by=(Job.REWARD_MODEL,))

    @property
    def is_evaluated(self) -> bool:
        """True if the job measures the loss on `--data.eval`."""
        return bool(self.eval.every and self.data.eval)


def split_weight(spec: str, flag: str = "--data.train") -> tuple[str, float | None]:
    """Split `source=weight`; a missing weight is returned as None. Raises ValueError for an invalid weight."""
    return name_weight(spec, f"{flag} {spec}: the weight after = must be a number above 0")


def streams(config: SupervisedConfig) -> list[str]:
    """Return the streaming sources in `--data.train`, which can only be read sequentially from the first row."""
    return [spec for spec in config.data.train if spec.startswith("stream:") or ".jsonl.gz" in spec]


def supervised_problems(config: SupervisedConfig, world_size: int, longest: int) -> list[str]:
    """Return a line for each setting that is invalid or conflicts with another one.

    longest: maximum total number of tokens in a row's sequences, which must fit into one micro-batch.
    """
    if problems := rule_problems(config):
        return problems
    return backend_problems(config, world_size) + _together(config, longest)  # type: ignore[arg-type]


def _together(config: SupervisedConfig, longest: int) -> list[str]:
    data, problems, weights = config.data, Problems(config), []
    if not data.train:
        problems.append("--data.train: name a source of rows")
    for spec in data.train:
        try:
            weights.append(split_weight(spec)[1])
        except ValueError as e:
            problems.append(str(e))
    if any(weights) and None in weights:
        problems.add("data.train", "give every source a weight, or none")
    budget = config.policy.max_tokens_per_microbatch
    if longest > budget:
        row = "a sequence" if longest == data.max_tokens else f"the {longest} tokens of a row"
        advice = f"{row} must fit --policy.max-tokens-per-microbatch {budget}; lower it, or raise that"
        problems.add("data.max_tokens", advice)
    if config.generate.every and not config.is_evaluated:
        problems.add("generate.every", "its prompts come from --data.eval: name rows there, with --eval.every above 0")
    return problems + rows_and_checkpoint_problems(config, "" if config.is_evaluated else "without --data.eval")


def sampling_run(config: SupervisedConfig, folder: str) -> schema.Config:
    """Return the settings of a reinforcement learning run whose engine samples for this job. folder: model folder."""
    wanted, parallel = config.generate, config.parallel
    shared = {each.name: getattr(parallel, each.name) for each in fields(schema.ParallelConfig)}
    rollout = schema.RolloutConfig(
        engine=wanted.engine,
        max_prompt_tokens=config.data.max_tokens,
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature or 1.0,
        max_sequences=max(1, min(64, wanted.prompts)),
    )
    return schema.Config(
        run=config.run,
        model=replace(config.model, path=folder),
        parallel=schema.ParallelConfig(**shared),
        policy=config.policy,
        lora=config.lora,
        rollout=rollout,
        reference=schema.ReferenceConfig(enabled="off"),
        eval=schema.EvalConfig(every=0, temperature=wanted.temperature),
    )


def supervised_lines(config: SupervisedConfig, world_size: int) -> list[str]:
    """Return the lines of the job's plan, which are printed at startup and by `--dry-run`."""
    data, budget = config.data, config.policy.max_tokens_per_microbatch
    passes = f"{count(data.epochs, 'pass', 'passes')} over the rows"
    length = count(config.run.steps, "step") if config.run.steps else passes
    return [
        f"ranks    {ranks(config, world_size)}",  # type: ignore[arg-type]
        f"data     {', '.join(config.data.train)}",
        f"update   {count(data.rows_per_step, 'row')} a step, at most {data.max_tokens:,} tokens a sequence, in "
        f"micro-batches of {budget:,} tokens on a rank",
        f"run      {length}; seed {config.run.seed}",
    ]
