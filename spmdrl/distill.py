"""Distill a teacher into a student on the student's samples: `torchrun --nproc-per-node 8 -m spmdrl.distill ...`.

The training loop is the one in `train.py` with a different method (`rl/distillation.py`): it uses the teacher's
log-probabilities of the student's tokens instead of scores, computes no advantages, and moves the student's
distributions towards the teacher's. Not shown here are the divergences (`kernels/spmdrl_kernels/divergence.py`) and
everything that `train.py` does not show.
"""

from dataclasses import replace

from spmdrl import train
from spmdrl.config.distillation import DistillationConfig, check_distillation, distillation_lines
from spmdrl.session.job import late
from spmdrl.session.launch import launch

JOB = replace(
    train.JOB,
    module="spmdrl.distill",
    page="docs/distill.md",
    settings=DistillationConfig,
    check=check_distillation,
    lines=distillation_lines,
    method=late("spmdrl.rl.distillation:Distillation"),
    columns=("divergence/mean", "entropy/mean", "reward/mean", "tokens/s", "eval/accuracy", "eval/score"),
)

if __name__ == "__main__":
    launch(JOB)
