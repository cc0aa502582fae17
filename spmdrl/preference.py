"""Learn from preferences between responses: `torchrun --nproc-per-node 8 -m spmdrl.preference --config dpo.yaml`.

The training loop is the one in `sft.py`: read pairs or labelled responses, compute their logp under the reference, take
one optimizer step, and update the reference when it is due. Not shown here are the losses (`algos/preference.py`) and
their reduction over ranks (`policy/objectives/pairs.py`), how rows are encoded (`data/preferences.py`,
`supervised/pair_encoder.py`) and how the components are built (`supervised/build.py`, `supervised/preference.py`).
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
