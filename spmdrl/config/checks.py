"""Validation of all settings of a run.

All checks run before a model is built. `check` reports every problem at once, along with the flag to change.
"""

from spmdrl.config.backends import backend_problems
from spmdrl.config.engines import adapter_problems, engine_problems
from spmdrl.config.environment import environment_problems
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.judge import judge_problems
from spmdrl.config.methods import method_problems
from spmdrl.config.named import name_problems
from spmdrl.config.placement import placement_problems, role_problems, samplers, trainers
from spmdrl.config.rewards import reward_model_problems, reward_problems
from spmdrl.config.rules import rows_and_checkpoint_problems, rule_problems
from spmdrl.config.schema import Config

TRACKERS = ("jsonl", "tensorboard", "wandb")


def check(config: Config, world_size: int, here: bool = True) -> None:
    """Check all settings together, reading only files that the settings name. Raises ConfigError.

    The error has one line per problem, with the flag to change and advice. For the arguments see `run_problems`.
    """
    refuse(run_problems(config, world_size, here))


def run_problems(config: Config, world_size: int, here: bool = True) -> list[str]:
    """Return the problems with a run's settings, one line each.

    Args:
        config: the run's settings, with or without the values of its preset.
        world_size: number of ranks in the job.
        here: whether the job runs on this machine; if False, its engine does not need to be installed.
    """
    problems = rule_problems(config)
    bad = {problem.split(" ", 1)[0] for problem in problems}
    # Rules between settings are not reported for a setting that is invalid on its own, so that each mistake is reported
    # only once.
    roles = role_problems(config, world_size)
    if not any(name.startswith("--parallel.") for name in bad):
        problems += roles or backend_problems(config, trainers(config, world_size))
    return problems + [
        line
        for line in engine_problems(config, 0 if roles else samplers(config, world_size), here)
        + method_problems(config)
        + adapter_problems(config)
        + _other_problems(config)
        + reward_problems(config)
        + judge_problems(config)
        + reward_model_problems(config)
        + environment_problems(config)
        + placement_problems(config)
        if line.split(" ", 1)[0] not in bad
    ]


def _other_problems(config: Config) -> list[str]:
    problems = Problems(config)
    for flag_name, name in (("--run.name", config.run.name), ("--tracking.project", config.tracking.project)):
        if not name or name == "." or any(part in name for part in ("/", "\\", "..", "\0")):
            path = "; use --run.dir for a path" if flag_name == "--run.name" else ""
            problems.append(f"{flag_name} {name!r}: must be one folder name without / or ..{path}")
    for tracker in config.tracking.trackers:
        problems += name_problems("tracking.trackers", tracker, TRACKERS, file_allowed=False)
    if config.checkpoint.background and config.policy.backend == "megatron":
        problems.add(
            "checkpoint.background",
            "is not supported by the megatron backend, which makes no copy of its state; leave it out",
        )
    problems += rows_and_checkpoint_problems(config, "" if config.eval.every else "with --eval.every 0")
    if config.eval.every > 0 and not config.data.eval:
        problems.add("eval.every", "needs --data.eval, or 0 for no evaluation")
    return problems
