"""Algorithms by name: which advantage, loss and aggregation a paper puts together; a run may override any value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """One published algorithm. The names are keys of ADVANTAGES and LOSSES and an entry of AGGREGATIONS."""

    advantage: str
    loss: str
    aggregation: str
    paper: str
    """URL."""
    clip_low: float = 0.2
    """Used by ppo_clip only, as are the two below."""
    clip_high: float = 0.2
    dual_clip: float | None = None


PRESETS: dict[str, Preset] = {
    # The paper averages within a sequence, then over sequences, and adds a k3 penalty of 0.04 to the loss. That penalty
    # asks for a reference model, so a run turns it on itself (--algo.kl_coef 0.04); most later work drops it.
    "grpo": Preset(
        advantage="grpo",
        loss="ppo_clip",
        aggregation="seq-mean-token-mean",
        paper="https://arxiv.org/abs/2402.03300",
    ),
    # Both normalisers of GRPO removed: no std in the advantage, a constant (the horizon) in place of the sequence's own
    # length.
    "dr_grpo": Preset(
        advantage="dr_grpo",
        loss="ppo_clip",
        aggregation="seq-mean-token-sum-norm",
        paper="https://arxiv.org/abs/2503.20783",
    ),
    # log p of a sequence is the sum over its tokens. The paper takes the KL penalty inside the reward, which is not
    # part of this preset.
    "rloo": Preset(
        advantage="rloo",
        loss="reinforce",
        aggregation="seq-mean-token-sum",
        paper="https://arxiv.org/abs/2402.14740",
    ),
    "reinforce": Preset(
        advantage="reinforce",
        loss="reinforce",
        aggregation="seq-mean-token-sum",
        paper="https://doi.org/10.1007/BF00992696",
    ),
}
