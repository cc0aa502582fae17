"""Roles of the ranks by the settings: how many train and sample, and settings that a placement rules out."""

import os

from spmdrl.config.schema import Config


def trainers(config: Config, world_size: int) -> int:
    """Ranks that train."""
    parallel = config.parallel
    if parallel.placement == "colocated":
        return world_size
    return world_size - parallel.rollout_ranks - parallel.scoring_ranks


def samplers(config: Config, world_size: int) -> int:
    """Ranks that sample."""
    return world_size if config.parallel.placement == "colocated" else config.parallel.rollout_ranks


def shown(config: Config, count: int, verb: str) -> str:
    """Names a number of ranks in words: `the 4 ranks of the job`, or `the 2 ranks that train`."""
    of = "of the job" if config.parallel.placement == "colocated" else f"that {verb}"
    return f"the {count} ranks {of}{how_to_have_more(count)}"


def how_to_have_more(count: int) -> str:
    """Hint, in a message about one rank, on a way to start more, unless a launcher has set their number."""
    if count > 1 or "WORLD_SIZE" in os.environ:
        return ""
    return " (torchrun starts more; for a dry run of N set WORLD_SIZE=N)"


def role_problems(config: Config, world_size: int) -> list[str]:
    """Roles without ranks, and numbers of ranks without roles. Axes can only be checked once these fit."""
    parallel, rollout = config.parallel, config.rollout
    if parallel.placement == "colocated":
        given = {
            "--parallel.rollout-ranks": parallel.rollout_ranks,
            "--parallel.scoring-ranks": parallel.scoring_ranks,
            "--rollout.staleness": rollout.staleness,
        }
        return [
            f"{name} {value}: needs --parallel.placement split; colocated, every rank trains and samples in turn"
            for name, value in given.items()
            if value
        ]
    if parallel.rollout_ranks < 1:
        return [
            f"--parallel.rollout-ranks {parallel.rollout_ranks}: --parallel.placement split needs ranks that sample, "
            f"and leaves the others of {world_size} to train"
        ]
    if trainers(config, world_size) < 1:
        scoring = f" and {parallel.scoring_ranks} that score" if parallel.scoring_ranks else ""
        return [
            f"--parallel.rollout-ranks {parallel.rollout_ranks}: ranks that sample{scoring} leave none of the "
            f"{world_size} ranks of the job to train; lower it, or start more ranks"
        ]
    return []


def placement_problems(config: Config) -> list[str]:
    """Settings that mean nothing where ranks do different things."""
    problems = []
    if config.parallel.placement == "colocated":
        return problems
    if config.run.lockstep_debug:
        problems.append(
            "--run.lockstep-debug True: compares what all ranks run, which is not the same under --parallel.placement "
            "split; look for the fault with colocated"
        )
    if config.parallel.scoring_ranks and config.reference.refresh_every:
        problems.append(
            f"--parallel.scoring-ranks {config.parallel.scoring_ranks}: a reference that is refreshed lives where the "
            f"policy does; take 0, or --reference.refresh-every 0 instead of {config.reference.refresh_every}"
        )
    return problems


def ranks_line(config: Config, world_size: int, mesh: str) -> str:
    """One line on the ranks and their roles: `4 = ...` with the mesh of those that train."""
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
