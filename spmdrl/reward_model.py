"""Train a reward model on preferences or labelled steps: `torchrun --nproc-per-node 8 -m spmdrl.reward_model ...`.

The training loop is the one in `sft.py`, but without a frozen model or sampled answers. Not shown here are the loss and
the score metrics (`policy/objectives/scores.py`), how rows are encoded (`data/preferences.py`,
`supervised/pair_encoder.py`; `data/steps.py`, `supervised/steps.py`) and how the components are built
(`supervised/reward_model.py`).
"""

from dataclasses import replace

from spmdrl import sft
from spmdrl.config.reward_model import RewardModelConfig, check_reward_model
from spmdrl.config.supervised import supervised_lines
from spmdrl.session.job import late
from spmdrl.session.launch import launch

JOB = replace(
    sft.JOB,
    module="spmdrl.reward_model",
    page="docs/reward_model.md",
    settings=RewardModelConfig,
    check=check_reward_model,
    lines=supervised_lines,
    begin=late("spmdrl.supervised.reward_model:begin_reward_model"),
    settle=late("spmdrl.supervised.entry:settle"),
    build=late("spmdrl.supervised.reward_model:build_reward_model"),
    keeps=lambda cfg: True,
    columns=(
        *("loss", "accuracy/mean", "calibration/error", "length/correlation"),
        *("grad_norm", "tokens/s", "data/epoch", "eval/accuracy"),
    ),
)

if __name__ == "__main__":
    launch(JOB)
