"""An episode, the unit of experience: one sample of one prompt, produced by an engine and an environment.

An episode is a list of segments: first the prompt, then the tokens sampled and observed in each turn. A response that
was continued in a later step has one segment per weight version.

The segments form a tree that only grows: each segment is a root or follows an earlier one. A turn starts a branch if
the history that the policy sees was rewritten or shortened; tokens shared by branches are stored once. A path leads
from a root to a leaf; an episode that never branches has a single path.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdrl.data.segment import (
    BY_PATH,
    NONE,
    PREVIOUS,
    STATES,
    Segment,
    Shown,
    prompt_segment,
    segments_of,
    shared_length,
    shown_from,
)
from spmdrl.spmd.payload import Payload

__all__ = ["FINISH_REASONS", "STATES", "Episode", "Segment", "episode_of", "prompt_segment", "segments_of"]

FINISH_REASONS = ("stop", "length", "abort", "turns", "time")
"""Reasons why an episode ended. `stop` stands for an end token, a stop string or an end set by the environment,
`length` for the token limit, and `abort` for a stop by the caller or an environment failure. `turns` and `time` stand
for the turn limit and the time limit."""


@dataclass
class Episode:
    """One sample of one prompt: observed and sampled tokens, and their reward.

    The current path is the one being continued; it ends with the last segment and has L tokens. The episode's length
    and per-token properties refer to this path.
    """

    prompt: int
    """Index of the prompt in its source. Episodes of one prompt form a group."""
    sample: int
    """Index of the sample in its group."""
    position: int
    """Index of this prompt draw among all draws of the run. In a step's batch, the index counts only that step's draws,
    from 0 to prompts_per_step - 1. It distinguishes two draws of the same prompt."""
    segments: list[Segment]
    """The segments in order of creation; the first one starts with the prompt."""
    finish: str = ""
    """One of FINISH_REASONS; empty until the episode ends."""
    reward: float = 0.0
    """Sum of all turn rewards and the final reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named reward parts. A missing part counts as 0 only if grading timed out."""
    timed_out: bool = False
    """True if grading the episode timed out (`Reward.timed_out`)."""
    ungraded: bool = False
    """True if the episode could not be graded (`Reward.ungraded`); its reward is then nan."""
    why: str = ""
    """Reason why the environment excluded the episode from training; set only on the rank that ran the environment."""
    baseline: float = 0.0
    """Reward of the greedy response to the same prompt, or 0 if none was sampled."""
    given: float | None = None
    """Sum of all rewards from the environment, or None without an environment or before the episode ends."""
    unanswered: str = ""
    """Finish reason of a response that the environment has not answered yet; empty if no response is waiting."""
    conversation: Any = None
    """State of the conversation with the environment (`rl.conversation_state`) on the rank that runs it; None once the
    episode has ended."""
    phase: str = ""
    """Stage of the episode: `opening` (its environment prepares the prompt), `sampling` (the engine samples it),
    `answering` (its environment prepares an answer), `grading`, `graded`; empty before the engine has room for it."""
    experts: torch.Tensor | None = None
    """int16 [n, W]: expert ids of the first n tokens, layer by layer, or -1 if unknown. Tokens are numbered across all
    segments in order; the routing of later tokens is unknown. W is `hub.routing.Experts.width`."""

    def __post_init__(self):
        assert self.finish in ("", *FINISH_REASONS), self.finish

    def __len__(self) -> int:
        return sum(len(self.segments[i]) for i in self.path)

    # ── the tree ─────────────────────────────────────────────────────────────

    def before(self, index: int) -> int:
        """Return the index of the segment that precedes segment `index`, or -1 if there is none."""
        after = self.segments[index].after
        return index - 1 if after == PREVIOUS else max(after, -1)

    def path_to(self, index: int) -> list[int]:
        """Return the segment indices on the path from a root to segment `index`, or an empty list for -1."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.before(index)
        return path[::-1]

    @property
    def path(self) -> list[int]:
        """Segment indices of the current path."""
        return self.path_to(len(self.segments) - 1)

    def paths(self) -> list[list[int]]:
        """Return the segment indices of every path, in the order in which the paths' last segments were created."""
        followed = {self.before(i) for i in range(len(self.segments))}
        return [self.path_to(i) for i in range(len(self.segments)) if i not in followed]

    def along(self, pick: Callable[[Segment], torch.Tensor], path: list[int] | None = None) -> torch.Tensor:
        """Concatenate the tensors that `pick` returns for a path's segments. Without `path`, use the current path."""
        return torch.cat([pick(self.segments[i]) for i in (self.path if path is None else path)])

    # ── tokens of the current path ───────────────────────────────────────────

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [L]: the token ids."""
        return self.along(lambda s: s.tokens)

    @property
    def images(self) -> tuple[Payload, ...]:
        """The images that the tokens show, in order."""
        return tuple(image for i in self.path for _, image in self.segments[i].images)

    @property
    def mask(self) -> torch.Tensor:
        """bool [L]: True for tokens that the policy sampled."""
        return self.along(Segment.mask)

    @property
    def rollout_logp(self) -> torch.Tensor:
        """float32 [L]: log p as the engine reported it, 0 where the mask is False."""
        return self.along(Segment.rollout_logp)

    @property
    def versions(self) -> torch.Tensor:
        """int64 [L]: weight version that sampled each token, 0 where the mask is False."""
        return self.along(lambda s: s.spread(s.version))

    # ── the whole episode ────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """The oldest weight version that sampled a part of the episode."""
        return min((s.version for s in self.segments if s.sampled), default=0)

    @property
    def turns(self) -> int:
        """The number of turns."""
        return self.segments[-1].turn + 1

    @property
    def opening(self) -> int:
        """The number of prompt segments; there are several if branches start inside the prompt."""
        rest = (i for i, s in enumerate(self.segments) if s.sampled or s.turn)
        return next(rest, len(self.segments))

    @property
    def generated(self) -> int:
        """The number of tokens after the prompt, over all branches."""
        return sum(len(s) for s in self.segments[self.opening :])

    @property
    def turn_rewards(self) -> float:
        """Sum of all turn rewards, without the final reward."""
        return sum(s.reward for s in self.segments)

    @property
    def response(self) -> list[int]:
        """Tokens that the policy sampled in the last turn."""
        last = [s.tokens for s in self.segments if s.sampled and s.turn == self.turns - 1]
        return torch.cat(last).tolist() if last else []

    def add_sampled(self, tokens: list[int], logp: list[float], version: int) -> None:
        """Append sampled tokens. The first call appends a segment even without tokens, to record the version."""
        if tokens or not any(s.sampled for s in self.segments):
            last, numbers = self.segments[-1], torch.tensor(logp, dtype=torch.float32)
            self.segments.append(
                Segment(torch.tensor(tokens, dtype=torch.int64), numbers, version, last.turn, last.state)
            )

    def add_observed(
        self,
        tokens: list[int],
        state: int | None = None,
        after: int | None = None,
        parent: int = BY_PATH,
        images: Shown = (),
    ) -> None:
        """Append an environment response, which starts a turn.

        state: id of the state that the tokens show, or None to compute it from all tokens of the path. after: index of
        the segment that the tokens follow. Use None for the last segment, or NONE to start a new root; any other
        segment starts a branch (`cut` returns the segment that ends after a given token). parent, images: as in
        `Segment`.

        Raises ValueError if there are no tokens, if a token is negative, or if state, after or parent is out of range.
        """
        if not tokens or min(tokens) < 0:
            raise ValueError(f"an observation needs one token or more, none of them negative; it is {tokens}")
        if state is not None and not 0 <= state < STATES:
            raise ValueError(f"the number of a state must be from 0 to 2^52 - 1; it is {state}")
        last = len(self.segments) - 1
        after = last if after is None else after
        if after != NONE and not 0 <= after <= last:
            raise ValueError(f"an observation must follow one of the segments 0 to {last}; it follows {after}")
        if not BY_PATH <= parent < self.turns:
            raise ValueError(f"a turn must follow one of the turns 0 to {self.turns - 1}; it follows {parent}")
        place = PREVIOUS if after == last else after
        observed = Segment(torch.tensor(tokens, dtype=torch.int64), None, 0, self.turns, 0, place, parent, 0.0, images)
        if state is None:
            earlier = [self.segments[i].distinct() for i in self.path_to(after)]
            path = torch.cat([*earlier, observed.distinct()]).numpy().tobytes()
            state = int.from_bytes(hashlib.blake2b(path, digest_size=8).digest()) % STATES
        self.segments.append(replace(observed, state=state))

    def fork(self, prompt: list[int], state: int | None = None, images: Shown = ()) -> int:
        """Start a turn with a complete prompt, because its history was rewritten; return the number of shared tokens.

        The longest prefix that the prompt has in common with a path is shared, but never the prompt's last token. The
        remaining tokens are observed. The turn's parent is the last sampled turn. A prompt that continues the current
        path extends it. state: as in `add_observed`. images: images of the complete prompt.

        Raises ValueError if the prompt is empty, or a token is negative.
        """
        if not prompt or min(prompt) < 0:
            raise ValueError(f"a prompt needs one token or more, none of them negative; it is {prompt}")
        most, last = self._closest(prompt_segment(prompt, images).distinct())
        shared = min(most, len(prompt) - 1)
        at = self.cut(shared, self.path_to(last)) if shared else NONE
        sampled = [s.turn for s in self.segments if s.sampled]
        self.add_observed(prompt[shared:], state, at, max(sampled, default=-1), shown_from(images, shared))
        return shared

    def _closest(self, prompt: torch.Tensor) -> tuple[int, int]:
        """Return the length of the longest prefix that the prompt shares with a path, and the last segment in it.

        prompt: as `Segment.distinct` returns it.
        """
        found, ends = (0, -1), {-1: 0}
        for i, s in enumerate(self.segments):
            start = ends.get(self.before(i))
            if start is not None:
                same = shared_length(s.distinct(), prompt[start:])
                # Among prefixes of equal length, choose the latest segment, to extend the current path if possible.
                found = max(found, (start + same, i))
                if same == len(s):
                    ends[i] = start + same
        return found

    def cut(self, tokens: int, path: list[int] | None = None) -> int:
        """Return the index of the path segment that ends after `tokens` tokens; split a segment if none does.

        The later part keeps the reward. path: segment indices, or None for the current path.
        Raises ValueError unless `tokens` is between 1 and the length of the path.
        """
        end, path = 0, self.path if path is None else path
        for index in path:
            begin, end = end, end + len(self.segments[index])
            if begin < tokens <= end:
                if tokens < end:
                    self._cut(index, tokens - begin)
                return index
        raise ValueError(f"a path of length {end} can be cut after token 1 to {end}, not after {tokens}")

    def _cut(self, index: int, at: int) -> None:
        """Split a segment after its first `at` tokens; the segments that followed it then follow the later part."""
        parts = list(self.segments[index].cut(at))
        # Other episodes might share these segments, so they are replaced instead of modified.
        later = [replace(x, after=x.after + 1) if x.after >= index else x for x in self.segments[index + 1 :]]
        self.segments[index:] = parts + later

    def add_reward(self, reward: float) -> None:
        """Add the environment's reward for the last response."""
        index = max(i for i, s in enumerate(self.segments) if s.sampled)
        s = self.segments[index]
        self.segments[index] = replace(s, reward=s.reward + reward)

    def add_experts(self, experts: torch.Tensor) -> None:
        """Record the routed experts, int16 [n, W], of the first n tokens of the current path.

        Rows that `experts` already has are not overwritten.
        """
        known = experts[:0] if self.experts is None else self.experts
        rows = self.rows(self.path)[: len(experts)]
        fresh = rows >= len(known)
        size = max(len(known), int(rows.max()) + 1 if len(rows) else 0)
        out = torch.full((size, experts.shape[1]), -1, dtype=experts.dtype)
        out[: len(known)] = known
        out[rows[fresh]] = experts[fresh]
        self.experts = out

    def rows(self, path: list[int]) -> torch.Tensor:
        """Return each path token's index into the concatenated tokens of all segments, int64 [L]."""
        starts = [0]
        for s in self.segments:
            starts.append(starts[-1] + len(s))
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in path])


def episode_of(
    prompt: int,
    sample: int,
    position: int,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    rollout_logp: torch.Tensor,
    version: torch.Tensor | int = 0,
    finish: str = "stop",
    images: Shown = (),
    **more: Any,
) -> Episode:
    """Create an episode from columns, each [L], and images (`segments_of`). more: other fields of the episode."""
    assert len(tokens) == len(mask) == len(rollout_logp), "an episode's columns share one length"
    return Episode(prompt, sample, position, segments_of(tokens, mask, rollout_logp, version, images), finish, **more)
