"""Rules between the judges of a run and its other settings."""

from spmdrl.config.judge import JudgeConfig, judges, read_judge
from spmdrl.config.schema import Config


def judging_problems(config: Config) -> list[str]:
    """One line for each setting that does not go with a judge; none for judges that do not serve by themselves."""
    found: list[tuple[str, JudgeConfig]] = []
    try:
        for file in judges(config.reward):
            found.append((file, read_judge(file)))
    except ValueError:
        # `judge_problems` tells of it.
        return []
    compare = next((file for file, judge in found if judge.compare), "")
    return _group_problems(config, compare) if compare else []


def _group_problems(config: Config, file: str) -> list[str]:
    """Groups of one, of which a judge has nothing to compare."""
    algo, problems = config.algo, []
    # A greedy response is compared, too. Advantages in files may ask for one.
    alone = algo.advantage != "remax" and ".py" not in algo.advantage
    for flag, samples, asked in (
        ("--rollout.samples-per-prompt", config.rollout.samples_per_prompt, alone),
        ("--eval.samples", config.eval.samples, bool(config.eval.every and config.data.eval)),
    ):
        if asked and samples == 1:
            rest = ", or --eval.every 0" if flag == "--eval.samples" else ""
            problems.append(f"{flag} 1: {file} compares the responses of a prompt (compare), so take 2 or more{rest}")
    return problems
