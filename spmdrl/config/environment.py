"""Settings for the environments in `--env`, with their rules."""

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
"""Value of `--env` that lets each row name its own environment, in its column `env`."""
COLUMN = "env"
OWN_REWARD = "environment"
"""Value of `--reward.function` that makes an episode's reward the sum of its environment's rewards."""


@dataclass
class EnvironmentConfig:
    """An environment and its limits, as described by a file for `--env` (docs/agents.md)."""

    environment: str = ""
    """The environment: `file.py:Class`, `package.module:Class`, `builtin:NAME`, `file.py:TOOLS` (a list of tool
    functions), or `rows` if every row names its environment in the column `env`."""
    settings: dict = field(default_factory=dict)
    """Keyword arguments for the environment class."""
    max_turns: int = setting(16, COUNT)
    """Maximum number of responses in an episode. The environment still answers the last one, and then the episode
    ends."""
    turn_tokens: int = setting(0, NOT_NEGATIVE)
    """Maximum number of tokens in one response; longer responses are truncated before the environment sees them. 0: no
    limit other than the episode's token limit."""
    max_seconds: float = setting(0.0, NOT_NEGATIVE, free=Free.LIMIT)
    """Time limit in seconds for an episode, in environment and engine together. 0: no limit. A run that reaches this
    limit is not exactly reproducible."""
    timeout: float = setting(30.0, POSITIVE, free=Free.LIMIT)
    """Timeout in seconds for one environment call. An environment's `timeout_s` attribute overrides it."""
    reward_timeout: float = setting(60.0, POSITIVE, free=Free.LIMIT)
    """Timeout in seconds for the environment to compute an episode's final reward."""
    on_timeout: Literal["tell", "end"] = "tell"
    """Response to a call that times out: the model gets a message about it (`tell`), or the episode ends (`end`)."""
    longest_answer: int = setting(10_000, COUNT)
    """Maximum length, in characters, of a tool answer that the model reads. Longer answers are cut, with a marker at
    the cut."""
    cut: Literal["head", "tail", "middle"] = "middle"
    """Which part of a tool answer longer than `longest_answer` to keep: its beginning (`head`), its end (`tail`), or
    both ends without the middle (`middle`)."""
    calls: str = "auto"
    """Tool call format of the model (docs/conversations.md). `auto`: the format that the chat template uses."""
    history: Literal["keep", "branch"] = "keep"
    """Handling of a chat template that renders earlier turns differently once later turns follow: `keep` continues with
    the sampled tokens, and `branch` starts a new branch of the episode with the new rendering."""
    max_open: int = setting(0, NOT_NEGATIVE, free=Free.LIMIT)
    """Maximum number of concurrently open episodes per engine; the episodes of a group are always opened together. 0:
    no limit."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Number of environment processes per engine."""
    memory_mb: int = setting(0, NOT_NEGATIVE, free=Free.LIMIT)
    """Memory limit in MiB for each environment process. 0: no limit."""
    python: str = setting("", free=Free.LIMIT)
    """Python interpreter for the environment processes, for environments whose packages conflict with the run's. It
    needs PyYAML and the environment's packages. If empty, the run's own interpreter is used."""


DECIDE = tuple(each.name for each in fields(EnvironmentConfig) if not each.metadata.get("free"))
"""Settings that affect the content of episodes; a resume must keep them."""


def read_environment(env: str) -> EnvironmentConfig:
    """Return the environment for a value of `--env`, with its limits.

    A YAML file with verl's keys `tools` or `interaction` is itself an environment and gets the default limits.

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
    """Return a line for each setting that conflicts with `--env`, or that needs `--env` when it is not set."""
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
        # Each branch can repeat all tokens before it, and all branches of an episode must be in the same micro-batch.
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
    """Return the weight of the environment's rewards in the score, or 0 if they are not used as a reward."""
    return next((weight for function, weight in _weights(reward) if function == OWN_REWARD), 0.0)


def _weights(reward: RewardConfig) -> list[tuple[str, float]]:
    return [(reward.function, 1.0), *(weighted(each) for each in reward.more)]


def check_reward_is_chosen(cfg: Config, given: Collection[str]) -> None:
    """Refuse an environment if the user chose no reward, because the default one grades only the last response.

    given: settings that the user gave, excluding those in a config.yaml written by a run. Raises ConfigError with
    advice.
    """
    chosen = "env" not in given or "reward.function" in given or cfg.reward.function != RewardConfig.function
    if cfg.env and not chosen:
        raise ConfigError(
            f"--env {cfg.env}: choose the reward of an episode: --reward.function {OWN_REWARD} for the environment's "
            "own rewards, or another one, which grades the last response"
        )


def acts_by(env: str) -> str:
    """Return a fingerprint of the settings and files that determine the content of episodes, for a resume to compare.

    It does not depend on settings outside `DECIDE`, such as time limits. Raises ValueError as `read_environment` does.
    """
    found = read_environment(env)
    name, _, attribute = found.environment.rpartition(":")
    file, shown = (name, attribute) if name.endswith(".py") else (found.environment, found.environment)
    files = [_digest(file), _digest(str(found.settings.get("interaction_config_path") or ""))]
    # Use the hash of the file's content instead of its name, so that a moved file is still the same environment.
    names = "" if files[0] and shown == file else shown
    return repr(([getattr(found, each) for each in DECIDE if each != "environment"], names, files))


def _digest(file: str) -> str:
    path = Path(file).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if file and path.is_file() else ""
