"""Tries the reward of a run on its data before the run.

    python -m spmdrl.rewards try --config configs/gsm8k_grpo.yaml [--data SOURCE] [--rows 64] [--json]

It grades right answers, none and wrong ones on rows of `--data.train` (or of SOURCE) and says which share of them
scores what. Other flags are those of `spmdrl.train`. The exit code is 1 where right answers do not score best or
something else is wrong with the reward, 2 after a mistake in the command line.
"""

import logging
import sys

from spmdrl.config.fields import ConfigError
from spmdrl.config.judge import engine_judges, judge_file_problems
from spmdrl.config.load import from_command_line
from spmdrl.config.rewards import reward_problems, runs_programs
from spmdrl.data.prompts import load_prompts
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.rewards.base import RewardError
from spmdrl.rewards.load import load_reward
from spmdrl.rewards.trial import trial
from spmdrl.rewards.trial_report import as_json, notes, table, verdicts

PROG = "python -m spmdrl.rewards try"
ROWS = 64
"""Rows that are tried unless `--rows` says otherwise."""
LONGEST = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Print what answers get; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] != "try" or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        as_text, rows, rest = _own_flags(words[1:])
        cfg = from_command_line(rest, PROG).config
        if wrong := reward_problems(cfg) + judge_file_problems(cfg.reward):
            raise ConfigError("\n".join(wrong))
        if asked := engine_judges(cfg):
            raise ConfigError(f"{asked[0][0]} judges on the engine of a run, and none runs here: try it with a url")
        tokenizer = load_tokenizer(resolve(cfg.model.path, cfg.model.trust_remote_code), cfg.model.trust_remote_code)
        prompts = load_prompts(cfg.data.train, cfg.data, tokenizer, LONGEST, rows)
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
    problems = verdicts(found)
    if as_text:
        print(f"{grader.name} on {len(prompts)} rows of {prompts.source}")
        print(table(found.rows))
        if cfg.reward.model:
            print(f"note: the score of --reward.model {cfg.reward.model} is not in it, as no model runs here")
        for each in notes(found):
            print(f"note: {each}")
        print("\n".join(f"problem: {each}" for each in problems) or "nothing is wrong with what was tried")
    else:
        print(as_json(found))
    return int(bool(problems))


def _own_flags(words: list[str]) -> tuple[bool, int, list[str]]:
    """Return (text or JSON, rows, the flags of a run)."""
    text, rows, rest = True, ROWS, []
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name == "--json":
            text = False
        elif name in ("--rows", "--data"):
            value = value if equals else next(given, "")
            if name == "--data":
                rest += ["--data.train", value]
            elif not value.isdigit() or not int(value):
                raise ConfigError(f"--rows {value}: a number above 0 is wanted")
            else:
                rows = int(value)
        else:
            rest.append(word)
    return text, rows, rest


if __name__ == "__main__":
    sys.exit(main())
