"""Formats episodes for the terminal: sampled turns with their rewards, tool calls, and observations."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from spmdrl.tracking.console import clean

if TYPE_CHECKING:
    from spmdrl.data.episode import Episode
    from spmdrl.rl.tool_calls import CallReader

WIDTH = 160
"""Maximum number of characters to show from each text."""


def conversation_lines(
    episode: "Episode", decode: Callable[[list[int]], str], reader: "CallReader | None" = None
) -> list[str]:
    """Format an episode as lines without control characters, with turns in sampling order.

    A single-turn episode without an environment becomes one line `prompt -> response`. If a turn starts a branch, its
    line names the turn before the branch.

    reader: parses the tool calls in sampled turns, or None for a run without an environment.
    """
    calls = reader.of(episode) if reader else {}
    pieces = _pieces(episode)
    if episode.turns == 1 and reader is None:
        return [clean(" -> ".join(decode(_tokens(episode, indices)) for indices in pieces), WIDTH)]
    lines = []
    for indices in pieces:
        first, last = (episode.segments[i] for i in (indices[0], indices[-1]))
        before = episode.before(indices[0])
        name = f"turn {first.turn}{_branch(episode, before) if before != indices[0] - 1 else ''}"
        text = clean(decode(_tokens(episode, indices)), WIDTH)
        if not last.sampled:
            lines.append(f"{name}  observed  {text}")
            continue
        reward = sum(episode.segments[i].reward for i in indices)
        lines.append(f"{name}  sampled   {text}{f'  reward {reward:g}' if reward else ''}")
        for call in calls.get(indices[-1], ()):
            called = call["name"]
            text = json.dumps(call["arguments"], ensure_ascii=False) if "arguments" in call else call["error"]
            lines.append(f"{name}  call      {clean(f'{called} {text}'.strip(), WIDTH)}")
    return lines


def _pieces(episode: "Episode") -> list[list[int]]:
    """Return an episode's segment indices, grouped by line: consecutive segments of a turn form a group.

    A turn has several segments if it was sampled by several weight versions, or if a branch starts inside it.
    """
    out: list[list[int]] = []
    for i, s in enumerate(episode.segments):
        last = episode.segments[out[-1][-1]] if out else None
        follows = last is not None and episode.before(i) == i - 1
        if follows and last is not None and (last.turn, last.sampled) == (s.turn, s.sampled):
            out[-1].append(i)
        else:
            out.append([i])
    return out


def _tokens(episode: "Episode", indices: list[int]) -> list[int]:
    return [token for i in indices for token in episode.segments[i].readable()]


def _branch(episode: "Episode", before: int) -> str:
    """Describe where a branch starts. before: index of the segment before the branch, or -1."""
    sampled = [episode.segments[i].turn for i in episode.path_to(before) if episode.segments[i].sampled]
    return f" (branch after turn {sampled[-1]})" if sampled else " (branch from the prompt)"
