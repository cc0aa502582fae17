"""Train a language model by reinforcement learning: `torchrun --nproc-per-node 8 -m spmdrl.train --config run.yaml`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring
says so). Left out of this page: how the parts are built (`run.py`), what a phase moves on and off the device
(`memory.py`), the formulas (`algos/`), and where experience comes from (`collect.py`).
"""

from spmdrl.config.load import load_or_exit
from spmdrl.environment import prepare


def train(run) -> None:
    """Experience, then the update, until the last step."""
    from spmdrl.algorithm import score
    from spmdrl.collect import collect
    from spmdrl.data.batch import balance

    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            trajectories = collect(run.round(step), run.engine, run.grader, run.tokenizer, run.world, run.timer)
        with run.memory.training_phase():
            with run.timer("exchange"):
                batch = balance(run.pack(trajectories, step), run.group, run.world.device)
            with run.timer("logp"):
                scored = score(batch, run.policy, run.reference, run.algo, run.temperature)
            with run.timer("advantage"):
                batch = run.algo.advantages(batch, run.group, run.world.device)
            with run.timer("update"):
                stats = run.policy.update(batch, run.algo.micro_loss, run.prepare, run.temperature)
        run.log(step, batch, trajectories, scored, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the run, train; any failure ends the whole job by name."""
    loaded = load_or_exit(argv)
    prepare()
    from spmdrl.run import open_run

    with open_run(loaded) as run:
        if run is not None:
            train(run)


if __name__ == "__main__":
    main()
