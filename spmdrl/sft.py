"""Fine-tune a language model on given dialogues or text: `torchrun --nproc-per-node 8 -m spmdrl.sft --config sft.yaml`.

`train` is the complete algorithm. Every rank runs this function. Some calls that look local are collectives; their
docstrings say so. Not shown here are how rows are encoded with a loss mask (`supervised/encoder.py`, `data/turns.py`),
the order of rows (`data/mixture.py`), the loss (`policy/objectives/likelihood.py`) and how the components are built
(`supervised/build.py`, `supervised/sft.py`). `preference.py` and `reward_model.py` run the same loop with different
rows, models and losses.
"""

from spmdrl.config.sft import SFTConfig, check_sft, sft_lines
from spmdrl.session.job import Job, late
from spmdrl.session.launch import launch


def train(run) -> None:
    """Run the training loop: read rows, compute their logp under any frozen model, and take an optimizer step."""
    for step in run.steps():
        run.evaluate(step)
        run.sample(step)
        rows = run.rows(step)
        batch = run.balance(rows)
        run.score(batch)
        with run.timer("update"):
            stats = run.policy.update(batch, run.objective)
        run.move_reference(step)
        run.log(step, batch, stats)
        run.checkpoint(step)
    run.finish()


JOB = Job(
    module="spmdrl.sft",
    page="docs/sft.md",
    settings=SFTConfig,
    check=check_sft,
    lines=sft_lines,
    begin=late("spmdrl.supervised.sft:begin_sft"),
    settle=late("spmdrl.supervised.sft:settle_sft"),
    build=late("spmdrl.supervised.sft:build_sft"),
    train=train,
    dry=late("spmdrl.supervised.entry:dry_run"),
    keeps=lambda cfg: not cfg.teacher.write,
    columns=("loss", "accuracy/mean", "grad_norm", "tokens/s", "data/epoch", "eval/loss"),
    phases=("rollout", "rows", "exchange", "logp", "update", "push"),
)

if __name__ == "__main__":
    launch(JOB)
