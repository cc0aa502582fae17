"""Converts episodes, groups, experience and batches to trees of plain values and tensors, and back.

`checkpoint/treefile.py` writes the trees. Old checkpoints, whose episodes have no segments, can still be read. They
store responses as columns, under `parts` in a group and `trajectories` in a step.
"""

from dataclasses import fields
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode, Segment, episode_of, prompt_segment, segments_of
from spmdrl.data.prompts import Prompt
from spmdrl.rl.conversation_state import ConversationState
from spmdrl.rl.rollout_plan import Experience, PromptGroup
from spmdrl.spmd.payload import Payload


def fields_of(x: Any) -> dict:
    """Return a dataclass's fields as a dict, without copying values."""
    return {field.name: getattr(x, field.name) for field in fields(x)}


class Images:
    """The images that the trees of a file name. Each is stored once, however many segments and sequences show it."""

    def __init__(self, held: dict[str, Payload] | None = None):
        self.held = held or {}
        """Maps the name of a payload to the payload."""

    @staticmethod
    def of(tree: dict) -> "Images":
        """Return the images of a tree that `tree` returned."""
        return Images({name: Payload(**values) for name, values in tree.items()})

    def tree(self) -> dict:
        """Return the images as a tree."""
        return {name: fields_of(payload) for name, payload in self.held.items()}

    def name(self, image: Payload) -> str:
        """Add an image, and return its name."""
        self.held[image.name] = image
        return image.name


def batch_tree(batch: Batch, images: Images) -> dict:
    """Convert a batch to a tree. images: takes the batch's images."""
    rows = batch.images
    return fields_of(batch) | {"images": rows if rows is None else [[images.name(x) for x in row] for row in rows]}


def batch_of(tree: dict, images: Images) -> Batch:
    """Convert a tree from `batch_tree` back to a batch."""
    out, rows = Batch(tree["lengths"], tree["token"], tree["seq"]), tree.get("images")
    out.images = rows if rows is None else [tuple(images.held[name] for name in row) for row in rows]
    return out


def episode_tree(e: Episode, images: Images) -> dict:
    """Convert an episode to a tree. The episode must not be part of a running rollout.

    Its conversation is stored under the key `talk`, as JSON values. images: takes the episode's images.
    """
    segments = [fields_of(s) | {"images": [(at, images.name(image)) for at, image in s.images]} for s in e.segments]
    saved = {"segments": segments, "conversation": e.conversation and e.conversation.saved()}
    values = fields_of(e) | saved
    return {"talk" if name == "conversation" else name: values[name] for name in values if name != "phase"}


def episode(tree: dict, images: Images) -> Episode:
    """Convert a tree from `episode_tree` back to an episode."""
    shown = [tuple((at, images.held[name]) for at, name in s.get("images", ())) for s in tree["segments"]]
    segments = [Segment(**s | {"images": each}) for s, each in zip(tree["segments"], shown, strict=True)]
    values: dict[str, Any] = tree | {"segments": segments}
    talk = values.pop("talk", None)
    return Episode(**values, conversation=talk and ConversationState.restored(talk))


def group_tree(g: PromptGroup, images: Images) -> dict:
    """Convert a group to a tree that stores the prompt by its index. images: takes the episodes' images."""
    return fields_of(g) | {"prompt": g.prompt.index, "episodes": [episode_tree(e, images) for e in g.episodes]}


def group(tree: dict, prompts: dict[int, Prompt], images: Images) -> PromptGroup:
    """Convert a tree from `group_tree` back to a group. prompts: the data set's prompts by index."""
    prompt, position = prompts[tree["prompt"]], tree["position"]
    if "parts" in tree:
        parts = sorted((int(sample), part) for sample, part in tree["parts"].items())
        episodes = [_from_part(prompt, position, sample, part) for sample, part in parts]
    else:
        episodes = [episode(e, images) for e in tree["episodes"]]
    return PromptGroup(position, prompt, tree["born"], episodes)


def experience_tree(done: Experience, images: Images) -> dict:
    """Convert a step's experience to a tree, without its carried groups (`RankState.tree` saves the sampler's).

    images: takes the episodes' images.
    """
    return {
        "episodes": [episode_tree(e, images) for e in done.episodes],
        "drawn": done.drawn,
        "bad_samples": done.bad_samples,
        "stats": done.stats.dump(),
    }


def experience(tree: dict, images: Images) -> Experience:
    """Convert a tree from `experience_tree` back to the experience."""
    old = [_from_trajectory(t) for t in tree.get("trajectories", ())]
    episodes = old or [episode(e, images) for e in tree.get("episodes", ())]
    done = Experience(episodes, tree["drawn"], [], tree["bad_samples"])
    done.stats.load(tree["stats"])
    return done


def _from_part(prompt: Prompt, position: int, sample: int, part: dict) -> Episode:
    n = len(part["tokens"])
    made = segments_of(part["tokens"], torch.ones(n, dtype=torch.bool), part["logp"], part["versions"]) if n else []
    segments = [prompt_segment(prompt.tokens), *made]
    return Episode(prompt.index, sample, position, segments, part["finish"], experts=part["experts"])


def _from_trajectory(t: dict) -> Episode:
    names = ("prompt", "sample", "position", "finish", "reward", "parts", "timed_out", "baseline", "experts")
    versions = t["version"] if t["versions"] is None else t["versions"]
    columns = {"tokens": t["tokens"], "mask": t["mask"], "rollout_logp": t["rollout_logp"], "version": versions}
    return episode_of(**columns, **{name: t[name] for name in names})
