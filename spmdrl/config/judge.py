"""A judge: a file that says which model grades responses. No message holds a login or what may be a key."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from spmdrl.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, setting
from spmdrl.config.dump import redact_text
from spmdrl.config.rewards import functions
from spmdrl.config.schema import RewardConfig
from spmdrl.config.yaml_file import SUFFIXES, read_fields, value_problems


@dataclass
class JudgeConfig:
    """A model that grades responses, as a file says it (docs/judge.md): behind a URL, or on the run's engine."""

    url: str = ""
    """Server of chat completions, as `http://host:8000/v1`. Its requests hold prompts, responses and truths."""
    model: str = ""
    """Name of the judge at that server."""
    engine: str = ""
    """In the place of a URL, the run's own engine: `policy`, the weights that it holds, or a frozen model of the
    policy's architecture, as `--model.path`."""
    max_prompt_tokens: int = setting(4096, COUNT)
    """Longest question to the engine, which is built for it. A response whose question is longer has no score."""
    max_new_tokens: int = setting(512, COUNT)
    """Longest verdict of the engine."""
    rubric: str = ""
    """Text that says what gets which grade. Empty: one for correctness, then completeness and clarity."""
    compare: int = setting(0, NOT_NEGATIVE)
    """0: a response is graded by itself. N: it is compared with up to N others of its group, in both orders."""
    votes: int = setting(1, COUNT)
    """Answers to each question, which are averaged."""
    scale: int = setting(10, COUNT)
    """Highest grade; the score is the mean grade divided by it, so it lies in [0, 1]. Comparisons have none."""
    temperature: float = setting(0.0, NOT_NEGATIVE)
    """Sampling temperature of the judge."""
    max_chars: int = setting(20000, COUNT)
    """Characters of a response that the judge sees; it is told of the cut."""
    timeout: float = setting(120.0, POSITIVE)
    """Seconds of a request, to its last byte."""
    retries: int = setting(4, NOT_NEGATIVE)
    """Further attempts for a vote after a rate limit, a failure or an answer that is no verdict. Then the sample has no
    score (`--reward.max-ungraded`)."""
    concurrency: int = setting(16, COUNT)
    """Requests under way at a time, on each rank."""
    budget: int = setting(0, NOT_NEGATIVE)
    """Most requests of this start of the job, on each rank, after which the job ends. 0: no bound."""
    cache: str = ""
    """Folder of answers, which ranks and jobs may share: what was asked before is not asked again. Empty: none."""
    key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key. Not set: requests carry none."""


OF_URL = ("model", "timeout", "concurrency", "budget", "cache", "key_env")
"""Settings that only a judge behind a URL reads."""
OF_ENGINE = ("max_prompt_tokens", "max_new_tokens")
"""Settings that only a judge on the run's engine reads."""
POLICY = "policy"
"""The engine that is the policy itself."""


def is_judge(function: str) -> bool:
    """Tell whether a reward is the file of a judge."""
    return function.endswith(SUFFIXES)


def judges(reward: RewardConfig) -> list[str]:
    """Return the files of all judges among the rewards. Raises ValueError as `weighted` does."""
    return [each for each in functions(reward) if is_judge(each)]


def judge_problems(reward: RewardConfig) -> list[str]:
    """One line for each setting of a judge that does not serve; none where there is no judge."""
    problems = []
    try:
        files = judges(reward)
    except ValueError:
        # `reward_problems` tells of it.
        return []
    for file in files:
        try:
            read_judge(file)
        except ValueError as error:
            problems += str(error).splitlines()
    return problems


def read_judge(file: str) -> JudgeConfig:
    """Return the judge of a file, which is YAML: the fields of `JudgeConfig`.

    Raises:
        ValueError: it cannot be read, or settings do not serve: one line for each.
    """
    given, problems = read_fields("--reward.function", file, JudgeConfig, "a judge (docs/judge.md)", ("key_env",))
    judge = JudgeConfig(**given)
    if problems := problems or problems_of(judge):
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    return judge


def graded_by(file: str) -> str:
    """Return what of a judge decides its grades; where it is and how it is asked do not.

    Raises:
        ValueError: see `read_judge`.
    """
    judge = read_judge(file)
    decides = (judge.model, judge.rubric, judge.votes, judge.scale, judge.temperature, judge.max_chars)
    # Settings that a file leaves out change no hash.
    more = {"compare": judge.compare} if judge.compare else {}
    if judge.engine:
        more |= {name: getattr(judge, name) for name in ("engine", *OF_ENGINE, "retries")}
    return repr((*decides, more) if more else decides)


def problems_of(judge: JudgeConfig) -> list[str]:
    """One line for each setting that does not serve."""
    problems = value_problems(judge)
    if judge.compare and judge.scale != JudgeConfig.scale:
        problems.append(f"scale {judge.scale}: a comparison has no grades; leave it out, or compare too")
    if judge.url and judge.engine:
        problems.append(f"engine {judge.engine}: a judge is at a url or on the run's engine; give one of them")
    elif url := "" if judge.engine else _url_problem(judge.url):
        problems.append(f"url {redact_text(judge.url)!r}: {url}")
    if not judge.model and not judge.engine:
        problems.append("model '': name the judge, as its server calls it")
    unread, where = (OF_URL, "at a url") if judge.engine else (OF_ENGINE, "on the run's engine")
    for name in unread:
        if not problems and getattr(judge, name) != getattr(JudgeConfig, name):
            problems.append(f"{name}: only a judge {where} reads it; leave it out")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.key_env):
        # It may be the key itself.
        problems.append("key_env: wants the name of an environment variable, and never the key")
    return problems


def _url_problem(url: str) -> str:
    if not url:
        return "a judge needs a server of chat completions, as http://host:8000/v1, or engine: policy"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", url):
        return "must begin with http:// or https:// and a host, as http://host:8000/v1"
    if parts.username is not None or parts.password is not None:
        return "holds a login; put an API key in the environment variable that key_env names"
    if parts.fragment:
        return "has a part after #, which no server gets"
    return ""
