"""Loads the grader for `--reward.function`, and checks rewards against the data, results and other settings."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from spmdrl.config.builtin import REWARDS
from spmdrl.config.judge import is_judge, read_judge
from spmdrl.config.rewards import functions, kwargs_of, same_names, short_name, weighted
from spmdrl.config.schema import RewardConfig, SandboxConfig
from spmdrl.data.builtin import nearest
from spmdrl.data.prompts import PromptSet
from spmdrl.data.scores import describe
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput, as_reward
from spmdrl.rewards.combined_reward import CombinedReward, Term
from spmdrl.rewards.forms import load_builtin
from spmdrl.rewards.judge import Judge
from spmdrl.rewards.judge_engine import EngineAsker
from spmdrl.rewards.judge_server import Server
from spmdrl.rewards.pool import Pool
from spmdrl.rewards.text import truth_text

DEFAULT_FUNCTION = "compute_score"
QUICK: dict[str, Callable[[RewardInput], Reward]] = {
    name: load_builtin(name, {}) for name, row in REWARDS.items() if not row.pooled
}
"""Built-in rewards that are always fast, so each rank calls them directly instead of in worker processes."""


class Direct(Grader):
    """Grader that calls a trusted, fast function directly in `submit`."""

    def __init__(self, name: str, function: Callable[[RewardInput], object], finite: bool = True):
        super().__init__(name)
        self._function, self._finite = function, finite

    def submit(self, key: object, item: RewardInput) -> None:
        """Grade one response. Raises RewardError."""
        try:
            self._done.append((key, as_reward(self._function(item), self._finite)))
        except Exception as e:
            raise RewardError(f"reward function {self.name} failed on {describe(key)}: {type(e).__name__}: {e}") from e


def load_reward(cfg: RewardConfig, sandbox: SandboxConfig, finite: bool = True, sources: Iterable[str] = ()) -> Grader:
    """Load the grader selected by a run's settings.

    sandbox: sandbox settings for rewards that run programs. finite: if False, accept non-finite scores, for callers
    that drop such samples. sources: the known `data_source` values in the data.

    Raises ValueError, naming the flag, for an unknown built-in reward, a missing file or function, a file that cannot
    be imported, or duplicate reward names.
    """
    wanted = [(cfg.function, 1.0, "--reward.function")]
    wanted += [(*weighted(each), "--reward.more") for each in cfg.more]
    if problems := same_names(cfg):
        raise ValueError(problems[0])
    alone, terms = len(wanted) == 1 and not cfg.gate, []
    try:
        for function, weight, flag in wanted:
            grader = _load(function, flag, cfg, sandbox, finite, sources, alone)
            terms.append(Term(short_name(function), grader, weight))
    except ValueError:
        for term in terms:
            term.grader.close()
        raise
    return terms[0].grader if alone else CombinedReward(terms, cfg.gate)


def on_engine(grader: Grader) -> list[Grader]:
    """Return the graders that use the run's engine. A combined grader is replaced by the graders of its terms."""
    each = [term.grader for term in grader.terms] if isinstance(grader, CombinedReward) else [grader]
    return [one for one in each if one.on_engine]


def _load(
    name: str,
    flag: str,
    cfg: RewardConfig,
    sandbox: SandboxConfig,
    finite: bool,
    sources: Iterable[str],
    alone: bool,
) -> Grader:
    if name in QUICK:
        return Direct(name, QUICK[name], finite)
    if is_judge(name):
        judge, short = read_judge(name), short_name(name)
        asker = EngineAsker(judge, short) if judge.engine else Server(judge, short)
        return Judge(judge, short, asker)
    row = REWARDS.get(name)
    on_timeout = "zero" if _scores_timeouts(name, cfg) else "error"
    function = f"builtin:{name}" if row else _file_function(name, flag)
    settings = kwargs_of(cfg) if row is None else dataclasses.asdict(sandbox) if row.runs_programs else {}
    if name == "auto":
        settings["sources"] = sorted(set(sources))
    return Pool(function, cfg.workers, cfg.timeout, on_timeout, name, finite, settings, alone)


def check_ungraded(
    ungraded: int, samples: int, cfg: RewardConfig, where: str, group: int = 1, env: str = "", why: str = ""
) -> None:
    """Raise RewardError if more samples are dropped than `--reward.max-ungraded` allows.

    ungraded: number of samples without a score. group: number of samples per prompt. All samples of one prompt may be
    dropped, so that a single unreadable row does not stop a small run, unless the setting is 0 or there is only one
    prompt. env: value of `--env`; if set, the message also names environment failures as a possible cause. why: the
    environment's reason for the first sample, if known.
    """
    one_row = group if cfg.max_ungraded and group < samples else 0
    if ungraded > max(cfg.max_ungraded * samples, one_row):
        by = " + ".join(functions(cfg))
        problem = f"could not be graded by {by}"
        helps = (
            "fix their rows, the sandbox (python -m spmdrl.tools.doctor) or the judge, add a reward that applies to "
        )
        if env:
            causes = f"the environment failed, its first prompt is too long, or {by} could not grade them"
            problem = f"of --env {env} are left out, {f'the first because {why}' if why else f'because {causes}'}"
            helps = f"fix the environment, raise --rollout.max-prompt-tokens if prompts are too long, {helps}"
        raise RewardError(
            f"{ungraded} of {samples} samples of {where} {problem}; that is more than --reward.max-ungraded "
            f"{cfg.max_ungraded:g} allows; the log names the first ones with the reason: {helps}them "
            "(--reward.more), or raise that limit"
        )


def scores_timeouts(cfg: RewardConfig) -> bool:
    """Return whether any of the rewards scores 0 when grading times out.

    Otherwise a timeout stops the job or, if the reward has time limits of its own, drops the sample. Judges and the
    rewards in QUICK have no grading timeout.
    """
    return any(_scores_timeouts(name, cfg) for name in functions(cfg))


def _scores_timeouts(name: str, cfg: RewardConfig) -> bool:
    row = REWARDS.get(name)
    if is_judge(name) or (row and (row.has_clocks or not row.pooled)):
        return False
    return cfg.on_timeout == "zero" or (cfg.on_timeout == "auto" and row is not None)


def check_cost(cfg: RewardConfig, cost: str) -> None:
    """Check that `--safety.cost`, a part of the reward, cannot be 0 merely because grading timed out.

    Raises ValueError if timeouts score 0, because the parts, and therefore the cost, would then be 0 too.
    """
    if cost and scores_timeouts(cfg):
        by = " or ".join(functions(cfg))
        raise ValueError(
            f"--reward.on-timeout {cfg.on_timeout}: a grading by {by} that takes too long has 0 in every part, so the"
            f" cost --safety.cost {cost} would be 0 there; set --reward.on-timeout error"
        )


def _file_function(spec: str, flag: str) -> str:
    """Complete `file.py[:name]` to `/absolute/file.py:name`."""
    if spec.endswith(".py"):
        file, name = spec, DEFAULT_FUNCTION
    elif ".py:" in spec:
        file, _, name = spec.rpartition(":")
    elif "/" in spec or ":" in spec:
        raise ValueError(f"{flag} {spec!r}: give a file as path/to/file.py[:function]")
    else:
        raise ValueError(f"unknown {flag} {spec!r}: {nearest(spec, REWARDS)}, a judge.yaml, or a file.py[:function]")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{flag} {spec!r}: there is no file {path}")
    if not name.isidentifier():
        raise ValueError(f"{flag} {spec!r}: {name!r} is not a function name; give path/to/file.py[:function]")
    return f"{path}:{name}"


def check_truths(prompts: PromptSet, reward: RewardConfig) -> None:
    """Check that a run's fast built-in rewards, and `math`, can read the ground truth of every row.

    Fast rewards validate the ground truth before they look at the response, so scoring a dummy response is enough to
    validate a row. Raises ValueError with the first row that a reward cannot grade, the reason, and the number of such
    rows if there are several.
    """
    checks = QUICK | {"math": lambda item: truth_text(item.ground_truth)}
    for name in functions(reward):
        # Environment rewards exist only within an episode.
        if name == "environment" or not (score := checks.get(name)):
            continue
        found: list[tuple[int, str]] = []
        for prompt in prompts.prompts:
            try:
                score(RewardInput(prompt.data_source, "0", prompt.ground_truth, prompt.extra, prompt.content))
            except ValueError as error:
                found.append((prompt.index, str(error)))
        if found:
            index, why = found[0]
            more = f" ({len(found)} of {len(prompts)} rows have such a problem)" if len(found) > 1 else ""
            raise ValueError(f"{prompts.place(index)}: {name} cannot grade this row: {why}{more}")
