"""Measure accuracy and pass@k of a model on a prompt set: `python -m spmdrl.evaluate --model.path ...`.

    python -m spmdrl.evaluate --config configs/gsm8k_grpo.yaml --model.path runs/gsm8k/checkpoints/latest/model

The command also accepts config files from training runs, and ignores settings that only apply to training. It evaluates
all prompts in `--data.eval`, unless a flag or a hand-written file sets `--eval.prompts`. The last line on stdout is a
JSON object with the model, the data, the number of prompts and samples, and the results. The results are null if no
sample was graded. Logs are written to the folder `<run folder>-eval`, along with some conversations (`samples.jsonl`)
if `--env` is set. After Ctrl-C, SIGTERM or SIGUSR1, the JSON object contains the results so far, and its key `stopped`
gives the reason.
"""

import dataclasses
import json
from typing import Any

from spmdrl.config.evaluation import EvaluationConfig, as_run, check_config, evaluation_lines
from spmdrl.config.load import Loaded
from spmdrl.config.schema import Config
from spmdrl.session.job import Job, jobs, late
from spmdrl.session.launch import launch


def evaluate(run) -> None:
    """Sample and grade all prompts, then print the results."""
    evaluation = run.evaluation
    evaluation.keep_graded()
    with run.memory.rollout_phase():
        run.evaluate(0)
    with run.memory.training_phase():
        run.judge()
    run.journal.rows(evaluation.take_rows(1))
    if run.world.is_first:
        print(json.dumps(evaluation.summary()), flush=True)


def settle(job: Job, loaded: Loaded[EvaluationConfig]) -> Loaded[Any]:
    """Return the settings of a run that only evaluates, or the user's own settings for a dry run."""
    # Ignore `eval.prompts` from a run folder's config.yaml, because that value is for evaluations during training.
    prompts = loaded.config.eval.prompts if "eval.prompts" in loaded.given else 0
    config = dataclasses.replace(loaded.config, eval=dataclasses.replace(loaded.config.eval, prompts=prompts))
    return dataclasses.replace(loaded, config=config if loaded.dry_run else as_run(config, prompts))


def dry_run(job: Job, loaded: Loaded[EvaluationConfig]) -> None:
    """Print the settings, the plan, and a summary of the first rows with an example."""
    from spmdrl.plan import dry

    dry.dry_run(job, loaded, as_run(loaded.config, loaded.config.eval.prompts))


JOB = Job(
    module="spmdrl.evaluate",
    page="docs/usage.md",
    settings=EvaluationConfig,
    check=check_config,
    # Accept the config files of every job that samples.
    reads=lambda: tuple(job.settings for job in jobs().values() if issubclass(job.settings, Config)),
    lines=evaluation_lines,
    settle=settle,
    build=late("spmdrl.rl.build:build_run"),
    train=evaluate,
    dry=dry_run,
    keeps=lambda cfg: False,
    columns=(),
    phases=(),
)

if __name__ == "__main__":
    launch(JOB)
