"""Grades the episodes of a rollout while the engine continues to sample."""

import math
from dataclasses import replace
from itertools import groupby

import torch

from spmdrl.data.episode import Episode
from spmdrl.rewards.base import Grader, Reward, RewardInput, describe, warn_left_out
from spmdrl.rewards.load import on_engine
from spmdrl.rewards.text import divided
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.tracking.metrics import Timer


class Grading:
    """Submits a rollout's episodes to the grader, and stores the rewards until their groups are complete."""

    def __init__(self, grader: Grader, tokenizer, leads: bool):
        """leads: True on the first rank of an engine. Other ranks only run graders that use the engine."""
        self.grader, self.tokenizer = grader, tokenizer
        self.graders = [grader] if leads else on_engine(grader)
        self.rewards: dict[tuple[int, int], Reward] = {}
        """Rewards by (position, sample)."""
        self.failures = 0
        """Number of episodes whose environment failed."""

    def failed(self, group: PromptGroup, episode: Episode, why: str) -> None:
        """Drop an episode whose environment failed or whose prompt is too long, and log the reason."""
        self.failures += 1
        episode.ungraded, episode.why = True, why
        warn_left_out(f"{describe((group.prompt.index, episode.sample))} is left out", why, self.failures)

    def ended(self, group: PromptGroup, episode: Episode) -> None:
        """Submit an episode that has ended.

        For a grader that needs groups, submit all episodes of the group once the last one has ended.
        """
        if not self.grader.wants_groups:
            self.submit(group, episode)
        elif group.done:
            for each in group.episodes:
                self.submit(group, each)

    def submit(self, group: PromptGroup, episode: Episode) -> None:
        """Submit the last response of an episode to the grader."""
        episode.phase = "grading"
        if episode.ungraded:
            self.rewards[group.position, episode.sample] = Reward(math.nan, ungraded="its environment failed")
            return
        if not self.graders:
            return
        prompt = group.prompt
        # Reward functions get the response text without special tokens, such as the end token.
        prefill, mark = divided(prompt.reply)
        item = RewardInput(
            prompt.data_source,
            mark + self.tokenizer.decode(episode.response, skip_special_tokens=True),
            prompt.ground_truth,
            prompt.extra,
            prompt.content,
            prefill,
            group=sum(not e.ungraded for e in group.episodes),
            given=episode.given,
            given_parts=episode.parts,
            dialogue=[] if episode.given is None else self._dialogue(episode),
            tools=prompt.tools,
        )
        # The key starts with prompt index and sample, because the grader's messages show the first parts of the key.
        for grader in self.graders:
            grader.submit((prompt.index, episode.sample, group.position), item)

    def _dialogue(self, episode: Episode) -> list[tuple[bool, str]]:
        """Return the texts before the last response (prompt, turns, observations), each with True if it was sampled."""
        prompt, path = list(range(episode.opening)), episode.path
        # If a branch does not start with the complete prompt, all of its segments are appended to the prompt's text.
        rest = path[len(prompt) :] if path[: len(prompt)] == prompt else path
        last = episode.turns - 1
        before = [s for s in (episode.segments[i] for i in rest) if not (s.sampled and s.turn == last)]
        pieces = [(False, [episode.segments[i] for i in prompt])]
        pieces += [(sampled, list(segments)) for sampled, segments in groupby(before, lambda s: s.sampled)]
        texts = ([token for s in each for token in s.readable()] for _, each in pieces)
        decoded = [self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in texts]
        return [(sampled, text) for (sampled, _), text in zip(pieces, decoded, strict=True)]

    def poll(self) -> None:
        """Store the rewards that have arrived."""
        for grader in self.graders:
            self._take(grader.poll())

    def finish(self, groups: list[PromptGroup], plan: RolloutPlan, timer: Timer) -> bool:
        """Wait for the rewards of finished groups, and return False if the rollout was abandoned in the meantime."""
        # Episodes of a carried group (`rl/rollout_plan.py`) that ended in an earlier step are graded again. Grading is
        # usually cheap, and checkpoints then do not have to store rewards. A grader that needs groups already has all
        # episodes.
        for group in groups:
            for episode in group.episodes:
                if episode.phase != "grading":
                    self.submit(group, episode)
        with timer("reward"):
            for grader in self.graders:
                self._take(grader.drain(plan.may_end))
        return not any(grader.pending for grader in self.graders)

    def has(self, group: PromptGroup) -> bool:
        """Return True if all rewards for a group have arrived."""
        return all((e.position, e.sample) in self.rewards for e in group.episodes)

    def graded(self, group: PromptGroup, plan: RolloutPlan) -> list[Episode]:
        """Return the samples of a group with their rewards. The greedy episode's reward is their baseline.

        Raises:
            ValueError: a logp is not finite, and `plan.bad_sample` is `stop`.
        """
        greedy = self.rewards[group.position, plan.samples] if plan.greedy else Reward(0.0)
        baseline = greedy.score if greedy.applies else math.nan
        first = group.episodes[0].experts
        for episode in group.episodes[: plan.samples]:
            reward = self.rewards[group.position, episode.sample]
            episode.phase = "graded"
            episode.reward, episode.parts, episode.timed_out = reward.score, reward.parts, reward.timed_out
            if reward.shut:
                # The per-turn rewards must be 0 as well, because the last turn gets the score minus their sum.
                episode.segments = [replace(s, reward=0.0) for s in episode.segments]
            episode.ungraded = bool(reward.ungraded) or not reward.applies
            episode.baseline = baseline
            if not _has_finite_logp(episode, plan) or episode.ungraded:
                episode.reward = math.nan
            if not math.isfinite(baseline):
                # Without the greedy baseline, no sample of this prompt is usable.
                episode.reward = math.nan
                episode.ungraded = episode.ungraded or bool(greedy.ungraded) or not greedy.applies
            if episode.experts is not None and first is not None and episode.experts is not first:
                # All samples use the first sample's prompt routing, so that the trainer can share the prompt.
                known = min(len(group.prompt.tokens), len(first))
                episode.experts = torch.cat([first[:known], episode.experts[known:]])
        return group.episodes[: plan.samples]

    def _take(self, graded: list[tuple[object, Reward]]) -> None:
        self.rewards |= {(key[2], key[1]): reward for key, reward in graded if isinstance(key, tuple)}


def _has_finite_logp(episode: Episode, plan: RolloutPlan) -> bool:
    if all(bool(torch.isfinite(s.logp).all()) for s in episode.segments if s.logp is not None):
        return True
    if plan.bad_sample == "stop":
        raise ValueError(
            f"the engine reported a logp that is not finite for prompt {episode.prompt}, sample {episode.sample}, at "
            f"weight version {plan.version}; look at grad_norm of the steps before, or leave such samples out with "
            "--filter.bad-sample skip"
        )
    return False
