"""Rules between the judges of a run and its other settings."""

from spmdrl.config.judge import POLICY, JudgeConfig, judges, read_judge
from spmdrl.config.schema import Config


def engine_judges(config: Config) -> list[tuple[str, JudgeConfig]]:
    """Return files and settings of the judges on the run's engine. Raises ValueError as `read_judge` does."""
    found = [(file, read_judge(file)) for file in judges(config.reward)]
    return [(file, judge) for file, judge in found if judge.engine]


def frozen_judges(config: Config) -> list[tuple[str, JudgeConfig]]:
    """Return those of them that have weights of their own."""
    return [(file, judge) for file, judge in engine_judges(config) if judge.engine != POLICY]


def judged_tokens(config: Config) -> int:
    """Return the most tokens of a question and its verdict that the engine is asked for; 0 without such a judge."""
    return max((j.max_prompt_tokens + j.max_new_tokens for _, j in engine_judges(config)), default=0)


def judging_problems(config: Config) -> list[str]:
    """One line for each setting that does not go with a judge; none for judges that do not serve by themselves."""
    try:
        found = [(file, read_judge(file)) for file in judges(config.reward)]
    except ValueError:
        # `judge_problems` tells of it.
        return []
    compare = next((file for file, judge in found if judge.compare), "")
    on_engine = next((file for file, judge in found if judge.engine), "")
    frozen = next((file for file, judge in found if judge.engine not in ("", POLICY)), "")
    problems = _group_problems(config, compare) if compare else []
    if compare and config.env:
        problems.append(
            f"--env {config.env}: {compare} compares the responses of a prompt (compare), and here each of them ends a "
            "conversation of its own; leave compare out, so that each is graded by itself"
        )
    if on_engine and config.parallel.placement == "split":
        problems.append(
            f"--parallel.placement split: {on_engine} judges on the run's engine (engine), which samples ahead there, "
            "on ranks of its own; take colocated, or a judge at a url"
        )
    if frozen and config.lora.rank and config.lora.push == "adapter":
        problems.append(
            f"--lora.push adapter: the engine keeps the model beneath the adapters, and {frozen} has it read another "
            "(engine); take merged, or engine: policy"
        )
    engines = [judge.engine for _, judge in found if judge.engine]
    if late := [i for i, engine in enumerate(engines) if engine == POLICY and set(engines[:i]) - {POLICY}]:
        last = [file for file, judge in found if judge.engine][late[0]]
        problems.append(
            f"--reward.more {last}: {frozen} takes the policy's place in the engine, so name {last} (engine: policy) "
            "before it"
        )
    return problems


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
            rest = " (a training may do without: --eval.every 0)" if flag == "--eval.samples" else ""
            problems.append(f"{flag} 1: {file} compares the responses of a prompt (compare), so take 2 or more{rest}")
    return problems
