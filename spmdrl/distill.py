"""Distil a teacher into a student on the student's own samples: `torchrun --nproc-per-node 8 -m spmdrl.distill ...`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring
says so). Left out of this page: what the teacher leaves in a batch and the objective (`rl/distillation.py`), the
divergences (`kernels/spmdrl_kernels/divergence.py`), and everything that `train.py` leaves out.
"""

from spmdrl.config.distillation import DistillationConfig, check_distillation, distillation_lines
from spmdrl.config.load import load_or_exit
from spmdrl.rl.rehearsal import check_use
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """The student's samples, what the teacher says of them, then the update, until the last step."""
    from spmdrl.data.dealing import balance
    from spmdrl.rl.distillation import Distillation

    lesson = Distillation(run)
    for step in run.steps():
        with run.memory.rollout_phase():
            run.evaluate(step)
            done = run.experience(step)
            fresh = lesson.pack(done.episodes, step)
        with run.memory.training_phase():
            run.judge()
            with run.timer("exchange"):
                batch = balance(fresh, run.world)
            if run.world.trains:
                with run.timer("logp"):
                    stats = lesson.teach(batch)
                with run.timer("update"):
                    stats.merge(lesson.learn(batch, step))
            else:
                stats = run.stand_by(step, batch, lesson.teach)
        run.log(step, batch, done, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the run, train; any failure ends the whole job by name."""
    loaded = load_or_exit(argv, "python -m spmdrl.distill", DistillationConfig, check_distillation, check_use)
    prepare()
    postpone_collections()
    from spmdrl.plan.dry_data import with_data
    from spmdrl.rl.build import build_run
    from spmdrl.session.open import open_run
    from spmdrl.tracking.console import DISTILLED

    lines = with_data(distillation_lines) if loaded.dry_run else distillation_lines
    with open_run(loaded, build_run, lines, columns=DISTILLED) as run:
        if run is not None:
            train(run)


if __name__ == "__main__":
    main()
