"""Packs the paths of episodes into a batch, and unpacks episodes from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.episode import FINISH_REASONS, Episode
from spmdrl.data.placeholders import shown_in, with_images
from spmdrl.data.segment import BY_PATH, NONE, Segment, Shown, segments_of, shared_length, shown_from


@dataclass
class Path:
    """One path of an episode, which becomes one sequence of a batch."""

    episode: Episode
    number: int
    paths: int
    """Number of paths of the episode."""
    indices: list[int]
    segments: list[Segment]
    """Segments of the path. A segment that is also on an earlier path counts as observed, so it is trained on only
    once."""


def _paths_of(episode: Episode) -> list[Path]:
    seen: set[int] = set()
    out, paths = [], episode.paths()
    for number, indices in enumerate(paths):
        segments = [
            replace(episode.segments[i], logp=None, version=0) if i in seen else episode.segments[i] for i in indices
        ]
        out.append(Path(episode, number, len(paths), indices, segments))
        seen |= set(indices)
    return out


def from_episodes(
    episodes: list[Episode],
    part_names: tuple[str, ...] = (),
    experts_width: int = 0,
    turns: bool = False,
    turn_rewards: bool = False,
    placeholder: int | None = None,
) -> Batch:
    """Pack the paths of this rank's episodes in sample order. With no episodes, return an empty batch with all columns.

    The optional columns must be the same on every rank.

    part_names: reward parts that become columns `part/<name>`. A sample without the part gets nan, or 0 if its grading
    timed out.
    experts_width: width of `token["experts"]`, from `Episode.experts`; 0 to omit this column.
    turns: add `token["turn"]`, `token["state"]` and `token["parent"]`.
    turn_rewards: add `token["turn_reward"]`, and two token counts per episode: `seq["made"]` counts the tokens after
    the prompt, and `seq["distinct"]` all tokens. Tokens shared by paths count once. If False, turn rewards appear only
    as part of `seq["reward"]`.
    placeholder: id of the placeholder tokens of images, so that the batch holds images; None if the model reads text
    only.

    Raises ValueError if a sequence has placeholders without an image.
    """
    ordered = [path for e in sorted(episodes, key=lambda e: (e.position, e.sample)) for path in _paths_of(e)]

    def per_token(pick: Callable[[Segment], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        pieces = [pick(s).to(dtype) for path in ordered for s in path.segments]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=dtype)

    def column(values, dtype=torch.int64):
        return torch.tensor(list(values), dtype=dtype)

    token = {
        "tokens": per_token(lambda s: s.tokens, torch.int64),
        "mask": per_token(Segment.mask, torch.bool),
        "rollout_logp": per_token(Segment.rollout_logp, torch.float32),
        "version": per_token(lambda s: s.spread(s.version), torch.int64),
    }
    if turns:
        token["turn"] = per_token(lambda s: s.spread(s.turn), torch.int64)
        token["state"] = per_token(lambda s: s.spread(s.state), torch.int64)
        before = {id(p.episode): parents(p.episode) for p in ordered}
        of_segments = [(len(s), before[id(p.episode)][s.turn]) for p in ordered for s in p.segments]
        lengths, values = column(n for n, _ in of_segments), column(parent for _, parent in of_segments)
        token["parent"] = torch.repeat_interleave(values, lengths)
    if turn_rewards:
        token["turn_reward"] = per_token(Segment.turn_reward, torch.float64)
    if experts_width:
        none = torch.full((0, experts_width), -1, dtype=torch.int16)
        rows = [all_experts(p.episode, experts_width)[p.episode.rows(p.indices)] for p in ordered]
        token["experts"] = torch.cat([none, *rows])
    names = ("prompt", "sample", "position", "version", "turns")
    seq = {name: column(getattr(p.episode, name) for p in ordered) for name in names}
    seq |= {"path": column(p.number for p in ordered), "paths": column(p.paths for p in ordered)}
    if turn_rewards:
        seq["made"] = column(p.episode.generated for p in ordered)
        seq["distinct"] = column(sum(map(len, p.episode.segments)) for p in ordered)
    seq["finish"] = column(FINISH_REASONS.index(p.episode.finish) for p in ordered)
    seq["reward"] = column((p.episode.reward for p in ordered), torch.float64)
    seq["baseline"] = column((p.episode.baseline for p in ordered), torch.float64)
    for name in part_names:
        part = (p.episode.parts.get(name, 0.0 if p.episode.timed_out else math.nan) for p in ordered)
        seq[f"part/{name}"] = column(part, torch.float64)
    batch = Batch(column(sum(map(len, p.segments)) for p in ordered), token, seq)
    if placeholder is None:
        return batch
    return with_images(batch, [tuple(image for s in p.segments for _, image in s.images) for p in ordered], placeholder)


def all_experts(episode: Episode, width: int) -> torch.Tensor:
    """Return the routed experts (`Episode.experts`) of an episode's N tokens, int16 [N, width], or -1 where unknown."""
    out = torch.full((sum(map(len, episode.segments)), width), -1, dtype=torch.int16)
    if episode.experts is not None:
        out[: len(episode.experts)] = episode.experts
    return out


def parents(episode: Episode) -> list[int]:
    """Return the index of the turn that each turn of an episode follows, or -1 if there is none."""
    out = [BY_PATH] * episode.turns
    for i, s in enumerate(episode.segments):
        if out[s.turn] == BY_PATH:
            before = [episode.segments[j] for j in episode.path_to(episode.before(i))]
            sampled_turns = [earlier.turn for earlier in before if earlier.sampled and earlier.turn != s.turn]
            out[s.turn] = s.parent if s.parent != BY_PATH else sampled_turns[-1] if sampled_turns else -1
    return out


def to_episodes(batch: Batch, leave_out: tuple[str, ...] = ()) -> list[Episode]:
    """Unpack the episodes that have sampled tokens. leave_out: names of reward parts to omit.

    Turns are renumbered: path by path, each observation after a response starts a turn. Turn rewards are restored only
    if the batch has `token["turn_reward"]`.
    """
    lengths, token = batch.lengths.tolist(), batch.token
    columns = [x_T.split(lengths) for x_T in (token["tokens"], batch.sampled, token["rollout_logp"], token["version"])]
    rewards = token.get("turn_reward", torch.zeros(batch.n_tokens)).split(lengths)
    paths = list(zip(*columns, shown_in(batch), strict=True))
    names = [name for name in batch.seq if name.startswith("part/") and name.removeprefix("part/") not in leave_out]
    seq = {name: batch.seq[name].tolist() for name in ("prompt", "sample", "position", "finish", "reward", *names)}
    out = []
    for i, last in zip(batch.firsts.tolist(), batch.lasts.tolist(), strict=True):
        (tokens, mask, *rest), *others = paths[i : last + 1]
        parts = {name.removeprefix("part/"): seq[name][i] for name in names if not math.isnan(seq[name][i])}
        prompt, sample, position, finish = (seq[name][i] for name in ("prompt", "sample", "position", "finish"))
        segments = segments_of(tokens, mask, *rest)
        episode = Episode(prompt, sample, position, segments, FINISH_REASONS[finish], seq["reward"][i], parts)
        _add_rewards(episode, rewards[i])
        for number, path in enumerate(others, i + 1):
            _add_path(episode, *path)
            _add_rewards(episode, rewards[number])
        if any(s.sampled for s in episode.segments):
            out.append(episode)
    return out


def _add_path(
    episode: Episode,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    logp: torch.Tensor,
    version: torch.Tensor,
    images: Shown,
) -> None:
    """Add a path, given as columns [L], to an episode that already contains all earlier paths."""
    earlier = [(path, episode.along(Segment.distinct, path)) for path in episode.paths()]
    mine = Segment(tokens, images=images).distinct()
    # A later path never contains a complete earlier path, so the last token of the earlier path is not shared.
    alike = [(min(shared_length(x, mine), len(x) - 1), path) for path, x in earlier]
    shared, path = max(alike, key=lambda pair: pair[0])
    # Tokens sampled on this path are not shared with an earlier path, even if they are equal.
    sampled = torch.nonzero(mask).flatten().tolist()
    shared = min([shared, len(tokens) - 1, *sampled[:1]])
    after, turn = episode.cut(shared, path) if shared else NONE, episode.turns
    rest = segments_of(tokens[shared:], mask[shared:], logp[shared:], version[shared:], shown_from(images, shared))
    for i, s in enumerate(rest):
        episode.segments.append(replace(s, turn=turn + s.turn, **({} if i else {"after": after})))


def _add_rewards(episode: Episode, rewards: torch.Tensor) -> None:
    """Add the current path's token rewards, [L], to the segments that contain the tokens."""
    at = 0
    for i in episode.path:
        s = episode.segments[i]
        earned = float(rewards[at : at + len(s)].sum())
        if earned:
            episode.segments[i] = replace(s, reward=s.reward + earned)
        at += len(s)
