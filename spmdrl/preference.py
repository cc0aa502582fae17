"""Learn from preferences between responses: `torchrun --nproc-per-node 8 -m spmdrl.preference --config dpo.yaml`.

The loop is that of `sft.py`: read pairs or labelled responses, compute their logp under the reference, take one
optimizer step, and update the reference if that is due. This file leaves out the losses (`algos/preference.py`), their
sums over ranks (`policy/objectives/pairs.py`), the encoding of rows (`data/preferences.py`,
`supervised/pair_encoder.py`) and the construction of the parts (`supervised/build.py`, `supervised/preference.py`).
"""

from dataclasses import replace

from spmdrl import sft
from spmdrl.config.preference import PreferenceConfig, check_preference
from spmdrl.config.supervised import supervised_lines
from spmdrl.session.job import late
from spmdrl.session.launch import launch

JOB = replace(
    sft.JOB,
    module="spmdrl.preference",
    page="docs/preference.md",
    settings=PreferenceConfig,
    check=check_preference,
    lines=supervised_lines,
    begin=late("spmdrl.supervised.preference:begin_preference"),
    settle=late("spmdrl.supervised.entry:settle"),
    build=late("spmdrl.supervised.preference:build_preference"),
    keeps=lambda cfg: True,
    columns=("loss", "accuracy/mean", "rewards/margin", "grad_norm", "tokens/s", "data/epoch", "eval/accuracy"),
)

if __name__ == "__main__":
    launch(JOB)
