"""Learn from preferences between responses: `torchrun --nproc-per-node 8 -m spmdrl.preference --config dpo.yaml`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring says
so). Left out of this page: the losses (`algos/preference.py`), how they are summed over ranks (`policy/pairs.py`,
`supervised/labelled.py`), how rows become tokens (`data/preferences.py`, `supervised/sides.py`) and how the parts are
built (`supervised/build.py`, `supervised/preference.py`).
"""

from spmdrl.config.load import load_or_exit
from spmdrl.config.preference import PreferenceConfig, check_preference
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """Pairs or labelled responses, the reference's view of them, then one optimizer step, until the last step."""
    from spmdrl.data.dealing import balance

    for step in run.steps():
        run.evaluate(step)
        run.sample(step)
        rows = run.rows(step)
        with run.timer("exchange"):
            batch = balance(rows, run.world)
        run.score(batch)
        with run.timer("update"):
            stats = run.policy.update(batch, run.objective)
        run.move_reference(step)
        run.log(step, batch, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the job, train; any failure ends the whole job by name."""
    prog = "python -m spmdrl.preference"
    loaded = load_or_exit(argv, prog, PreferenceConfig, check_preference)
    prepare()
    postpone_collections()
    from spmdrl.supervised.entry import Kind, launch
    from spmdrl.supervised.preference import begin_preference, build_preference
    from spmdrl.tracking.console import PREFERRED

    launch(loaded, Kind(prog, begin_preference, build_preference, PREFERRED), train)


if __name__ == "__main__":
    main()
