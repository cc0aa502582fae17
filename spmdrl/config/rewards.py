"""The configured rewards and their weights, and rules for them, for reward models and for the sandbox."""

from pathlib import Path
from urllib.parse import urlsplit

from spmdrl.config.builtin import REWARDS
from spmdrl.config.classifier import classifier_of
from spmdrl.config.dump import redact_text
from spmdrl.config.named import file_problems, name_problems, name_weight
from spmdrl.config.schema import Config, RewardConfig
from spmdrl.config.yaml_file import SUFFIXES, read_json

CONTAINERS = ("apptainer", "docker")
SANDBOXES = ("auto", "bubblewrap", "sandlock", *CONTAINERS, "none")


def weighted(text: str) -> tuple[str, float]:
    """Split `function=weight`; the weight defaults to 1. Raises ValueError if the weight is invalid."""
    form = f"--reward.more {text}: the form is function=weight, with a number, as in length.py:short=0.1"
    function, weight = name_weight(text, form, positive=False)
    return function, 1.0 if weight is None else weight


def functions(reward: RewardConfig) -> list[str]:
    """Return the names of all configured rewards. Raises ValueError as `weighted` does."""
    return [reward.function, *(weighted(each)[0] for each in reward.more)]


def short_name(function: str) -> str:
    """Return a reward's name for metrics: the built-in's or function's name, or the file name without suffix."""
    file, _, name = function.rpartition(":")
    return name if file else Path(function).stem


def same_names(reward: RewardConfig) -> list[str]:
    """Return a line for each short name shared by several rewards. Raises ValueError as `weighted` does."""
    by: dict[str, list[str]] = {}
    for function in functions(reward):
        by.setdefault(short_name(function), []).append(function)
    return [
        f"--reward.more {' '.join(same[1:])}: {len(same)} rewards are named {name}, but parts need different names; "
        + ("name it once" if len(set(same)) == 1 else "rename a function or a file")
        for name, same in by.items()
        if len(same) > 1
    ]


def runs_programs(reward: RewardConfig) -> bool:
    """Return True if any reward can run programs."""
    return any(name in REWARDS and REWARDS[name].runs_programs for name in functions(reward))


def kwargs_of(reward: RewardConfig) -> dict:
    """Return the object in `--reward.kwargs`. ValueError messages do not show the text, which might contain a key."""
    return read_json("--reward.kwargs", reward.kwargs, '{"name": 1}')


def is_service(provider: str) -> bool:
    """Return True if `--sandbox.provider` is a service URL."""
    return provider.startswith(("http://", "https://"))


def reward_problems(config: Config) -> list[str]:
    """Return a line for each invalid setting of the rewards and their sandbox."""
    reward, problems = config.reward, []
    named = [("reward.function", reward.function)]
    for each in reward.more:
        try:
            named.append(("reward.more", weighted(each)[0]))
        except ValueError as error:
            problems.append(str(error))
    for flag_name, function in named:
        if ".py" in function:
            problems += file_problems(flag_name, function, default="compute_score")
        elif not function.endswith(SUFFIXES):
            found = name_problems(flag_name, function, REWARDS, file_allowed=True)
            problems += [f"{each}, or a judge.yaml" for each in found]
    try:
        given = kwargs_of(reward)
        if given and not any(".py" in function for _, function in named):
            what = f"no function in a file takes {', '.join(given)} (--reward.function); leave it out"
            problems.append(f"--reward.kwargs: {what}")
    except ValueError as error:
        problems.append(str(error))
    if len(named) == 1 + len(reward.more):
        problems += same_names(reward)
    return problems + _sandbox_problems(config.sandbox.provider)


def reward_model_problems(config: Config) -> list[str]:
    """Return a line per problem with the `--reward.model` file, or one line if a process reward model is missing."""
    try:
        found = classifier_of(config.reward.model)
    except ValueError as error:
        return str(error).splitlines()
    if config.algo.advantage != "grpo_process" or (found and found.steps):
        return []
    return [
        "--algo.advantage grpo_process: learns from the scores of steps, which a process reward model gives: name "
        "one by --reward.model rm.yaml with a path and steps, the separator of steps (docs/rewards.md)"
    ]


def _sandbox_problems(provider: str) -> list[str]:
    if not is_service(provider):
        name, image, _ = provider.partition(":")
        name = name if image and name in CONTAINERS else provider
        return name_problems("sandbox.provider", name, SANDBOXES, file_allowed=False)
    try:
        parts = urlsplit(provider)
        _ = parts.port
    except ValueError as error:
        return [f"--sandbox.provider {redact_text(provider)}: is not an address ({error})"]
    if not parts.hostname:
        return [f"--sandbox.provider {redact_text(provider)}: names no host"]
    if parts.username is not None or parts.password is not None:
        return ["--sandbox.provider: the address contains a login, which would reach logs; leave it out"]
    return []
