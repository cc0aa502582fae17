"""Checks the settings of a judge. No message holds a login or what may be a key."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from spmdrl.config.dump import redact_text
from spmdrl.config.rules import RULES
from spmdrl.config.schema import Config, JudgeConfig, RewardConfig

JUDGE = "judge"
"""Name of the reward that asks one."""


def uses_judge(reward: RewardConfig) -> bool:
    """Tell whether one of the rewards is a judge."""
    return JUDGE in (reward.function, *(each.rpartition("=")[0] or each for each in reward.more))


def judge_problems(config: Config) -> list[str]:
    """One line for each setting of a judge that does not serve; none where there is no judge."""
    return problems_of(config.judge) if uses_judge(config.reward) else []


def problems_of(judge: JudgeConfig, numbers: bool = False) -> list[str]:
    """One line for each setting that does not serve. numbers: also those that their own rules refuse."""
    problems = []
    if numbers:
        of = {name.removeprefix("judge."): rule for name, rule in RULES.items() if name.startswith("judge.")}
        given = {name: getattr(judge, name) for name in of}
        problems += [f"--judge.{k.replace('_', '-')} {v}: {of[k][1]}" for k, v in given.items() if not of[k][0](v)]
    if url := _url_problem(judge.url):
        problems.append(f"--judge.url {redact_text(judge.url)!r}: {url}")
    if not judge.model:
        problems.append("--judge.model '': name the judge, as its server calls it")
    if judge.rubric and not Path(judge.rubric).expanduser().is_file():
        problems.append(f"--judge.rubric {judge.rubric}: there is no such file (from {Path.cwd()})")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.key_env):
        # It may be the key itself.
        problems.append("--judge.key-env: wants the name of an environment variable, and never the key")
    return problems


def _url_problem(url: str) -> str:
    if not url:
        return "a judge needs a server of chat completions, as http://host:8000/v1"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", url):
        return "must begin with http:// or https:// and a host, as http://host:8000/v1"
    if parts.username is not None or parts.password is not None:
        return "holds a login; put an API key in the environment variable that --judge.key-env names"
    if parts.fragment:
        return "has a part after #, which no server gets"
    return ""
