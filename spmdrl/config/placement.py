"""Rank roles (training, sampling, scoring): the number of ranks in each role, and rules for the roles."""

import os

from spmdrl.config.fields import Problems, get
from spmdrl.config.schema import Config


def trainers(config: Config, world_size: int) -> int:
    """Return the number of training ranks."""
    parallel = config.parallel
    if parallel.placement == "colocated":
        return world_size
    return world_size - parallel.rollout_ranks - parallel.scoring_ranks


def samplers(config: Config, world_size: int) -> int:
    """Return the number of sampling ranks."""
    return world_size if config.parallel.placement == "colocated" else config.parallel.rollout_ranks


def shown(config: Config, count: int, verb: str) -> str:
    """Return a rank count in words, for messages: `the 4 ranks of the job`, or `the 2 ranks that train`."""
    of = "of the job" if config.parallel.placement == "colocated" else f"that {verb}"
    return f"the {count} ranks {of}{how_to_have_more(count)}"


def how_to_have_more(count: int) -> str:
    """Return a hint on how to start more than one rank, or "" if there are several or a launcher set the number."""
    if count > 1 or "WORLD_SIZE" in os.environ:
        return ""
    return " (torchrun starts more; for a dry run of N ranks set WORLD_SIZE=N)"


def role_problems(config: Config, world_size: int) -> list[str]:
    """Return a line if no rank is left to sample or to train, or for each setting that needs `split` but lacks it.

    If there are any lines, the number of training ranks might be wrong, so the mesh axes cannot be checked.
    """
    parallel, problems = config.parallel, Problems(config)
    if parallel.placement == "colocated":
        for name in ("parallel.rollout_ranks", "parallel.scoring_ranks", "rollout.staleness"):
            if get(config, name):
                advice = "needs --parallel.placement split; colocated, every rank trains and samples in turn"
                problems.add(name, advice)
    elif parallel.rollout_ranks < 1:
        problems.add(
            "parallel.rollout_ranks",
            f"--parallel.placement split needs at least 1 rank that samples; the remaining ranks of {world_size} train",
        )
    elif trainers(config, world_size) < 1:
        scoring = f" and {parallel.scoring_ranks} that score" if parallel.scoring_ranks else ""
        problems.add(
            "parallel.rollout_ranks",
            f"ranks that sample{scoring} leave no rank to train (the job has {world_size}); lower it, or start more "
            "ranks",
        )
    return problems


def placement_problems(config: Config) -> list[str]:
    """Return a line for each setting that does not work with separate rank roles (`split`)."""
    problems = Problems(config)
    if config.parallel.placement == "colocated":
        return problems
    if config.run.lockstep_debug:
        problems.add(
            "run.lockstep_debug",
            "compares the collectives of all ranks, which differ under --parallel.placement split; look for the fault "
            "with colocated",
        )
    if config.parallel.scoring_ranks and (refresh := config.reference.refresh_every):
        problems.add(
            "parallel.scoring_ranks",
            "a reference that is refreshed must be on the policy's ranks; take 0, or --reference.refresh-every 0 "
            f"instead of {refresh}",
        )
    return problems


def ranks_line(config: Config, world_size: int, mesh: str) -> str:
    """Return a text with the ranks and their roles: `4 = dp_shard 4`. mesh: description of the training ranks' mesh."""
    parallel = config.parallel
    if parallel.placement == "colocated":
        return f"{world_size} = {mesh}"
    ahead = config.rollout.staleness
    steps = f"{ahead} {'step' if ahead == 1 else 'steps'} ahead" if ahead else "in turn"
    scoring = f", {parallel.scoring_ranks} for frozen models" if parallel.scoring_ranks else ""
    return (
        f"{world_size} = {trainers(config, world_size)} to train ({mesh}){scoring}, {parallel.rollout_ranks} to sample "
        f"({steps})"
    )
