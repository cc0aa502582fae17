"""Settings that jobs on given rows share: the rows, the evaluation, sampled answers, and the rules for them."""

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
    """General settings of the job."""

    steps: int = setting(0, NOT_NEGATIVE, free=Free.WATCHED)
    """Optimizer steps. 0: as many as `--data.epochs` take."""


@hides(Job.SUPERVISED)
class SupervisedParallelConfig(schema.ParallelConfig):
    """How the ranks divide the model. The sizes of all axes but ep and etp multiply to the number of ranks."""


@dataclass
class SupervisedOptimizerConfig(schema.OptimizerConfig):
    """AdamW and its schedule."""

    lr: float = setting(2e-5, NOT_NEGATIVE)
    """Peak learning rate of AdamW."""
    decay_share: float = setting(1.0, SHARE, only_with=lambda c: c.optimizer.schedule != "constant")  # type: ignore[misc]
    """Share of the steps after warm-up over which the learning rate falls (linear, cosine), at the end of the run.
    Below 1, the rate first stays at its peak (warm-up, stable, decay: https://arxiv.org/abs/2404.06395)."""


@dataclass
class SupervisedDataConfig:
    """Rows, and the dialogues or text in them."""

    RENDERS_MESSAGES: ClassVar[bool] = True

    train: tuple[str, ...] = ("builtin:reverse",)
    """Sources, each as `source` or, for a mixture, `source=weight`: a .jsonl, .jsonl.gz or .parquet file,
    `hf:<dataset>[:config[:split]]`, `ms:<dataset>[:config[:split]]` (ModelScope), `stream:<dataset>[:config[:split]]`
    (read while it trains), `builtin:<task>`."""
    eval: str = setting("", free=Free.KEPT)
    """A source whose loss is measured. Empty: none."""
    messages_column: str = setting("", unread_by=(Job.PREFERENCE,))
    """Column with messages. Empty: `messages`, `conversations` or the like."""
    prompt_column: str = ""
    """Column with the prompt, text or messages. Empty: `prompt`, `instruction`, `question` or the like."""
    completion_column: str = ""
    """Column with the completion, text or messages. Empty: `completion`, `response`, `output` or `answer`."""
    text_column: str = setting("", unread_by=(Job.PREFERENCE,))
    """Column with plain text, all tokens of which are trained on. Empty: `text`."""
    tools_column: str = "tools"
    """Column with JSON schemas of tools, as a list or as its JSON text."""
    system: str = ""
    """System message of dialogues that have none. Empty: none."""
    chat: Literal["auto", "on", "off"] = "auto"
    """A text prompt with its completion is rendered by the chat template. `auto`: when the tokenizer has one; otherwise
    the completion follows the prompt. Messages are always rendered."""
    chat_template: str = ""
    """Chat template instead of the tokenizer's: `chatml`, a `.jinja` file, or the text."""
    template_kwargs: str = ""
    """JSON object of variables of the chat template, such as {"enable_thinking": false}; variables in a row override
    them."""
    limit: int = setting(0, NOT_NEGATIVE)
    """Largest number of rows to take from each source; 0: all."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch, by `--run.seed`; a stream is shuffled within blocks of rows. Off: the order
    of the file, as for a curriculum."""
    rows_per_step: int = setting(64, COUNT)
    """Rows of one optimizer step over all ranks."""
    epochs: float = setting(1.0, POSITIVE)
    """Number of passes over the rows, if `--run.steps` is 0."""
    max_tokens: int = setting(2048, at_least(2))
    """Longest sequence, in tokens."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """Treatment of a longer sequence: `truncate` removes its end, `drop` leaves its row out; both are counted."""
    max_refused: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Largest share of rows that may be refused, because a column, a role or the template does not fit. Refused rows
    are named in the log and left out; if there are more, the job ends."""


@dataclass
class HeldOutConfig:
    """Evaluation during the job."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(20, NOT_NEGATIVE)
    """Measure the loss on `--data.eval` before the first step, every N steps, and at the end. 0: never."""
    rows: int = setting(256, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Rows of `--data.eval` to evaluate; 0: all."""


@dataclass
class GenerateConfig:
    """Answers that the model gives to prompts of `--data.eval` during the job, for samples.jsonl."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(0, NOT_NEGATIVE)
    """Sample before the first step, every N steps, and at the end. 0: never, and no engine is started."""
    prompts: int = setting(4, COUNT, only_with=lambda c: c.generate.every)
    """Prompts: the context of the last turn of the first rows."""
    max_new_tokens: int = setting(128, COUNT, only_with=lambda c: c.generate.every)
    """Longest answer."""
    temperature: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.generate.every)
    """Sampling temperature; 0 is greedy."""
    engine: Literal["auto", "vllm", "sglang", "hf"] = setting("auto", only_with=lambda c: c.generate.every)
    """Engine that samples. `auto`: vLLM when installed for the job's device, else the HF engine."""


@dataclass
class SupervisedConfig(schema.TrainingConfig):
    """A job that learns from given rows. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig)
    parallel: SupervisedParallelConfig = section(SupervisedParallelConfig)
    optimizer: SupervisedOptimizerConfig = section(SupervisedOptimizerConfig)
    data: SupervisedDataConfig = section(SupervisedDataConfig)  # type: ignore[assignment]
    eval: HeldOutConfig = section(HeldOutConfig)
    generate: GenerateConfig = section(GenerateConfig, unread_by=(Job.REWARD_MODEL,))

    @property
    def is_evaluated(self) -> bool:
        """True if the job measures the loss of rows for evaluation."""
        return bool(self.eval.every and self.data.eval)


def split_weight(spec: str, flag: str = "--data.train") -> tuple[str, float | None]:
    """Return source and weight of `source=weight`, None without one. Raises ValueError naming the flag."""
    return name_weight(spec, f"{flag} {spec}: the weight after = must be a number above 0")


def streams(config: SupervisedConfig) -> list[str]:
    """Return the sources of `--data.train` that can only be read once, from the start."""
    return [spec for spec in config.data.train if spec.startswith("stream:") or ".jsonl.gz" in spec]


def supervised_problems(config: SupervisedConfig, world_size: int, longest: int) -> list[str]:
    """Return a line for each setting to change. longest: most tokens of a row; one micro-batch must hold them all."""
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
        problems.add("generate.every", "its prompts come from --data.eval, which is missing")
    return problems + rows_and_checkpoint_problems(config, "" if config.is_evaluated else "without --data.eval")


def sampling_run(config: SupervisedConfig, folder: str) -> schema.Config:
    """Return settings of a reinforcement learning run whose engine samples for this job. folder: the model's."""
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
    """Return the lines of the plan, printed at the start and by `--dry-run`."""
    data, budget = config.data, config.policy.max_tokens_per_microbatch
    length = f"{config.run.steps:,} steps" if config.run.steps else f"{data.epochs:g} times through the rows"
    return [
        f"ranks    {ranks(config, world_size)}",  # type: ignore[arg-type]
        f"data     {', '.join(config.data.train)}",
        f"update   {count(data.rows_per_step, 'row')} a step, at most {data.max_tokens:,} tokens a sequence, in "
        f"micro-batches of {budget:,} tokens on a rank",
        f"run      {length}; seed {config.run.seed}",
    ]
