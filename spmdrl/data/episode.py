"""An episode, the unit of experience: one sample of one prompt, made by an engine and an environment.

An episode is a list of segments. The first is the prompt; each turn adds the tokens that the policy sampled and, if the
environment answers, those that it then observed. A response that several versions of the weights sampled, because it
was cut short and continued a step later, has a segment for each version.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

FINISH_REASONS = ("stop", "length", "abort")
"""Why an episode ended: end token, stop string or the environment; token limit; cut off by the caller."""
STATES = 2**52
"""Numbers of states lie below this bound, so that float64 holds them exactly."""


@dataclass
class Segment:
    """n consecutive tokens, sampled or observed together."""

    tokens: torch.Tensor
    """int64 [n]."""
    logp: torch.Tensor | None = None
    """float32 [n], log p of each token as the engine reported it at the sampling temperature. None: the policy observed
    these tokens and did not sample them."""
    version: int = 0
    """Weight version that sampled it; 0 if it was observed."""
    turn: int = 0
    """The prompt and the first response are turn 0; each answer of the environment begins another turn."""
    state: int = 0
    """Number of the state that the turn responds to; equal numbers mean equal states of one prompt. 0: the prompt."""

    @property
    def sampled(self) -> bool:
        """True if the policy sampled it."""
        return self.logp is not None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Episode:
    """One sample of one prompt: observed and sampled tokens, and their reward. L tokens in all."""

    prompt: int
    """Prompt index in its source. Episodes of one prompt form a group."""
    sample: int
    """Sample index inside the group."""
    position: int
    """Number of the prompt among all that the run draws; in a step's batch its place, 0 .. prompts_per_step - 1.
    Distinguishes two draws of the same prompt."""
    segments: list[Segment]
    """The segments in order; the first one is the prompt."""
    finish: str = ""
    """One of FINISH_REASONS; empty until the episode ends."""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward. A missing name does not mean 0, unless the grading timed out."""
    timed_out: bool = False
    """True if its grading was stopped (`Reward.timed_out`)."""
    ungraded: bool = False
    """True if it could not be graded (`Reward.ungraded`): its reward is nan."""
    baseline: float = 0.0
    """Reward of the greedy response to the same prompt, if one was sampled."""
    experts: torch.Tensor | None = None
    """int16 [n, W], the experts that each of the first n tokens was sent to, layer by layer; -1 if unknown. W:
    `hub.routing.Experts.width`. The routing of the other tokens is unknown."""

    def __post_init__(self):
        assert self.finish in ("", *FINISH_REASONS), self.finish

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [L]."""
        return torch.cat([s.tokens for s in self.segments])

    @property
    def mask(self) -> torch.Tensor:
        """bool [L]: True for tokens that the policy sampled."""
        return torch.cat([torch.full((len(s),), s.sampled) for s in self.segments])

    @property
    def rollout_logp(self) -> torch.Tensor:
        """float32 [L]: log p as the engine reported it, 0 where the mask is False."""
        return torch.cat([torch.zeros(len(s)) if s.logp is None else s.logp for s in self.segments])

    @property
    def versions(self) -> torch.Tensor:
        """int64 [L]: weight version that sampled each token, 0 where the mask is False."""
        return self.spread([s.version for s in self.segments])

    def spread(self, values: list[int]) -> torch.Tensor:
        """Repeat a number per segment for each of its tokens: int64 [L]."""
        lengths = torch.tensor([len(s) for s in self.segments])
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.int64), lengths)

    @property
    def version(self) -> int:
        """The oldest weight version that sampled a part of the episode."""
        return min((s.version for s in self.segments if s.sampled), default=0)

    @property
    def turns(self) -> int:
        """The number of turns."""
        return self.segments[-1].turn + 1

    @property
    def made(self) -> int:
        """The number of tokens after the prompt."""
        return len(self) - len(self.segments[0])

    @property
    def response(self) -> list[int]:
        """Tokens that the policy sampled in the last turn."""
        last = [s.tokens for s in self.segments if s.sampled and s.turn == self.turns - 1]
        return torch.cat(last).tolist() if last else []

    def add_sampled(self, tokens: list[int], logp: list[float], version: int) -> None:
        """Append sampled tokens. An empty segment is kept only if it is the first sampled one, for its version."""
        if tokens or not any(s.sampled for s in self.segments):
            last, numbers = self.segments[-1], torch.tensor(logp, dtype=torch.float32)
            self.segments.append(
                Segment(torch.tensor(tokens, dtype=torch.int64), numbers, version, last.turn, last.state)
            )

    def add_observed(self, tokens: list[int], state: int | None = None) -> None:
        """Append an answer of the environment, which begins a turn.

        state: number of the state that it shows; None: the tokens so far are the state.

        Raises:
            ValueError: there are no tokens, a token is negative, or the number is not in its range.
        """
        if not tokens or min(tokens) < 0:
            raise ValueError(f"an observation needs one token or more, none of them negative; it is {tokens}")
        if state is not None and not 0 <= state < STATES:
            raise ValueError(f"the number of a state must be from 0 to 2^52 - 1; it is {state}")
        observed, turn = torch.tensor(tokens, dtype=torch.int64), self.turns
        if state is None:
            path = torch.cat([self.tokens, observed]).numpy().tobytes()
            state = int.from_bytes(hashlib.blake2b(path, digest_size=8).digest()) % STATES
        self.segments.append(Segment(observed, None, 0, turn, state))


def prompt_segment(tokens: list[int]) -> Segment:
    """Return the segment with which an episode begins."""
    return Segment(torch.tensor(tokens, dtype=torch.int64))


def segments_of(
    tokens_L: torch.Tensor, mask_L: torch.Tensor, logp_L: torch.Tensor, version_L: torch.Tensor | int = 0
) -> list[Segment]:
    """Cut columns into segments where the mask or version changes; tokens observed after a response begin a turn."""
    versions = torch.as_tensor(version_L).expand(len(tokens_L))
    changes = (mask_L[1:] != mask_L[:-1]) | (mask_L[1:] & (versions[1:] != versions[:-1]))
    sizes = torch.cat([changes.nonzero().flatten() + 1, torch.tensor([len(tokens_L)])]).diff(prepend=torch.tensor([0]))
    out: list[Segment] = []
    at, turn = 0, 0
    for size in sizes.tolist():
        piece, sampled = slice(at, at + size), bool(mask_L[at])
        turn += bool(out) and not sampled
        logp = logp_L[piece].float() if sampled else None
        out.append(Segment(tokens_L[piece], logp, int(versions[at]) if sampled else 0, turn))
        at += size
    return out


def episode_of(
    prompt: int,
    sample: int,
    position: int,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    rollout_logp: torch.Tensor,
    version: torch.Tensor | int = 0,
    finish: str = "stop",
    **more: Any,
) -> Episode:
    """Make an episode from columns, each [L] (`segments_of`). more: further fields of the episode."""
    assert len(tokens) == len(mask) == len(rollout_logp), "an episode's columns share one length"
    return Episode(prompt, sample, position, segments_of(tokens, mask, rollout_logp, version), finish, **more)
