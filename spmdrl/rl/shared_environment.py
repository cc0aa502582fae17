"""The environment of an engine of several ranks: the first rank speaks to the world, the others hear what it hears."""

import math

import torch
import torch.distributed as dist

from spmdrl.data.episode import FINISH_REASONS, Episode
from spmdrl.rl.environment import Environment, Observation, Place
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.spmd.world import World

HEAD = 7
"""Numbers of an observation before its tokens: position, sample, finish, state, anew, failed, count of tokens."""


class Shared:
    """An `Environment` whose observations the first rank of a group broadcasts as tensors. Every call is collective."""

    opens_later = True

    def __init__(self, own: Environment | None, world: World, turn_tokens: int, most_open: int):
        """own: on the first rank. world: its engine has several ranks. The others are as in the contract."""
        assert world.engine_group is not None, "an engine of one rank has nobody to share with"
        self.own, self.turn_tokens, self.most_open = own, turn_tokens, most_open
        # NCCL carries tensors of the device alone.
        self.group, self.device = world.engine_group, world.device

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """See the contract."""
        if self.own:
            self.own.open(plan, group, episode)

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """See the contract."""
        if self.own:
            self.own.answer(plan, group, episode, finish)

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """See the contract; on other ranks parts of rewards and texts of failures are missing."""
        seen = self.own.poll(wait) if self.own else []
        numbers, rewards = (column.to(self.device) for column in packed(seen))
        sizes = torch.tensor([len(numbers), len(rewards)], device=self.device)
        dist.broadcast(sizes, group=self.group, group_src=0)
        of_numbers, of_rewards = sizes.tolist()
        if not of_numbers:
            return []
        if not self.own:
            numbers = torch.empty(of_numbers, dtype=torch.int64, device=self.device)
            rewards = torch.empty(of_rewards, dtype=torch.float64, device=self.device)
        dist.broadcast(numbers, group=self.group, group_src=0)
        dist.broadcast(rewards, group=self.group, group_src=0)
        return seen if self.own else unpacked(numbers, rewards)

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """See the contract."""
        if self.own:
            self.own.leave(episodes, keep)

    def take_counts(self) -> dict[str, float]:
        """See the contract."""
        return self.own.take_counts() if self.own else {}

    def close(self) -> None:
        """See the contract."""
        if self.own:
            self.own.close()


def packed(seen: list[tuple[Place, Observation]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns observations as one row of whole numbers, int64, and one of rewards, float64."""
    numbers, rewards = [], []
    for (position, sample), each in seen:
        finish = FINISH_REASONS.index(each.over) if each.over else -1
        state = -1 if each.state is None else each.state
        numbers += [position, sample, finish, state, each.anew, bool(each.failure), len(each.tokens), *each.tokens]
        rewards += [each.reward, math.nan if each.given is None else each.given]
    return torch.tensor(numbers, dtype=torch.int64), torch.tensor(rewards, dtype=torch.float64)


def unpacked(numbers: torch.Tensor, rewards: torch.Tensor) -> list[tuple[Place, Observation]]:
    """Returns the observations that `packed` packed, without parts and texts."""
    out, at, row = [], 0, numbers.tolist()
    for reward, given in rewards.view(-1, 2).tolist():
        position, sample, finish, state, anew, failed, count = row[at : at + HEAD]
        tokens = row[at + HEAD : at + HEAD + count]
        at += HEAD + count
        each = Observation(
            tokens,
            None if state < 0 else state,
            bool(anew),
            FINISH_REASONS[finish] if finish >= 0 else "",
            reward,
            None if math.isnan(given) else given,
            failure="it failed" if failed else "",
        )
        out.append(((position, sample), each))
    return out
