"""Settings of the environments that `--env` names, and the rules for them."""

import hashlib
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from spmdrl.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, Free, setting
from spmdrl.config.fields import ConfigError, Problems
from spmdrl.config.rewards import weighted
from spmdrl.config.schema import Config, RewardConfig
from spmdrl.config.yaml_file import SUFFIXES, read_settings, read_text

ROWS = "rows"
"""Value of `--env` with which each row of the data names its environment, in its column `env`."""
COLUMN = "env"
OWN_REWARD = "environment"
"""Value of `--reward.function` with which the reward of an episode is the sum of the rewards of its environment."""


@dataclass
class EnvironmentConfig:
    """An environment and its limits, as a file for `--env` describes them (docs/agents.md)."""

    environment: str = ""
    """The environment: `file.py:Class`, `package.module:Class`, `builtin:NAME`, `file.py:TOOLS` (a list of tool
    functions), or `rows` if every row of the data names its environment in the column `env`."""
    settings: dict = field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    max_turns: int = setting(16, COUNT)
    """Maximum number of responses in an episode. After the last one the environment answers once more, and the episode
    ends."""
    turn_tokens: int = setting(0, NOT_NEGATIVE)
    """Maximum number of tokens of one response; a longer one is cut to this length, and the environment gets the cut
    response. 0: no limit but that of the episode's tokens."""
    max_seconds: float = setting(0.0, NOT_NEGATIVE, free=Free.LIMIT)
    """Maximum number of seconds that an episode may take in environment and engine together; 0: no limit. A run that
    reaches this limit is not exactly repeatable."""
    timeout: float = setting(30.0, POSITIVE, free=Free.LIMIT)
    """Maximum number of seconds that one call of the environment may take. An attribute `timeout_s` of the environment
    replaces this limit."""
    reward_timeout: float = setting(60.0, POSITIVE, free=Free.LIMIT)
    """Maximum number of seconds that the environment may take to compute the final reward of an episode."""
    on_timeout: Literal["tell", "end"] = "tell"
    """Consequence of a call that took too long: the model reads a message about it (`tell`), or the episode ends
    (`end`)."""
    longest_answer: int = setting(10_000, COUNT)
    """Maximum number of characters of a tool's answer that the model reads. A longer one is cut, with a mark at the
    cut."""
    cut: Literal["head", "tail", "middle"] = "middle"
    """Part of a tool's answer that is kept if the answer is longer than `longest_answer`: its beginning (`head`), its
    end (`tail`), or both without the middle (`middle`)."""
    calls: str = "auto"
    """The form in which the model writes tool calls (docs/conversations.md). `auto`: the form that the chat template
    uses."""
    history: Literal["keep", "branch"] = "keep"
    """Treatment of a chat template that renders earlier turns differently once later turns follow: `keep` continues
    with the sampled tokens, and `branch` starts a branch of the episode with the new rendering."""
    max_open: int = setting(0, NOT_NEGATIVE, free=Free.LIMIT)
    """Maximum number of an engine's episodes that are open at the same time; groups are always opened completely. 0: no
    limit."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Number of processes that run environments, for each engine."""
    memory_mb: int = setting(0, NOT_NEGATIVE, free=Free.LIMIT)
    """Maximum memory, in MiB, of each process that runs environments; 0: no limit."""
    python: str = setting("", free=Free.LIMIT)
    """Python interpreter of the processes that run environments, for environments whose packages conflict with the
    run's. It needs PyYAML and the environment's packages. Empty: the run's interpreter."""


DECIDE = tuple(each.name for each in fields(EnvironmentConfig) if not each.metadata.get("free"))
"""Settings that change the content of episodes; a resume must keep them."""


def read_environment(env: str) -> EnvironmentConfig:
    """Return the environment that a value of `--env` names, with its limits.

    A YAML file with verl's keys `tools` or `interaction` is itself an environment, which gets the default limits.

    Raises:
        ValueError: the file cannot be read, or its settings are invalid; the message has a line for each problem.
    """
    verl = ("tools:", "interaction:")
    if not env.endswith(SUFFIXES) or any(line.startswith(verl) for line in read_text("--env", env).splitlines()):
        return EnvironmentConfig(environment=env)
    return read_settings("--env", env, EnvironmentConfig, "an environment (docs/agents.md)", _file_problems)


def _file_problems(found: EnvironmentConfig, given: Collection[str]) -> list[str]:
    problems = [] if found.environment else ["environment '': name it, as file.py:Class or builtin:guess"]
    if found.python and not shutil.which(found.python):
        problems.append(f"python {found.python!r}: there is no such interpreter")
    if not isinstance(found.settings, dict):
        problems.append(f"settings {found.settings!r}: must be names with values, such as {{numbers: 8}}")
    elif found.settings and found.environment == ROWS:
        problems.append("settings: with environment rows each row has its own settings; leave them out")
    return problems


def environment_problems(cfg: Config) -> list[str]:
    """Return a line for each setting that conflicts with `--env`, or that needs `--env` if it is not set."""
    if not cfg.env:
        if any(function == OWN_REWARD for function, _ in _weights(cfg.reward)):
            flag = "--reward.function" if cfg.reward.function == OWN_REWARD else "--reward.more"
            return [f"{flag} {OWN_REWARD}: there is no environment whose rewards could be summed; name one by --env"]
        return []
    try:
        found = read_environment(cfg.env)
    except ValueError as error:
        return str(error).splitlines()
    wrong_if = {
        "data.chat off: an environment exchanges messages, which a chat template renders": cfg.data.chat == "off",
        "data.prefill: with --env the model begins its turns without a prefill": cfg.data.prefill,
        "data.system: with --env the system message is in the prompt or comes from reset()": cfg.data.system,
    }
    problems = Problems(cfg, [f"--{line}; leave it out" for line, wrong in wrong_if.items() if wrong])
    if cfg.rollout.routing_replay:
        problems.add("rollout.routing_replay", "does not work with --env; leave one of the two out")
    policy, rollout = cfg.policy, cfg.rollout
    if found.history == "branch" and not (policy.share_prompts and policy.backend == "fsdp"):
        # Each branch may repeat all tokens before it, and all branches of an episode must be in one micro-batch.
        longest = found.max_turns * (rollout.max_prompt_tokens + rollout.max_new_tokens)
        if policy.max_tokens_per_microbatch < longest:
            problems.add(
                "env",
                f"history branch repeats the tokens that branches share where "
                f"{'--policy.share-prompts is off' if policy.backend == 'fsdp' else f'{policy.backend} trains'}, so "
                f"--policy.max-tokens-per-microbatch {policy.max_tokens_per_microbatch} must be at least {longest} "
                f"(max_turns {found.max_turns} x (max_prompt_tokens {rollout.max_prompt_tokens} + max_new_tokens "
                f"{rollout.max_new_tokens})); share prompts, or take history keep",
            )
    return problems


def weight_of(reward: RewardConfig) -> float:
    """Return the weight of the environment's rewards in the score; 0 if the settings do not name them as a reward."""
    return next((weight for function, weight in _weights(reward) if function == OWN_REWARD), 0.0)


def _weights(reward: RewardConfig) -> list[tuple[str, float]]:
    return [(reward.function, 1.0), *(weighted(each) for each in reward.more)]


def check_reward_is_chosen(cfg: Config, given: Collection[str]) -> None:
    """Refuse an environment if the user names no reward, because the default reward grades only the last response.

    given: settings that the user gave, without those in a config.yaml that a run wrote. Raises ConfigError with advice.
    """
    chosen = "env" not in given or "reward.function" in given or cfg.reward.function != RewardConfig.function
    if cfg.env and not chosen:
        raise ConfigError(
            f"--env {cfg.env}: choose the reward of an episode: --reward.function {OWN_REWARD} for the environment's "
            "own rewards, or another one, which grades the last response"
        )


def acts_by(env: str) -> str:
    """Return a text that changes when a setting or a file that determines the content of episodes changes.

    A resume compares it. Settings that are not in `DECIDE`, such as time limits, do not change the text. Raises
    ValueError as `read_environment` does.
    """
    found = read_environment(env)
    name, _, attribute = found.environment.rpartition(":")
    file, shown = (name, attribute) if name.endswith(".py") else (found.environment, found.environment)
    files = [_digest(file), _digest(str(found.settings.get("interaction_config_path") or ""))]
    # The hash of the file's content replaces its name, so that a moved file counts as the same environment.
    names = "" if files[0] and shown == file else shown
    return repr(([getattr(found, each) for each in DECIDE if each != "environment"], names, files))


def _digest(file: str) -> str:
    path = Path(file).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if file and path.is_file() else ""
