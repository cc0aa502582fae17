"""Train a language model by reinforcement learning: `torchrun --nproc-per-node 8 -m spmdrl.train --config run.yaml`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring
says so). Left out of this page: how the parts are built (`session/open.py`, `rl/build.py`), what a phase moves on and
off the device (`session/device_table.py`), the formulas (`algos/`), where experience comes from (`rl/sampler.py`,
`rl/rollout.py`), what every model does with it (`rl/score.py`, `rl/update.py`), and what ranks that only sample or
score do meanwhile (`Run.stand_by`).
"""

from spmdrl.config.load import load_or_exit
from spmdrl.config.plan import plan_lines
from spmdrl.rl.rehearsal import check_use
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """Experience, then the update, until the last step."""
    from spmdrl.data.dealing import balance
    from spmdrl.rl.score import score
    from spmdrl.rl.update import update

    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            done = run.experience(step)
        with run.memory.training_phase():
            run.judge()
            with run.timer("exchange"):
                batch = balance(run.pack(done.episodes, step), run.world)
            if run.world.trains:
                with run.timer("logp"):
                    stats = score(batch, run.models, run.algo, run.cfg, run.peers)
                with run.timer("advantage"):
                    batch = run.algo.advantages(batch, run.peers)
                with run.timer("update"):
                    stats.merge(update(batch, run.models, run.algo, run.cfg, step, run.peers))
            else:
                stats = run.stand_by(step, batch)
        run.log(step, batch, done, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the run, train; any failure ends the whole job by name."""
    loaded = load_or_exit(argv, check_use=check_use)
    prepare()
    postpone_collections()
    from spmdrl.plan.dry import dry_lines
    from spmdrl.plan.dry_data import with_data
    from spmdrl.rl.build import build_run
    from spmdrl.session.open import open_run

    with open_run(loaded, build_run, with_data(dry_lines) if loaded.dry_run else plan_lines) as run:
        if run is not None:
            train(run)


if __name__ == "__main__":
    main()
