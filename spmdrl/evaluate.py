"""Accuracy and pass@k of a model on a prompt set.

    python -m spmdrl.evaluate --config configs/gsm8k_grpo.yaml --model.path runs/gsm8k/checkpoints/latest/model

Files of a training run are read too; what they say of training alone is passed over. All prompts of `--data.eval`,
unless a flag or a file written by hand sets `--eval.prompts`. The last line on stdout is one JSON object: model, data,
how many prompts and samples, and the numbers, of which those of no graded sample are null. Its log goes to a folder of
its own, `<run folder>-eval`; with `--env` some of its conversations stand there in `samples.jsonl`. After Ctrl-C,
SIGTERM or SIGUSR1 the line tells what was measured until then, and `stopped` why.
"""

import dataclasses
import json
import os
from typing import Any

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.evaluation import EvaluationConfig, as_run, check_config, check_use, evaluation_lines
from spmdrl.config.load import Loaded, load_or_exit
from spmdrl.config.online_preference import OnlinePreferenceConfig
from spmdrl.config.schema import Config
from spmdrl.session.environ import postpone_collections, prepare

RUNS = (Config, DistillationConfig, OnlinePreferenceConfig)
"""Settings of the runs whose files are read."""


def main(argv: list[str] | None = None) -> None:
    """Evaluate `--model.path` on `--data.eval`."""
    asked = load_or_exit(argv, "python -m spmdrl.evaluate", EvaluationConfig, check_config, check_use, RUNS)
    # A run folder's config.yaml tells how many the run looked at while it trained.
    prompts = asked.config.eval.prompts if "eval.prompts" in asked.given else 0
    cfg = as_run(asked.config, prompts)
    prepare()
    postpone_collections()
    from spmdrl.health.failure import request
    from spmdrl.health.status import rank_status
    from spmdrl.plan.dry import sandbox_lines
    from spmdrl.plan.dry_data import with_data
    from spmdrl.rl.build import build_run
    from spmdrl.rl.evaluation import MEASURED
    from spmdrl.session.open import open_run, show
    from spmdrl.tracking.trackers import plain

    if asked.dry_run:
        settings = dataclasses.replace(asked.config, eval=dataclasses.replace(asked.config.eval, prompts=prompts))
        lines = with_data(lambda cfg, world: evaluation_lines(cfg, world) + sandbox_lines(cfg), train=False)
        return show(settings, lines(cfg, int(os.environ.get("WORLD_SIZE", "1"))))
    with open_run(Loaded(cfg), build_run, evaluation_lines, keeps=False) as run:
        assert run is not None
        rank_status.keeps = run.evaluation.keeps_graded = True
        with run.memory.rollout_phase():
            run.evaluate(0)
        with run.memory.training_phase():
            run.judge()
        run.journal.rows(run.evaluation.take_rows(1))
        if run.world.is_first:
            assert run.evaluation.prompts is not None
            prompts = len(run.evaluation.prompts)
            what: dict[str, Any] = {"model": cfg.model.path, "data": cfg.data.eval}
            what |= {"prompts": prompts, "samples": prompts * cfg.eval.samples}
            measured = int(run.evaluation.numbers.pop(MEASURED))
            if measured < what["samples"]:
                # Prompts count with all of their samples or not at all.
                what |= {"prompts": measured // cfg.eval.samples, "samples": measured, "stopped": request()}
            numbers = {name: plain(value) for name, value in run.evaluation.numbers.items()}
            print(json.dumps(what | numbers), flush=True)


if __name__ == "__main__":
    main()
