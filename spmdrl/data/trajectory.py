"""What an engine and a reward make of one prompt: the unit of experience."""

from dataclasses import dataclass, field

import torch

FINISH_REASONS = ("stop", "length", "abort")
"""Why a trajectory ended: end token or stop string, token limit, or cut off by the caller."""


@dataclass
class Trajectory:
    """One sample of one prompt, whole: prompt, response, and what is known of it.

    tokens: int64 [L]. mask: bool [L], True where the policy sampled. rollout_logp: float32 [L], log p of the sampled
    token as reported by the engine at the sampling temperature, 0 where the mask is False.
    """

    prompt: int
    """Prompt index in its source. Samples of one prompt form a group."""
    sample: int
    """Sample index inside the group."""
    position: int
    """Number of the prompt among all that the run draws; in a step's batch its place, 0 .. prompts_per_step - 1. Tells
    apart a prompt drawn twice."""
    tokens: torch.Tensor
    mask: torch.Tensor
    rollout_logp: torch.Tensor
    version: int
    """Weight version it was sampled from; the oldest one of a response that was carried from step to step."""
    finish: str = "stop"
    turns: int = 1
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward. A name that is missing is no 0, unless the grading timed out."""
    timed_out: bool = False
    """Its grading was stopped (`Reward.timed_out`)."""
    baseline: float = 0.0
    """Reward of the greedy response to the same prompt, where one was sampled."""
    versions: torch.Tensor | None = None
    """int64 [L], weight version that sampled each token; None: `version` did all."""
    experts: torch.Tensor | None = None
    """int16 [L, W], the experts that each token was sent to, layer by layer; -1 where that is not known, as of the last
    token. W: `hub.routing.Experts.width`."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further per-token tensors [L]."""

    def __post_init__(self):
        assert len(self.tokens) == len(self.mask) == len(self.rollout_logp), "a trajectory's tensors share one length"
        assert self.finish in FINISH_REASONS, self.finish
