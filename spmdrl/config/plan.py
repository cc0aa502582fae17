"""The plan of a run as text: number of ranks, sequences, tokens and updates, computed from its settings."""

import math

from spmdrl.config.backends import axis_product
from spmdrl.config.classifier import ClassifierConfig, classifier_of
from spmdrl.config.judge import POLICY, judges
from spmdrl.config.placement import ranks_line, samplers, trainers
from spmdrl.config.schema import Config


def plan_lines(config: Config, world_size: int) -> list[str]:
    """Return the lines of the plan, which are printed at startup and by `--dry-run`.

    The numbers of tokens and micro-batches are upper bounds that assume full-length sequences.
    """
    rollout, axes, updates = config.rollout, config.parallel, config.algo.updates_per_step
    engines = samplers(config, world_size) // config.engine_ranks
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    data_ranks = axes.dp_replicate * shards(config, world_size)
    rank_sequences = math.ceil(sequences / data_ranks)
    per_update = sequences // updates
    budget = config.policy.max_tokens_per_microbatch
    microbatches = math.ceil(math.ceil(per_update / data_ranks) / max(1, budget // longest))
    return [
        f"ranks    {ranks(config, world_size)}",
        f"rollout  {count(rollout.prompts_per_step, 'prompt')} x {count(rollout.samples_per_prompt, 'sample')} = "
        f"{count(sequences, 'sequence')} a step; {count(engines, 'engine')} of {count(config.engine_ranks, 'rank')}, "
        f"{count(sequences / engines, 'sequence')} each",
        f"tokens   at most {longest:,} a sequence ({rollout.max_prompt_tokens:,} prompt + "
        f"{rollout.max_new_tokens:,} new), {sequences * longest:,} a step, {rank_sequences * longest:,} a rank",
        f"update   {count(updates, 'optimizer step')} a step, each on {count(per_update, 'sequence')} "
        f"({per_update / data_ranks:,.4g} a rank), in at most {count(microbatches, 'micro-batch', 'micro-batches')} "
        f"of {budget:,} tokens on a rank",
        f"run      {count(config.run.steps, 'step')} = {count(config.run.steps * sequences, 'sequence')}, "
        f"{count(config.run.steps * updates, 'optimizer step')}; seed {config.run.seed}",
        *scorer_lines(config),
    ]


def scorer_lines(config: Config) -> list[str]:
    """Return a line for each model that scores responses: the judges and the reward model."""
    lines = []
    for file, judge in judges(config.reward):
        who, tokens = f"{judge.model} at its url", ""
        if judge.engine:
            who = f"{judge.engine}, in the engine while the policy is out of it"
            who = "the policy, in its engine" if judge.engine == POLICY else who
            tokens = f"; at most {judge.max_prompt_tokens:,} tokens a question and {judge.max_new_tokens:,} a verdict"
        others = f"at most {count(judge.compare, 'other')}"
        work = f"compares each response with {others}" if judge.compare else "grades each response"
        lines.append(f"judge    {file}: {who}, {work}, {count(judge.votes, 'vote')}{tokens}")
    if model := config.reward.model:
        scorer = classifier_of(model) or ClassifierConfig(model)
        labels = " ".join(f"{weight:+g} {label}" for label, weight in scorer.weights.items()) or "its only score"
        steps = f", {scorer.reduce} of steps that end with {scorer.steps!r}" if scorer.steps else ""
        named = f"{model}: {scorer.path}" if scorer.path != model else model
        lines.append(f"scores   {named}, {labels}{steps}, times {config.reward.model_coef:g}")
    return lines


def shards(config: Config, world_size: int) -> int:
    """Return the dp_shard size, resolving -1 to the number of ranks left by the other axes."""
    given = config.parallel.dp_shard
    return given if given != -1 else trainers(config, world_size) // axis_product(config)


def ranks(config: Config, world_size: int) -> str:
    """Return a text with the number of ranks in each role, and the mesh of the training ranks."""
    axes = config.parallel
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "dp_shard": shards(config, world_size)}
    sizes |= {"sp": axes.sp, "cp": axes.cp, "tp": axes.tp}
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    return ranks_line(config, world_size, mesh + (f", ep {axes.ep}" if axes.ep > 1 else ""))


def count(n: float, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`. many: the plural, if it is not `one` + s."""
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,.4g}"
    return f"{shown} {one if n == 1 else many or one + 's'}"
