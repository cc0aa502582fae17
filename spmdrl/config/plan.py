"""The plan of a run: ranks, sequences, tokens and updates that its counts multiply out to."""

import math

from spmdrl.config.backends import axis_product
from spmdrl.config.placement import ranks_line, samplers, trainers
from spmdrl.config.schema import Config


def plan_lines(config: Config, world_size: int) -> list[str]:
    """How the counts multiply out, printed at the start and by `--dry-run`.

    Token counts are upper bounds, of sequences of full length. Micro-batches are what packing such sequences takes on
    one rank; shorter ones pack tighter.
    """
    rollout, axes, updates = config.rollout, config.parallel, config.algo.updates_per_step
    shard = axes.dp_shard if axes.dp_shard != -1 else trainers(config, world_size) // axis_product(config)
    engines = samplers(config, world_size) // rollout.tp
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    data_ranks = axes.dp_replicate * shard
    rank_sequences = math.ceil(sequences / data_ranks)
    per_update = sequences // updates
    budget = config.policy.max_tokens_per_microbatch
    microbatches = math.ceil(math.ceil(per_update / data_ranks) / max(1, budget // longest))
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "dp_shard": shard, "sp": axes.sp, "cp": axes.cp}
    sizes["tp"] = axes.tp
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    return [
        f"ranks    {ranks_line(config, world_size, mesh + (f', ep {axes.ep}' if axes.ep > 1 else ''))}",
        f"rollout  {rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt:,} samples = "
        f"{sequences:,} sequences a step; {_count(engines, 'engine')} of {_count(rollout.tp, 'rank')}, "
        f"{_count(sequences / engines, 'sequence')} each",
        f"tokens   at most {longest:,} a sequence ({rollout.max_prompt_tokens:,} prompt + "
        f"{rollout.max_new_tokens:,} new), {sequences * longest:,} a step, {rank_sequences * longest:,} a rank",
        f"update   {_count(updates, 'optimizer step')} a step, each on {_count(per_update, 'sequence')} "
        f"({per_update / data_ranks:,.4g} a rank), in at most {_count(microbatches, 'micro-batch', 'micro-batches')} "
        f"of {budget:,} tokens on a rank",
        f"run      {_count(config.run.steps, 'step')} = {config.run.steps * sequences:,} sequences, "
        f"{_count(config.run.steps * updates, 'optimizer step')}; seed {config.run.seed}",
    ]


def _count(n: float, one: str, many: str = "") -> str:
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,.4g}"
    return f"{shown} {one if n == 1 else many or one + 's'}"
