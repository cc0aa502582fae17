"""Train a reward model on preferences or labelled steps: `torchrun --nproc-per-node 8 -m spmdrl.reward_model ...`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring says
so). Left out of this page: the loss and what is reported of the scores (`supervised/scores.py`; of steps,
`supervised/step_scores.py`), how rows become tokens (`data/preferences.py`, `supervised/sides.py`; `data/step_rows.py`,
`supervised/steps.py`) and how the parts are built (`supervised/reward_model.py`).
"""

from spmdrl.config.load import load_or_exit
from spmdrl.config.reward_model import RewardModelConfig, check_reward_model
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """Rows, then one optimizer step on them, until the last step."""
    from spmdrl.data.dealing import balance

    for step in run.steps():
        run.evaluate(step)
        rows = run.rows(step)
        with run.timer("exchange"):
            batch = balance(rows, run.world)
        with run.timer("update"):
            stats = run.policy.update(batch, run.objective)
        run.log(step, batch, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the job, train; any failure ends the whole job by name."""
    prog = "python -m spmdrl.reward_model"
    loaded = load_or_exit(argv, prog, RewardModelConfig, check_reward_model)
    prepare()
    postpone_collections()
    from spmdrl.supervised.entry import Kind, launch
    from spmdrl.supervised.reward_model import begin_reward_model, build_reward_model
    from spmdrl.tracking.console import SCORED

    launch(loaded, Kind(prog, begin_reward_model, build_reward_model, SCORED), train)


if __name__ == "__main__":
    main()
