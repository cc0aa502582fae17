"""Settings that jobs on given rows share: the rows, the evaluation, sampled answers, and the rules for them."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from tyro.conf import Suppress

from spmdrl.config.backends import backend_problems
from spmdrl.config.fields import leaves, shown
from spmdrl.config.plan import count, ranks
from spmdrl.config.rules import RULES, _at_least_0, _at_least_1, _positive, _Rule, never_measured, rule_problems
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
from spmdrl.config.template import template_problems


@dataclass
class SupervisedRunConfig(RunConfig):
    """The job as a whole."""

    steps: int = 0
    """Optimizer steps. 0: as many as `--data.epochs` take."""


@dataclass
class SupervisedParallelConfig(ParallelConfig):
    """How the ranks divide the model; all sizes but ep multiply to their number."""

    placement: Suppress[Literal["colocated", "split"]] = "colocated"
    rollout_ranks: Suppress[int] = 0
    scoring_ranks: Suppress[int] = 0


@dataclass
class SupervisedOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule."""

    lr: float = 2e-5
    """Peak learning rate of AdamW."""
    decay_share: float = 1.0  # type: ignore[misc]
    """The last share of the steps after warm-up, over which the learning rate falls (linear, cosine). Below 1 it stays
    at its peak until then (warm-up, stable, decay: https://arxiv.org/abs/2404.06395)."""


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
    template_kwargs: str = ""
    """JSON object of variables of the chat template, such as {"enable_thinking": false}; those of a row go first."""
    limit: int = 0
    """Take at most so many rows of each source; 0: all."""
    shuffle: bool = True
    """Every epoch has an order of its own, by `--run.seed`; a stream has it within blocks of rows. Off: the order of
    the file, as for a curriculum."""
    rows_per_step: int = 64
    """Rows of one optimizer step over all ranks."""
    epochs: float = 1.0
    """Times that the rows are gone through, where `--run.steps` is 0."""
    max_tokens: int = 2048
    """Longest sequence."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """A longer one loses its end, or its row is left out; both are counted."""
    max_refused: float = 0.05
    """Largest share of rows that may be refused, because a column, a role or the template does not fit. Each is named
    in the log and left out; if there are more, the job ends."""


@dataclass
class HeldOutConfig:
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
class SupervisedConfig(TrainingConfig):
    """A job that learns from given rows. Every rank runs this same program."""

    run: SupervisedRunConfig = field(default_factory=SupervisedRunConfig)
    parallel: SupervisedParallelConfig = field(default_factory=SupervisedParallelConfig)
    optimizer: SupervisedOptimizerConfig = field(default_factory=SupervisedOptimizerConfig)
    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)  # type: ignore[assignment]
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)


SHARED_RULES: dict[str, _Rule] = {
    "run.steps": _at_least_0,
    "optimizer.decay_share": (lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    "data.rows_per_step": _at_least_1,
    "data.epochs": _positive,
    "data.max_tokens": (lambda x: x >= 2, "must be at least 2"),
    "data.max_refused": (lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
    "eval.rows": _at_least_0,
    "generate.every": _at_least_0,
    "generate.prompts": _at_least_1,
    "generate.max_new_tokens": _at_least_1,
    "generate.temperature": _at_least_0,
}


def split_weight(spec: str, flag: str = "--data.train") -> tuple[str, float | None]:
    """Return the source and the weight of `source=weight`; None where none is given. flag: for the error.

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
        raise ValueError(f"{flag} {spec}: the weight after = must be a number above 0")
    return source, value


def streams(config: SupervisedConfig) -> list[str]:
    """Sources of `--data.train` that only go forward."""
    return [spec for spec in config.data.train if spec.startswith("stream:") or ".jsonl.gz" in spec]


def supervised_problems(config: SupervisedConfig, world_size: int, own: dict[str, _Rule], longest: int) -> list[str]:
    """One line for each setting to change.

    own: rules of a job's own settings. longest: tokens of a row's sequences, which one micro-batch must take.
    """
    names = leaves(type(config))
    problems = rule_problems(config, {k: rule for k, rule in (RULES | SHARED_RULES | own).items() if k in names})
    if not problems:
        problems += backend_problems(config, world_size)  # type: ignore[arg-type]
        problems += _together(config, longest)
    return problems


def _together(config: SupervisedConfig, longest: int) -> list[str]:
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
    budget = config.policy.max_tokens_per_microbatch
    if longest > budget:
        row = "a sequence" if longest == data.max_tokens else f"the {longest} tokens of a row"
        problems.append(
            f"--data.max-tokens {data.max_tokens}: {row} must fit --policy.max-tokens-per-microbatch {budget}; "
            "lower it, or raise that"
        )
    if config.generate.every and not (config.eval.every and data.eval):
        problems.append(
            f"--generate.every {config.generate.every}: its prompts come from --data.eval, which is missing"
        )
    if data.chat == "off" and data.chat_template:
        problems.append("--data.chat off: nothing reads --data.chat-template then; leave one of the two out")
    problems += template_problems(data)
    optimizer = config.optimizer
    if optimizer.decay_share < 1 and optimizer.schedule == "constant":
        problems.append(f"--optimizer.decay-share {optimizer.decay_share}: needs --optimizer.schedule linear or cosine")
    if "eval/" in config.checkpoint.best and not (config.eval.every and data.eval):
        problems.append(f"--checkpoint.best {config.checkpoint.best}: is not measured without --data.eval")
    problems += never_measured(config.checkpoint, config.eval.every, config.run.steps)
    return problems


def sampling_run(config: SupervisedConfig, folder: str) -> Config:
    """The reinforcement learning run whose engine samples for this job.

    folder: of the model.
    """
    asked, parallel = config.generate, config.parallel
    shared = {each.name: getattr(parallel, each.name) for each in fields(ParallelConfig)}
    rollout = RolloutConfig(
        engine=asked.engine,
        max_prompt_tokens=config.data.max_tokens,
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


def supervised_lines(config: SupervisedConfig, world_size: int) -> list[str]:
    """How the counts multiply out, printed at the start and by `--dry-run`."""
    data, budget = config.data, config.policy.max_tokens_per_microbatch
    length = f"{config.run.steps:,} steps" if config.run.steps else f"{data.epochs:g} times through the rows"
    return [
        f"ranks    {ranks(config, world_size)}",  # type: ignore[arg-type]
        f"data     {', '.join(config.data.train)}",
        f"update   {count(data.rows_per_step, 'row')} a step, at most {data.max_tokens:,} tokens a sequence, in "
        f"micro-batches of {budget:,} tokens on a rank",
        f"run      {length}; seed {config.run.seed}",
    ]
