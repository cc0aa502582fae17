"""Makes the batch of a step from its episodes: columns, replayed sequences, and the optimizer step of each."""

import torch

from spmdrl.algos.advantages import SCORE
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, from_episodes
from spmdrl.data.dealing import share_out
from spmdrl.data.episode import Episode
from spmdrl.data.packing import work_of
from spmdrl.data.replay_buffer import ReplayBuffer
from spmdrl.spmd.exchange import gather_names
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import generator_for, seed_for
from spmdrl.spmd.world import World


def make_batch(
    episodes: list[Episode],
    step: int,
    cfg: Config,
    world: World,
    replay: ReplayBuffer,
    turns: bool = False,
    skips_equal: bool = False,
    experts_width: int = 0,
    share_prompts: bool = False,
    model_parts: tuple[str, ...] = (),
) -> Batch:
    """This rank's episodes as a batch that knows which optimizer step uses which sequence. Collective.

    Args:
        episodes: of this rank; others may bring none.
        step: counted from 0.
        cfg: the run's settings.
        world: all ranks.
        replay: takes the batch, and gives the one to train on.
        turns: the advantage compares turns.
        skips_equal: prompts whose samples have equal rewards are not run.
        experts_width: as in `from_episodes`.
        share_prompts: what samples of a prompt do once counts once in `seq["work"]`.
        model_parts: parts that a reward model will add.
    """
    # A rank without samples knows no names of reward parts, and the columns must agree.
    names = tuple(gather_names({name for e in episodes for name in e.parts}, world.host_group))
    prompts, seed = cfg.rollout.prompts_per_step, cfg.run.seed
    # With an environment also estimators that do not ask for turns see them and their rewards.
    acts = bool(cfg.env)
    batch = from_episodes(episodes, names, experts_width, acts or turns, acts)
    rows = zip(*(batch.seq[k].tolist() for k in ("prompt", "position", "sample")), strict=True)
    batch.seq["seed"] = torch.tensor([seed_for(seed, step, *row, 1) for row in rows], dtype=torch.int64)
    batch.seq["work"], common = work_of(batch, share_prompts)
    if skips_equal:
        # Groups come whole from an engine; one that is not run counts as next to nothing.
        batch.seq["work"] = torch.where(batch.group_differs(), batch.seq["work"], 1)
    if share_prompts:
        batch.seq["common"] = torch.minimum(common, batch.seq["work"] - 1)
    batch = replay.mix(batch, seed, step, Peers(world.group, world.device))
    check_parts(batch, cfg, model_parts)
    order = list(range(prompts))
    generator_for(seed, step, 1).shuffle(order)
    return share_out(batch, cfg.algo.updates_per_step, prompts, order)


def check_parts(batch: Batch, cfg: Config, later: tuple[str, ...] = ()) -> None:
    """Every sample must have the reward parts that training uses: one that is missing is not 0.

    later: parts that a model adds, for every sample.

    Raises:
        ValueError: naming part, prompt and sample.
    """
    given = [name.removeprefix("part/") for name in batch.seq if name.startswith("part/")]
    used = [("--safety.cost", cfg.safety.cost)] if cfg.safety.cost else []
    used += [("--algo.part-weights", spec.partition("=")[0]) for spec in cfg.algo.part_weights]
    if cfg.algo.advantage == "gdpo" and not cfg.algo.part_weights:
        used = [("--algo.part-weights, where none is named, takes all parts:", name) for name in given]
    for flag, part in used:
        if part == SCORE or part in later:
            continue
        missing = f"{flag} {part}: the reward gives no such part"
        if part not in given:
            raise ValueError(f"{missing}; it gives {', '.join([*given, *later]) or 'none'}")
        lacking = torch.nonzero(batch.seq[f"part/{part}"].isnan()).flatten()
        if len(lacking):
            row = int(lacking[0])
            prompt, sample = int(batch.seq["prompt"][row]), int(batch.seq["sample"][row])
            raise ValueError(
                f"{missing} for prompt {prompt}, sample {sample}, but does for others: let the function return it, a "
                "finite number, for every sample, or learn from other parts (--algo.part-weights, --safety.cost)"
            )
