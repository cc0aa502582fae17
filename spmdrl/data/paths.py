"""The paths of an episode that branches, one after the other, and an episode made of its paths again."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from spmdrl.data.episode import Episode
from spmdrl.data.segment import BY_PATH, NONE, Segment, segments_of, shared_length


@dataclass
class Path:
    """One path of an episode: its segments, and which of them no earlier path has."""

    episode: Episode
    number: int
    paths: int
    indices: list[int]
    segments: list[Segment]
    first: list[bool]

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def along(self, pick: Callable[[Segment], torch.Tensor]) -> torch.Tensor:
        """Returns what `pick` gives of each segment; one that an earlier path has is given to it as an observed one."""
        pieces = zip(self.segments, self.first, strict=True)
        return torch.cat([pick(s if first else replace(s, logp=None, version=0)) for s, first in pieces])

    def spread(self, values: list[int]) -> torch.Tensor:
        """Repeat a number per segment for each of its tokens: int64 [L]."""
        lengths = torch.tensor([len(s) for s in self.segments])
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.int64), lengths)

    def turn_rewards(self) -> torch.Tensor:
        """float64 [L]: the reward of each sampled segment at its last token."""
        rewards = self.along(lambda s: torch.zeros(len(s), dtype=torch.float64))
        for s, first, end in zip(self.segments, self.first, accumulate(map(len, self.segments)), strict=True):
            if first and s.sampled and len(s):
                rewards[end - 1] = s.reward
        return rewards


def paths_of(episode: Episode) -> list[Path]:
    """Return the paths of an episode in their order; a segment belongs to the first path that has it."""
    seen: set[int] = set()
    out, paths = [], episode.paths()
    for number, indices in enumerate(paths):
        segments = [episode.segments[i] for i in indices]
        out.append(Path(episode, number, len(paths), indices, segments, [i not in seen for i in indices]))
        seen |= set(indices)
    return out


def add_path(episode: Episode, tokens: torch.Tensor, mask: torch.Tensor, logp: torch.Tensor, version: torch.Tensor):
    """Add a path, given as columns [L], to an episode that has the earlier ones."""
    held = [(path, episode.along(lambda s: s.tokens, path)) for path in episode.paths()]
    # A path that ended is no part of a later one.
    alike = [(min(shared_length(x, tokens), len(x) - 1), path) for path, x in held]
    shared, path = max(alike, key=lambda pair: pair[0])
    # What is sampled here is no earlier path's, whatever the tokens are.
    sampled = torch.nonzero(mask).flatten().tolist()
    shared = min([shared, len(tokens) - 1, *sampled[:1]])
    after, turn = episode.cut(shared, path) if shared else NONE, episode.turns
    rest = segments_of(tokens[shared:], mask[shared:], logp[shared:], version[shared:])
    for i, s in enumerate(rest):
        episode.segments.append(replace(s, turn=turn + s.turn, **({} if i else {"after": after})))


def add_rewards(episode: Episode, rewards: torch.Tensor) -> None:
    """Add rewards by token [L] of the path that is being continued to its segments."""
    at = 0
    for i in episode.path:
        s = episode.segments[i]
        earned = float(rewards[at : at + len(s)].sum())
        if earned:
            episode.segments[i] = replace(s, reward=s.reward + earned)
        at += len(s)


def parents(episode: Episode) -> list[int]:
    """Return, for each turn of an episode, the number of the turn that it follows, -1 for none."""
    out = [BY_PATH] * episode.turns
    for i, s in enumerate(episode.segments):
        if out[s.turn] == BY_PATH:
            before = [episode.segments[j] for j in episode.path_to(episode.before(i))]
            sampled_turns = [earlier.turn for earlier in before if earlier.sampled and earlier.turn != s.turn]
            out[s.turn] = s.parent if s.parent != BY_PATH else sampled_turns[-1] if sampled_turns else -1
    return out
