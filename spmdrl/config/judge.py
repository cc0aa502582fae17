"""Settings for judges (models that grade responses), with their rules. Messages never show a login or a key."""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from spmdrl.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, setting
from spmdrl.config.dump import redact_text
from spmdrl.config.rewards import functions
from spmdrl.config.schema import Config, RewardConfig
from spmdrl.config.yaml_file import SUFFIXES, read_settings


@dataclass
class JudgeConfig:
    """A model that grades responses, served at a URL or by the run's engine, as described by a YAML file
    (docs/judge.md).
    """

    url: str = ""
    """Chat completions server, such as `http://host:8000/v1`. Requests to it contain prompts, responses and ground
    truths."""
    model: str = ""
    """Name of the judge model on the server at `url`."""
    engine: str = ""
    """The judge model to run in the run's engine instead of at a URL: `policy` for the policy itself, or a frozen model
    with the policy's architecture, in any form that `--model.path` accepts."""
    max_prompt_tokens: int = setting(4096, COUNT)
    """Maximum number of tokens in a question to a judge in the engine. A response with a longer question gets no
    score."""
    max_new_tokens: int = setting(512, COUNT)
    """Maximum number of tokens in an answer from a judge in the engine."""
    rubric: str = ""
    """Grading instructions for the judge. Empty: a rubric that asks for correctness first, then for completeness and
    clarity."""
    compare: int = setting(0, NOT_NEGATIVE)
    """Maximum number of other responses in the group to compare each response with, in both orders. 0: every response
    is graded on its own."""
    votes: int = setting(1, COUNT)
    """Number of answers (votes) requested from the judge per question; their grades are averaged."""
    scale: int = setting(10, COUNT)
    """Highest grade. The score is the mean grade divided by this value, so it lies in [0, 1]. Not used for
    comparisons."""
    temperature: float = setting(0.0, NOT_NEGATIVE)
    """Sampling temperature of the judge."""
    max_chars: int = setting(20000, COUNT)
    """Maximum number of response characters that the judge reads; longer responses are cut, with a marker at the
    cut."""
    timeout: float = setting(120.0, POSITIVE)
    """Request timeout in seconds, from the start to the last byte of the answer."""
    retries: int = setting(4, NOT_NEGATIVE)
    """Maximum number of retries per vote after a rate limit, a failure or an answer without a verdict. If all attempts
    fail, the sample gets no score (`--reward.max-ungraded`)."""
    concurrency: int = setting(16, COUNT)
    """Maximum number of concurrent requests per rank."""
    budget: int = setting(0, NOT_NEGATIVE)
    """Maximum number of requests per rank, counted from each start of the job; if a rank needs more, the job ends. 0:
    no limit."""
    cache: str = ""
    """Cache folder for answers, so that no question is sent twice. Ranks and jobs can share the folder. Empty: answers
    are not cached."""
    key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key. If it is not set, requests are sent without a key."""


OF_URL = ("model", "timeout", "concurrency", "budget", "cache", "key_env")
"""Settings that only apply to a judge at a URL."""
OF_ENGINE = ("max_prompt_tokens", "max_new_tokens")
"""Settings that only apply to a judge in the run's engine."""
POLICY = "policy"
"""Value of `engine` that makes the policy itself the judge."""


def is_judge(function: str) -> bool:
    """Return True if `function`, the name of a reward, is the path of a judge's YAML file."""
    return function.endswith(SUFFIXES)


def read_judge(file: str) -> JudgeConfig:
    """Return the settings in a judge's YAML file. Raises ValueError with one line per problem."""
    # The judge can come from --reward.function or --reward.more, so messages name the file instead of a flag.
    what = "a judge (docs/judge.md)"
    return read_settings("--reward.function", file, JudgeConfig, what, _file_problems, ("key_env",), prefix="")


def judges(reward: RewardConfig) -> list[tuple[str, JudgeConfig]]:
    """Return (file, settings) for every judge in the rewards. Raises ValueError as `read_judge` and `weighted` do."""
    return [(each, read_judge(each)) for each in functions(reward) if is_judge(each)]


def engine_judges(config: Config) -> list[tuple[str, JudgeConfig]]:
    """Return (file, settings) for the judges that run in the run's engine. Raises ValueError as `judges` does."""
    return [(file, judge) for file, judge in judges(config.reward) if judge.engine]


def frozen_judges(config: Config) -> list[tuple[str, JudgeConfig]]:
    """Return (file, settings) for the judges that run in the run's engine, except for the policy itself."""
    return [(file, judge) for file, judge in engine_judges(config) if judge.engine != POLICY]


def judged_tokens(config: Config) -> int:
    """Return the maximum total length, in tokens, of a question and its answer over all judges in the run's engine.

    Returns 0 if the engine runs no judge.
    """
    return max((j.max_prompt_tokens + j.max_new_tokens for _, j in engine_judges(config)), default=0)


def graded_by(file: str) -> str:
    """Return a fingerprint of the settings that affect a judge's grades. Raises ValueError as `read_judge` does."""
    judge = read_judge(file)
    decides = (judge.model, judge.rubric, judge.votes, judge.scale, judge.temperature, judge.max_chars)
    # These settings are included only if set, so that judges without them keep the fingerprint of older versions.
    more = {"compare": judge.compare} if judge.compare else {}
    if judge.engine:
        more |= {name: getattr(judge, name) for name in ("engine", *OF_ENGINE, "retries")}
    return repr((*decides, more) if more else decides)


# ── rules ────────────────────────────────────────────────────────────────────


def _file_problems(judge: JudgeConfig, given: Collection[str]) -> list[str]:
    problems = []
    if judge.compare and judge.scale != JudgeConfig.scale:
        problems.append(f"scale {judge.scale}: a comparison has no grades; leave out scale or compare")
    if judge.url and judge.engine:
        problems.append(f"engine {judge.engine}: a judge is at a url or on the run's engine; give one of them")
    elif url := "" if judge.engine else _url_problem(judge.url):
        problems.append(f"url {redact_text(judge.url)!r}: {url}")
    if not judge.model and not judge.engine:
        problems.append("model '': give the judge's name at its server")
    unread, where = (OF_URL, "at a url") if judge.engine else (OF_ENGINE, "on the run's engine")
    for name in unread:
        if not problems and getattr(judge, name) != getattr(JudgeConfig, name):
            problems.append(f"{name}: only a judge {where} reads it; leave it out")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.key_env):
        # Do not show the value: it might be the key itself.
        problems.append("key_env: must be the name of an environment variable, and never the key")
    return problems


def _url_problem(url: str) -> str:
    if not url:
        return "a judge needs a server of chat completions, as http://host:8000/v1, or engine: policy"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"is not an address ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", url):
        return "must begin with http:// or https:// and a host, as http://host:8000/v1"
    if parts.username is not None or parts.password is not None:
        return "contains a login; put an API key in the environment variable that key_env names"
    if parts.fragment:
        return "has a part after #, which is never sent to a server"
    return ""


def judge_problems(config: Config) -> list[str]:
    """Return a line for each judge setting that is invalid or conflicts with another setting of the run."""
    problems = judge_file_problems(config.reward)
    # A malformed `--reward.more` raises ValueError here; `reward_problems` reports it.
    with suppress(ValueError):
        return problems or _conflicts(config, judges(config.reward))
    return problems


def judge_file_problems(reward: RewardConfig) -> list[str]:
    """Return a line for each invalid setting in the judges' files."""
    problems = []
    with suppress(ValueError):
        for file in filter(is_judge, functions(reward)):
            try:
                read_judge(file)
            except ValueError as error:
                problems += str(error).splitlines()
    return problems


def _conflicts(config: Config, found: list[tuple[str, JudgeConfig]]) -> list[str]:
    compare = next((file for file, judge in found if judge.compare), "")
    on_engine = next((file for file, judge in found if judge.engine), "")
    frozen = next((file for file, judge in found if judge.engine not in ("", POLICY)), "")
    problems = _group_problems(config, compare) if compare else []
    if compare and config.env:
        problems.append(
            f"--env {config.env}: {compare} compares the responses of a prompt (compare), and in an environment each "
            "ends a different conversation; leave compare out, so that each is graded by itself"
        )
    if on_engine and config.parallel.placement == "split":
        problems.append(
            f"--parallel.placement split: {on_engine} runs on the run's engine (engine), which under split samples "
            "ahead on separate ranks; take colocated, or a judge at a url"
        )
    if frozen and config.lora.rank and config.lora.push == "adapter":
        problems.append(
            f"--lora.push adapter: the engine keeps the base model of the adapters, and {frozen} needs another there "
            "(engine); take merged, or engine: policy"
        )
    engines = [judge.engine for _, judge in found if judge.engine]
    if late := [i for i, engine in enumerate(engines) if engine == POLICY and set(engines[:i]) - {POLICY}]:
        last = [file for file, judge in found if judge.engine][late[0]]
        problems.append(
            f"--reward.more {last}: {frozen} replaces the policy in the engine, so name {last} (engine: policy) "
            "before it"
        )
    return problems


def _group_problems(config: Config, file: str) -> list[str]:
    """Return a line for each setting that leaves a prompt with only one response, which a judge cannot compare."""
    algo, problems = config.algo, []
    # remax also samples a greedy response for the judge to compare; a user's advantage function might do the same.
    alone = algo.advantage != "remax" and ".py" not in algo.advantage
    for flag, samples, compared in (
        ("--rollout.samples-per-prompt", config.rollout.samples_per_prompt, alone),
        ("--eval.samples", config.eval.samples, bool(config.eval.every and config.data.eval)),
    ):
        if compared and samples == 1:
            rest = " (training works without evaluation: --eval.every 0)" if flag == "--eval.samples" else ""
            problems.append(f"{flag} 1: {file} compares the responses of a prompt (compare), so take 2 or more{rest}")
    return problems
