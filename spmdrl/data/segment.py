"""Segments of an episode: tokens that were sampled or observed together, and the segment that they follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from spmdrl.spmd.payload import Payload

Shown = tuple[tuple[int, Payload], ...]
"""Images that tokens show, in order: the index of an image's first placeholder among the tokens, and the image."""

STATES = 2**52
"""Exclusive upper bound of state ids, so that float64 represents them exactly."""
PREVIOUS, NONE = -1, -2
"""Special values of `Segment.after`: PREVIOUS is the previous segment in the list, NONE is no segment."""
BY_PATH = -2
"""Special value of `Segment.parent`: the last sampled turn before the segment on its path."""


@dataclass
class Segment:
    """n consecutive tokens, sampled or observed together."""

    tokens: torch.Tensor
    """int64 [n]: the token ids."""
    logp: torch.Tensor | None = None
    """float32 [n]: each token's log p as reported by the engine at the sampling temperature, or None if the policy
    observed the tokens rather than sampled them."""
    version: int = 0
    """Weight version that sampled the segment, or 0 if it was observed."""
    turn: int = 0
    """Index of the turn. Prompt and first response are turn 0; each environment response starts a new turn."""
    state: int = 0
    """Id of the state that the turn responds to; within a prompt, equal ids mean equal states. 0 is the prompt."""
    after: int = PREVIOUS
    """Index of the segment that this one follows. PREVIOUS is the previous segment in the list; NONE makes it a
    root."""
    parent: int = BY_PATH
    """Index of the turn that the segment's turn follows in time, or -1 if there is none. BY_PATH is the last sampled
    turn before the segment on its path."""
    reward: float = 0.0
    """Reward for the response that ends with this sampled segment, given when the environment answered."""
    images: Shown = ()
    """Images of observed tokens. Placeholders are expanded (`hub/expand.py`) before a segment is made."""

    @property
    def sampled(self) -> bool:
        """True if the policy sampled the segment."""
        return self.logp is not None

    def __len__(self) -> int:
        return self.tokens.numel()

    def mask(self) -> torch.Tensor:
        """Return bool [n]: True if the policy sampled the tokens."""
        return torch.full((len(self),), self.sampled)

    def rollout_logp(self) -> torch.Tensor:
        """Return float32 [n]: `logp`, or 0 for observed tokens."""
        return torch.zeros(len(self)) if self.logp is None else self.logp

    def turn_reward(self) -> torch.Tensor:
        """Return float64 [n]: the reward at the last token of a sampled segment, else 0."""
        rewards = torch.zeros(len(self), dtype=torch.float64)
        if self.sampled:
            rewards[-1:] = self.reward
        return rewards

    def distinct(self) -> torch.Tensor:
        """Return int64 [n]: the tokens, with a negative number in place of each image's first placeholder.

        The number depends on the image, so the results are equal only for equal tokens that show equal images.
        """
        if not self.images:
            return self.tokens
        out = self.tokens.clone()
        for at, image in self.images:
            out[at] = -1 - int(image.name[:15], 16)
        return out

    def readable(self) -> list[int]:
        """Return the tokens for display, in which each image has one placeholder and no marks of its other tiles."""
        keep = torch.ones(len(self), dtype=torch.bool)
        for at, image in self.images:
            placeholders = at + torch.nonzero(self.tokens[at:] == self.tokens[at]).flatten()
            keep[at + 1 : int(placeholders[image.tokens - 1]) + 1] = False
        return self.tokens[keep].tolist()

    def cut(self, at: int) -> tuple["Segment", "Segment"]:
        """Split the segment after its first `at` tokens. The later part keeps the reward."""
        logp = (None, None) if self.logp is None else (self.logp[:at], self.logp[at:])
        earlier = tuple(each for each in self.images if each[0] < at)
        later = tuple((first - at, image) for first, image in self.images[len(earlier) :])
        return (
            replace(self, tokens=self.tokens[:at], logp=logp[0], reward=0.0, images=earlier),
            replace(self, tokens=self.tokens[at:], logp=logp[1], after=PREVIOUS, images=later),
        )

    def spread(self, value: int) -> torch.Tensor:
        """Repeat a number for each token: int64 [n]."""
        return torch.full((len(self),), value)


def prompt_segment(tokens: list[int], images: Shown = ()) -> Segment:
    """Return the segment that starts an episode."""
    return Segment(torch.tensor(tokens, dtype=torch.int64), images=images)


def shown_from(images: Sequence[tuple[int, Payload]], begin: int) -> Shown:
    """Return the images from token `begin` on, with indices that count from there."""
    return tuple((at - begin, image) for at, image in images if at >= begin)


def segments_of(
    tokens_L: torch.Tensor,
    mask_L: torch.Tensor,
    logp_L: torch.Tensor,
    version_L: torch.Tensor | int = 0,
    images: Shown = (),
) -> list[Segment]:
    """Split columns into segments where the mask or version changes; tokens observed after a response start a turn.

    images: images of the L tokens.
    """
    versions = torch.as_tensor(version_L).expand(len(tokens_L))
    changes = (mask_L[1:] != mask_L[:-1]) | (mask_L[1:] & (versions[1:] != versions[:-1]))
    sizes = torch.cat([changes.nonzero().flatten() + 1, torch.tensor([len(tokens_L)])]).diff(prepend=torch.tensor([0]))
    out: list[Segment] = []
    at, turn = 0, 0
    for size in sizes.tolist():
        piece, sampled = slice(at, at + size), bool(mask_L[at])
        turn += bool(out) and not sampled
        logp = logp_L[piece].float() if sampled else None
        shown = tuple((first - at, image) for first, image in images if at <= first < at + size)
        out.append(Segment(tokens_L[piece], logp, int(versions[at]) if sampled else 0, turn, images=shown))
        at += size
    return out


def shared_length(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the length of the common prefix (in rows) of two tensors."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).flatten(1).any(1).nonzero() if a.dim() > 1 else (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n
