"""Learn from preferences between own samples: `torchrun --nproc-per-node 8 -m spmdrl.online_preference ...`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring
says so). Left out of this page: which samples of a prompt are compared (`rl/online_preference.py`), the losses
(`algos/preference.py`, `policy/pairs.py`), and everything that `train.py` leaves out.
"""

from spmdrl.config.load import load_or_exit
from spmdrl.config.online_preference import OnlinePreferenceConfig, check_online_preference, online_lines
from spmdrl.rl.rehearsal import check_use
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """Samples and their rewards, the best and the worst of each prompt, then the update, until the last step."""
    from spmdrl.rl.online_preference import OnlinePreference

    lesson = OnlinePreference(run)
    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            done = run.experience(step)
        with run.memory.training_phase():
            run.judge()
            with run.timer("exchange"):
                batch = lesson.balance(run.pack(done.episodes, step))
            if run.world.trains:
                with run.timer("logp"):
                    pairs, stats = lesson.compare(batch)
                with run.timer("update"):
                    stats.merge(lesson.learn(pairs, step))
            else:
                stats = run.stand_by(step, batch)
        run.log(step, batch, done, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the run, train; any failure ends the whole job by name."""
    prog = "python -m spmdrl.online_preference"
    loaded = load_or_exit(argv, prog, OnlinePreferenceConfig, check_online_preference, check_use)
    prepare()
    postpone_collections()
    from spmdrl.plan.dry_data import with_data
    from spmdrl.rl.build import build_run
    from spmdrl.session.open import open_run
    from spmdrl.tracking.console import COMPARED

    lines = with_data(online_lines) if loaded.dry_run else online_lines
    with open_run(loaded, build_run, lines, columns=COMPARED) as run:
        if run is not None:
            train(run)


if __name__ == "__main__":
    main()
