"""Accuracy and pass@k of a model on a prompt set.

    python -m spmdrl.evaluate --config configs/gsm8k_grpo.yaml --model.path runs/gsm8k/checkpoints/latest/model

All prompts of `--data.eval`, unless a flag or a file written by hand sets `--eval.prompts`. The last line on stdout is
one JSON object: model, data, how many prompts and samples, and the numbers. Its log goes to a folder of its own,
`<run folder>-eval`.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spmdrl.config.learning import AlgoConfig, FilterConfig, SafetyConfig
from spmdrl.config.load import Loaded, load_or_exit
from spmdrl.config.schema import Config, EvalConfig
from spmdrl.session.environ import prepare


@dataclass
class EvaluateConfig(Config):
    """Settings of a run, for one that only evaluates."""

    eval: EvalConfig = field(default_factory=partial(EvalConfig, prompts=0))


def evaluation_config(loaded: Loaded) -> Config:
    """The run that only evaluates: no training prompts, no models but policy and reward model, nothing kept."""
    cfg = loaded.config
    prompts = cfg.eval.prompts if "eval.prompts" in loaded.given else 0
    folder = f"{cfg.run.dir.rstrip('/')}-eval" if cfg.run.dir else ""
    return dataclasses.replace(
        cfg,
        run=dataclasses.replace(cfg.run, name=f"{cfg.run.name}-eval", dir=folder),
        data=dataclasses.replace(cfg.data, train=cfg.data.eval, limit=0),
        eval=dataclasses.replace(cfg.eval, every=1, prompts=prompts),
        algo=AlgoConfig(),
        safety=SafetyConfig(),
        filter=FilterConfig(bad_sample=cfg.filter.bad_sample),
        reference=dataclasses.replace(cfg.reference, enabled="off"),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=0, at_end=False),
    )


def main(argv: list[str] | None = None) -> None:
    """Evaluate `--model.path` on `--data.eval`."""
    loaded = load_or_exit(argv, "python -m spmdrl.evaluate", EvaluateConfig)
    if not loaded.config.data.eval:
        sys.exit("python -m spmdrl.evaluate: --data.eval is empty; name the prompts to evaluate on")
    loaded = dataclasses.replace(loaded, config=evaluation_config(loaded))
    prepare()
    from spmdrl.rl.build import build_run
    from spmdrl.session.open import open_run

    with open_run(loaded, build_run, keeps=False) as run:
        if run is not None:
            with run.memory.rollout_phase():
                run.evaluate(0)
            with run.memory.training_phase():
                run.judge()
            if run.world.is_first:
                assert run.evaluation.prompts is not None
                prompts = len(run.evaluation.prompts)
                what: dict[str, Any] = {"model": loaded.config.model.path, "data": loaded.config.data.eval}
                what |= {"prompts": prompts, "samples": prompts * run.cfg.eval.samples}
                print(json.dumps(what | run.evaluation.numbers), flush=True)


if __name__ == "__main__":
    main()
