"""Train a language model by reinforcement learning: `torchrun --nproc-per-node 8 -m spmdrl.train --config run.yaml`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring
says so). Left out of this page: how the parts are built (`opening.py`, `run.py`), what a phase moves on and off the
device (`memory.py`), the formulas (`algos/`), where experience comes from (`experience.py`, `collect.py`), what every
model of a run does with it (`learn.py`), and what those do meanwhile who only sample or score (`Run.stand_by`).
"""

from spmdrl.config.load import load_or_exit
from spmdrl.environment import prepare
from spmdrl.rehearsal import check_use


def train(run) -> None:
    """Experience, then the update, until the last step."""
    from spmdrl.data.batch import balance
    from spmdrl.learn import learn, score

    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            done = run.experience(step)
        with run.memory.training_phase():
            run.judge()
            with run.timer("exchange"):
                batch = balance(run.pack(done.trajectories, step), run.world)
            if run.world.trains:
                with run.timer("logp"):
                    stats = score(batch, run.models, run.algo, run.temperature, run.group, run.world.device)
                with run.timer("advantage"):
                    batch = run.algo.advantages(batch, run.group, run.world.device)
                with run.timer("update"):
                    learnt = learn(batch, run.models, run.algo, step, run.temperature, run.group, run.world.device)
                    stats.merge(learnt)
            else:
                stats = run.stand_by(step, batch)
        run.log(step, batch, done, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the run, train; any failure ends the whole job by name."""
    loaded = load_or_exit(argv, check_use=check_use)
    prepare()
    from spmdrl.opening import open_run

    with open_run(loaded) as run:
        if run is not None:
            train(run)


if __name__ == "__main__":
    main()
