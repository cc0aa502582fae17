"""Fine-tune a language model on given dialogues or text: `torchrun --nproc-per-node 8 -m spmdrl.sft --config sft.yaml`.

The whole algorithm is `train`. Every rank runs it; what looks like a local call may be a collective (its docstring says
so). Left out of this page: how rows become tokens with a loss mask (`supervised/encoder.py`, `data/turns.py`), the
order in which they come (`data/mixture.py`), the loss (`policy/likelihood.py`) and how the parts are built
(`supervised/build.py`, `supervised/sft.py`).
"""

from dataclasses import replace

from spmdrl.config.load import load_or_exit
from spmdrl.config.sft import SFTConfig, check_sft, sft_lines
from spmdrl.session.environ import postpone_collections, prepare


def train(run) -> None:
    """Rows, then one optimizer step on them, until the last step."""
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
        run.log(step, batch, stats)
        run.checkpoint(step)
    run.finish()


def main(argv: list[str] | None = None) -> None:
    """Read flags, build the job, train; any failure ends the whole job by name."""
    prog = "python -m spmdrl.sft"
    loaded = load_or_exit(argv, prog, SFTConfig, check_sft)
    prepare()
    postpone_collections()
    from spmdrl.supervised.entry import Kind, launch
    from spmdrl.supervised.sft import begin_sft, build_sft, build_teacher_files
    from spmdrl.supervised.teacher import in_its_folder
    from spmdrl.tracking.console import SUPERVISED

    if loaded.config.teacher.write:
        loaded = replace(loaded, config=in_its_folder(loaded.config))
        launch(loaded, Kind(prog, begin_sft, build_teacher_files, SUPERVISED, sft_lines, False), lambda written: None)
    else:
        launch(loaded, Kind(prog, begin_sft, build_sft, SUPERVISED, sft_lines), train)


if __name__ == "__main__":
    main()
