"""Learn from preferences between the policy's samples: `torchrun --nproc-per-node 8 -m spmdrl.online_preference ...`.

The training loop is the one in `train.py` with a different method (`rl/online_preference.py`): it picks the best and
the worst sample of each prompt by score, or only the best (RAFT), and learns from them without advantages. Not shown
here are the losses (`algos/preference.py`, `policy/objectives/pairs.py`) and everything that `train.py` does not show.
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
