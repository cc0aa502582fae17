"""Tries a run's reward on its data before the run starts.

    python -m spmdrl.rewards try --config configs/gsm8k_grpo.yaml [--data SOURCE] [--rows 64] [--json]

It grades correct, empty and wrong answers to rows of `--data.train` (or of SOURCE) and prints the scores for each kind
of answer. It accepts all flags of `spmdrl.train`. The exit code is 1 if correct answers do not score best or the reward
has any other problem, and 2 if the command line is invalid or the data or the reward cannot be loaded.
"""

import argparse
import json
import logging
import math
import sys

from spmdrl.config.fields import ConfigError
from spmdrl.config.judge import engine_judges, judge_file_problems
from spmdrl.config.load import from_command_line
from spmdrl.config.rewards import reward_problems, runs_programs
from spmdrl.config.user_code import printable
from spmdrl.data.prompts import load_prompts
from spmdrl.data.scores import is_right
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.rewards.base import RewardError
from spmdrl.rewards.load import load_reward
from spmdrl.rewards.trial import OTHER, Trial, trial

PROG = "python -m spmdrl.rewards try"
ROWS = "64"
"""Default of `--rows`, the number of rows to try."""
LONGEST = 1 << 30
ENOUGH = 0.95
"""In at least this fraction of each source's rows, the correct answer should score best, and in at least this fraction
of all rows it should get 1."""
BY_CHANCE = 0.2
"""In at most this fraction of rows, another row's answer may score as high as the correct one, because short answers
can coincide."""


def main(argv: list[str] | None = None) -> int:
    """Print the scores of correct and wrong answers, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] != "try" or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        own, rest = _own_flags().parse_known_args(words[1:])
        if not own.rows.isdigit() or not int(own.rows):
            raise ConfigError(f"--rows {own.rows}: give a whole number above 0")
        cfg = from_command_line(rest + ["--data.train", own.data] * (own.data is not None), PROG).config
        if wrong := reward_problems(cfg) + judge_file_problems(cfg.reward):
            raise ConfigError("\n".join(wrong))
        if judges := engine_judges(cfg):
            raise ConfigError(f"{judges[0][0]} uses the run's engine, which this command does not start: set a url")
        tokenizer = load_tokenizer(resolve(cfg.model.path, cfg.model.trust_remote_code), cfg.model.trust_remote_code)
        prompts = load_prompts(cfg.data.train, cfg.data, tokenizer, LONGEST, int(own.rows))
        grader = load_reward(
            cfg.reward, cfg.sandbox, cfg.filter.bad_sample == "stop", {p.data_source for p in prompts.prompts}
        )
    except (ConfigError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    try:
        found = trial(prompts.prompts, grader, runs_programs(cfg.reward))
    except RewardError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    finally:
        grader.close()
    problems = _problems(found)
    if not own.json:
        print(f"{grader.name} on {prompts.source}; number of rows: {len(prompts)}")
        print(_table(found))
        if cfg.reward.model:
            print(f"note: the scores are without that of --reward.model {cfg.reward.model}, as no model runs here")
        for each in _notes(found):
            print(f"note: {each}")
        print("\n".join(f"problem: {each}" for each in problems) or "nothing is wrong with what was tried")
    else:
        shares = [row.right if row.by_prompt else None for _, row in found.rows]
        kinds = [
            {"answers": sort, "written": row.kind, "tried": len(row.rewards), "right": right}
            for (sort, row), right in zip(found.rows, shares, strict=True)
        ]
        print(json.dumps({"ok": not problems, "problems": problems, "notes": _notes(found), "kinds": kinds}))
    return int(bool(problems))


def _own_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", nargs="?", default=ROWS, const="")
    parser.add_argument("--data", nargs="?", const="")
    return parser


def _problems(found: Trial) -> list[str]:
    """Return the problems found in the rewards, one line per problem."""
    out = [*_not_best(found), *_undeserving(found)]
    rewards = [r for _, row in found.rows for r in row.rewards.values()]
    if left_out := [(i, r.ungraded) for _, row in found.rows for i, r in row.rewards.items() if r.ungraded]:
        index, why = left_out[0]
        rows = f"in {len(dict(left_out))} of {len(found.sources)} rows"
        out.append(
            f"{len(left_out)} of {len(rewards)} answers could not be graded, {rows}, the first (prompt {index}) "
            f"because {printable(why)}"
        )
    if odd := sum(not r.ungraded and not math.isfinite(r.score) for r in rewards):
        out.append(f"scores that are not finite: {odd} of {len(rewards)}; a run leaves such samples out")
    if late := sum(r.timed_out for r in rewards):
        out.append(f"gradings that took too long: {late} of {len(rewards)} (--reward.timeout)")
    return out


def _not_best(found: Trial) -> list[str]:
    """Return a line per source whose correct answers score best in too few rows, or one line if none got a score."""
    best, most, out = found.best(), found.undeserved(), []
    if not best:
        if any(row.rewards for row in found.gold):
            return ["none of the right answers could be graded, so the reward was not checked on them"]
        return ["no row has an answer to try, so the reward was not checked on right answers"]
    for source, (count, share) in found.best_shares().items():
        if not count or share >= ENOUGH:
            continue
        its = [i for i, name in found.sources.items() if name == source and i in best]
        right, wrong = (sum(x.get(i, 0.0) for i in its) / count for x in (best, most))
        of = f" of {source}" if len(set(found.sources.values())) > 1 else ""
        out.append(
            f"right answers score best in {share:.1%} of the rows{of} (in their best form they get {right:.3g} on "
            f"average, and the best of the wrong ones {wrong:.3g}): the reward does not find the truth "
            "(--reward.function, --data.answer-column) or rewards something else, or rows are wrong"
        )
    return out


def _undeserving(found: Trial) -> list[str]:
    """Return one line naming all kinds of wrong answers that score as high as correct ones, or an empty list."""
    best, least, named = found.best(), {}, []
    for _, row in found.rows:
        least |= {i: min(score, least.get(i, score)) for i, score in row.by_prompt.items()}

    def as_much(i: int, score: float) -> bool:
        # If even the correct answer gets the lowest score of its row, `_not_best` reports the row, so wrong answers
        # with the same score are not counted here.
        return score >= best.get(i, 1.0) and (is_right(score) or score > least[i])

    for row in found.garbage:
        scores = row.by_prompt
        share = sum(as_much(i, score) for i, score in scores.items()) / len(scores) if scores else 0.0
        if share > (BY_CHANCE if row.kind.startswith(OTHER) else 0.0):
            named.append(f"`{row.kind}` ({share:.1%} of the rows)")
    return [f"wrong and empty answers score as much as right ones: {', '.join(named)}"] if named else []


def _notes(found: Trial) -> list[str]:
    """Return useful observations about a reward that are not problems, one per line."""
    best, out = found.best(), []
    if best and len(best) < len(found.sources):
        out.append(
            f"rows without a right answer that was graded: {len(found.sources) - len(best)} of {len(found.sources)}"
        )
    if best and (full := sum(is_right(x) for x in best.values()) / len(best)) < ENOUGH:
        out.append(f"right answers get 1 or more in {full:.1%} of the rows, and eval/accuracy counts only these")
    most = found.undeserved()
    if count := sum(is_right(x) and x < best.get(i, x) for i, x in most.items()):
        out.append(
            f"wrong answers get 1 or more, although less than right ones, in {count / len(most):.1%} of the rows, and"
            " eval/accuracy counts them as right"
        )
    shares = found.best_shares()
    for source, (count, share) in shares.items() if len(shares) > 1 else ():
        result = f"right answers score best in {share:.1%} of {count}" if count else "no right answer was graded"
        out.append(f"rows of {source}: {result}")
    return out


def _table(found: Trial) -> str:
    lines = [f"{'answers':8} {'written':40} {'tried':>6} {'score >= 1':>10} {'mean':>8} {'least':>8} {'most':>8}"]
    for sort, row in found.rows:
        scores = row.by_prompt.values()
        numbers = "not graded"
        if scores:
            numbers = f"{row.right:10.1%} {sum(scores) / len(scores):8.3f} {min(scores):8.3f} {max(scores):8.3f}"
        lines.append(f"{sort:8} {row.kind:40} {len(row.rewards):6} {numbers:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
