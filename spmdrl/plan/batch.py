"""Builds the batch of one data position on paper: sequences of full length, with the columns of a real step."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.pack import from_episodes
from spmdrl.policy import learner
from spmdrl.policy.objectives.algorithm import Algorithm


def full_batch(cfg: Config, algo: Algorithm, groups: int, samples: int, vocab: int) -> Batch:
    """Make `groups` prompts with `samples` responses each; prompts and responses have the greatest length.

    Rewards differ within each group, so that every sequence gets a gradient. vocab: tokens lie below it.
    """
    rollout = cfg.rollout
    response = [1 % vocab] * rollout.max_new_tokens
    episodes = []
    for position in range(groups):
        prompt = [(position + i) % vocab for i in range(rollout.max_prompt_tokens)]
        for sample in range(samples):
            made = Episode(position, sample, position, [prompt_segment(prompt)], "length", float(sample % 2))
            made.add_sampled(response, [-1.0] * len(response), 0)
            made.parts = {"a_part": float(sample % 2)}
            episodes.append(made)
    batch = from_episodes(episodes, ("a_part",), turns="turns" in algo.needs)
    batch.seq["seed"] = torch.arange(len(batch))
    batch.seq["work"] = batch.lengths
    batch.seq["update"] = torch.zeros(len(batch), dtype=torch.int64)
    return batch


@contextmanager
def alike() -> Iterator[None]:
    """Select micro-batches of equal lengths and prompts from a batch only once, because they are alike."""
    found: dict[tuple, Batch] = {}
    split, select = learner.microbatches, Batch.select

    def chosen(batch: Batch, index: torch.Tensor) -> Batch:
        prompts = batch.seq["position"][index].diff().tolist()
        key = id(batch), tuple(batch.lengths[index].tolist()), tuple(step > 0 for step in prompts)
        if key not in found:
            found[key] = select(batch, index)
        return found[key]

    def microbatches(*args) -> list[Batch]:
        # The id of a batch that no longer exists may be given to another one.
        found.clear()
        with patch.object(Batch, "select", chosen):
            return split(*args)

    with patch.object(learner, "microbatches", microbatches):
        yield
