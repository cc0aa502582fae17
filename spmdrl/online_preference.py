"""Learn from preferences between the policy's samples: `torchrun --nproc-per-node 8 -m spmdrl.online_preference ...`.

The loop is that of `train.py` with another method (`rl/online_preference.py`): it chooses by score the best and
the worst sample of each prompt, or only the best (RAFT), and learns from them without advantages. This file leaves out
the losses (`algos/preference.py`, `policy/objectives/pairs.py`) and everything that `train.py` leaves out.
"""

from dataclasses import replace

from spmdrl import train
from spmdrl.config.online_preference import OnlinePreferenceConfig, check_online_preference, online_lines
from spmdrl.session.job import late
from spmdrl.session.launch import launch

JOB = replace(
    train.JOB,
    module="spmdrl.online_preference",
    page="docs/online_preference.md",
    settings=OnlinePreferenceConfig,
    check=check_online_preference,
    lines=online_lines,
    method=late("spmdrl.rl.online_preference:OnlinePreference"),
    columns=("reward/mean", "loss", "pairs/kept", "logp_diff/mean", "tokens/s", "eval/accuracy", "eval/score"),
)

if __name__ == "__main__":
    launch(JOB)
