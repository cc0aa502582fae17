"""Train a language model by reinforcement learning: `torchrun --nproc-per-node 8 -m spmdrl.train --config run.yaml`.

`train` is the complete algorithm. Every rank runs this function. Some calls that look local are collectives; their
docstrings say so. Not shown here are:

- how the components are built (`session/open.py`, `rl/build.py`),
- how models are moved on and off the device in each phase (`session/device_table.py`),
- the formulas (`algos/`) and sampling (`rl/sampler.py`, `rl/rollout.py`),
- what a method computes (`PolicyGradient` in `rl/run.py`, with `rl/score.py` and `rl/update.py`; `distill.py` and
  `online_preference.py` use other methods),
- the work of ranks that only sample or score (`Run.stand_by`).
"""

from spmdrl.config.checks import check
from spmdrl.config.plan import plan_lines
from spmdrl.config.schema import Config
from spmdrl.session.job import Job, late
from spmdrl.session.launch import launch


def train(run) -> None:
    """Run the training loop: in each step, sample experience and update the policy."""
    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            done = run.experience(step)
            packed = run.method.pack(done.episodes, step)
        with run.memory.training_phase():
            run.judge()
            batch = run.balance(packed)
            if run.world.trains:
                with run.timer("logp"):
                    chosen, stats = run.method.score(batch)
                with run.timer("advantage"):
                    chosen = run.method.advantages(chosen)
                with run.timer("update"):
                    stats.merge(run.method.update(chosen, step))
            else:
                stats = run.stand_by(step, batch)
        run.log(step, batch, done, stats)
        run.checkpoint(step)
    run.finish()


JOB = Job(
    module="spmdrl.train",
    page="docs/usage.md",
    settings=Config,
    check=check,
    lines=plan_lines,
    build=late("spmdrl.rl.build:build_run"),
    method=late("spmdrl.rl.run:PolicyGradient"),
    train=train,
    dry=late("spmdrl.plan.dry:dry_run"),
    columns=("reward/mean", "kl/mean", "entropy/mean", "logp_diff/mean", "tokens/s", "eval/accuracy", "eval/score"),
    phases=("rollout", "reward", "exchange", "logp", "update", "push"),
)

if __name__ == "__main__":
    launch(JOB)
