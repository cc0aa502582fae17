"""Episodes, groups and a step's experience as trees of plain values and tensors (`checkpoint/treefile.py`), and back.

Checkpoints of before segments hold a response as columns: `parts` of a group, `trajectories` of a step. They are read.
"""

from dataclasses import fields
from typing import Any

import torch

from spmdrl.data.episode import Episode, Segment, episode_of, prompt_segment, segments_of
from spmdrl.data.prompts import Prompt
from spmdrl.rl.conversation_state import ConversationState
from spmdrl.rl.fill_batch import Experience
from spmdrl.rl.rollout_plan import PromptGroup


def fields_of(x: Any) -> dict:
    """A dataclass's fields by name, as they are."""
    return {field.name: getattr(x, field.name) for field in fields(x)}


def episode_tree(e: Episode) -> dict:
    """An episode, which is in no rollout. Its conversation stands under the key `talk`, as JSON values."""
    saved = {"segments": [fields_of(s) for s in e.segments], "conversation": e.conversation and e.conversation.saved()}
    values = fields_of(e) | saved
    return {"talk" if name == "conversation" else name: values[name] for name in values if name != "phase"}


def episode(tree: dict) -> Episode:
    """The inverse of `episode_tree`."""
    values: dict[str, Any] = tree | {"segments": [Segment(**s) for s in tree["segments"]]}
    talk = values.pop("talk", None)
    return Episode(**values, conversation=talk and ConversationState.restored(talk))


def group_tree(g: PromptGroup) -> dict:
    """A group; its prompt by its index."""
    return fields_of(g) | {"prompt": g.prompt.index, "episodes": [episode_tree(e) for e in g.episodes]}


def group(tree: dict, prompts: dict[int, Prompt]) -> PromptGroup:
    """The inverse of `group_tree`. prompts: by index."""
    prompt, position = prompts[tree["prompt"]], tree["position"]
    if "parts" in tree:
        parts = sorted((int(sample), part) for sample, part in tree["parts"].items())
        episodes = [_from_part(prompt, position, sample, part) for sample, part in parts]
    else:
        episodes = [episode(e) for e in tree["episodes"]]
    return PromptGroup(position, prompt, tree["born"], episodes)


def experience_tree(done: Experience) -> dict:
    """Return a step's experience. `carried` is left out: the sampler saves that of the newest step."""
    return {
        "episodes": [episode_tree(e) for e in done.episodes],
        "drawn": done.drawn,
        "bad_samples": done.bad_samples,
        "stats": done.stats.dump(),
    }


def experience(tree: dict) -> Experience:
    """The inverse of `experience_tree`."""
    old = [_from_trajectory(t) for t in tree.get("trajectories", ())]
    episodes = old or [episode(e) for e in tree.get("episodes", ())]
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
