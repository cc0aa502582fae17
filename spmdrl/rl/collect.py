"""One round of experience: prompts from the queue, samples from the engine, rewards while the engine goes on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from spmdrl.data.prompts import Prompt
from spmdrl.data.trajectory import Trajectory
from spmdrl.health.preempt import AbandonedError, agreed
from spmdrl.health.status import alive
from spmdrl.rewards.base import Grader, Reward, RewardInput
from spmdrl.rollout.engine import Completion, Engine, Request, StaleEngineError
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.mesh import World
from spmdrl.spmd.queue import PromptQueue, Tally
from spmdrl.spmd.seeds import seed_for
from spmdrl.tracking.metrics import Timer


@dataclass
class Part:
    """A response so far. Tokens of a carried one were sampled by more than one version of the weights."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token."""
    experts: torch.Tensor | None = None
    """int16 [n, W], of the first n tokens of prompt and response, as in `Completion.experts`."""
    finish: str = ""
    """Empty while it is not done."""


@dataclass
class Group:
    """The samples of one prompt, all of them with one engine."""

    position: int
    """Number of the prompt among all that the run draws: tells apart a prompt drawn twice."""
    prompt: Prompt
    born: int
    """Step in which it was drawn."""
    parts: dict[int, Part]

    @property
    def done(self) -> bool:
        """All samples are finished."""
        return all(part.finish for part in self.parts.values())


@dataclass
class Round:
    """What to sample. Every rank holds the same one, `carried` apart."""

    name: str
    """Unique in the run: names the queue."""
    prompts: list[Prompt]
    """In the order of their positions."""
    samples: int
    """Samples per prompt."""
    key: tuple[int, ...]
    """(seed, step) and what else keys the draws of this round."""
    version: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    assignment: str = "queue"
    first_position: int = 0
    """Number of the first prompt."""
    greedy: bool = False
    """One more response to every prompt, greedy: its reward becomes the others' baseline."""
    bad_sample: str = "stop"
    """A sample whose logp or reward is not finite: an error (`stop`), or returned with the reward nan (`skip`)."""
    enough: int = 0
    """Groups over all engines after which the rest is cut short. 0: all there are."""
    carried: list[Group] = field(default_factory=list)
    """Groups that this rank's engine goes on with; first in line."""
    carried_by: list[int] = field(default_factory=list)
    """How many groups each engine goes on with; empty: none does."""
    must_end: int = -1
    """Groups born in this step or before are waited for, whatever is enough."""
    may_end: Callable[[], bool] | None = None
    """Asked between two steps of the engine, and of the grading: True abandons the round."""

    @property
    def requests_per_prompt(self) -> int:
        """Samples, and the greedy one."""
        return self.samples + self.greedy

    def group(self, place: int) -> Group:
        """The prompt at this place, with nothing sampled yet."""
        parts = {sample: Part() for sample in range(self.requests_per_prompt)}
        return Group(self.first_position + place, self.prompts[place], self.key[-1], parts)

    def request(self, group: Group, sample: int) -> Request:
        """The request of what a sample still lacks. Its seed depends on data alone, not on where it runs."""
        part, prompt = group.parts[sample], group.prompt
        seed = seed_for(*self.key, prompt.index, group.position, sample, len(part.tokens))
        temperature = 0.0 if self.greedy and sample == self.samples else self.temperature
        return Request(
            (group.position, sample),
            prompt.tokens + part.tokens,
            seed,
            self.version,
            self.max_new_tokens - len(part.tokens),
            temperature,
            self.top_p,
        )


@dataclass
class Collected:
    """What became of a round on this rank."""

    trajectories: list[Trajectory]
    """Of whole groups; empty on an engine's other ranks."""
    cut: list[Group]
    """Groups cut short, alike on all ranks of the engine."""
    begun: int = 0
    """Prompts of the round up to the last one that this engine began; it began none beyond."""
    abandoned: bool = False
    """Nothing of it is to be used."""


ASK_EVERY = 16
"""Steps of an engine of several ranks between two questions whether to abandon the round: they answer together."""


def whole(done: Collected, world: World) -> Collected:
    """What was collected, if no engine has abandoned its part. Collective over those who sample.

    Raises:
        AbandonedError: on every rank that samples.
    """
    if agreed(done.abandoned, world.rollout_group):
        raise AbandonedError("the round was abandoned")
    return done


def _abandoned(round_: Round, polls: int, world: World) -> bool:
    """Alike on all ranks of an engine. Collective over them."""
    if round_.may_end is None:
        return False
    if world.engine_group is None:
        return round_.may_end()
    if polls % ASK_EVERY:
        return False
    flag = torch.tensor([int(round_.may_end())], device=world.device)
    return bool(all_reduce(flag, "max", world.engine_group).item())


def collect(round_: Round, engine: Engine, grader: Grader, tokenizer, world: World, timer: Timer) -> Collected:
    """Sample and grade a round. Collective over the ranks of an engine; engines work on their own.

    Raises:
        StaleEngineError: the engine does not hold `round_.version`.
        RewardError: a grading failed.
        ValueError: the engine reported a logp that is not a number (unless `round_.bad_sample` is `skip`).
    """
    queue = PromptQueue(world, len(round_.prompts), round_.name, round_.assignment)
    tally = Tally(world, round_.name, _enough_here(round_, world), round_.assignment)
    leader = world.engine_tp_rank == 0
    # No engine starts with more than its even share: what is left goes to whoever is done first.
    each = round_.requests_per_prompt
    fair = -(-len(round_.prompts) * each // world.engine_count) + len(round_.carried) * each
    limit = min(engine.capacity, fair)
    groups: dict[int, Group] = {}
    running = begun = polls = 0
    abandoned = False
    waiting = list(round_.carried)
    rewards: dict[tuple[int, int], Reward] = {}
    with timer("rollout"):
        while True:
            room = -(-(limit - running) // each)
            taken, waiting = waiting[: max(room, 0)], waiting[max(room, 0) :]
            for place in queue.take(room - len(taken)):
                taken.append(round_.group(place))
                begun = place + 1
            for group in taken:
                groups[group.position] = group
                for sample in [s for s, part in group.parts.items() if not part.finish]:
                    engine.submit(round_.request(group, sample))
                    running += 1
            if not running:
                break
            ended, polls = 0, polls + 1
            alive()
            for completion in engine.poll():
                running -= 1
                group = groups[completion.key[0]]
                _extend(group.parts[completion.key[1]], completion, round_)
                ended += group.done
                if leader:
                    _grade(group, completion.key[1], grader, tokenizer)
            rewards |= by_request(grader.poll())
            owed = any(g.born <= round_.must_end and not g.done for g in [*groups.values(), *waiting])
            abandoned = _abandoned(round_, polls, world)
            if abandoned or (tally.reached(ended) and not owed):
                break
        open_ = [g for g in groups.values() if not g.done]
        unfinished = [(g.position, s) for g in open_ for s, part in g.parts.items() if not part.finish]
        for completion in engine.abort(unfinished):
            _extend(groups[completion.key[0]].parts[completion.key[1]], completion, round_)
    if abandoned:
        return Collected([], [], begun, True)
    with timer("reward"):
        rewards |= by_request(grader.drain(round_.may_end))
    if leader and not grader.pending:
        # Samples of a carried group that ended in an earlier step were graded there, and are graded again: cheap, and
        # nothing but tokens has to be kept.
        again = [(g, s) for g in groups.values() if g.done for s in g.parts if (g.position, s) not in rewards]
        for group, sample in again:
            _grade(group, sample, grader, tokenizer)
        with timer("reward"):
            rewards |= by_request(grader.drain(round_.may_end))
    if grader.pending:
        # The engine's other ranks hear of it in `whole`.
        return Collected([], [], begun, True)
    done = sorted((g for g in groups.values() if g.done), key=lambda g: g.position) if leader else []
    samples = range(round_.samples)
    return Collected([_trajectory(round_, g, s, rewards) for g in done for s in samples], open_ + waiting, begun)


def _enough_here(round_: Round, world: World) -> int:
    """Groups that this engine alone has to bring under a fixed assignment; over all engines under the queue."""
    if round_.assignment != "static" or not round_.enough:
        return round_.enough
    engines = world.engine_count
    carried = round_.carried_by or [0] * engines
    drawn = [len(range(engine, len(round_.prompts), engines)) for engine in range(engines)]
    mine = shares(round_.enough, [c + d for c, d in zip(carried, drawn, strict=True)])[world.engine_index]
    # 0 is a tally without an end: an engine that owes nothing stops at its first group.
    return max(1, mine)


def shares(enough: int, groups: list[int]) -> list[int]:
    """What each engine brings of `enough` groups, in proportion to the groups that it has, and never more than those.

    They add up to `enough`, or to all groups where those are fewer.
    """
    total, ends = sum(groups), [0, *accumulate(groups)]
    # Rounded at the ends, which are cumulative, so that nothing is lost in rounding.
    marks = [min(enough, total) * end // max(1, total) for end in ends]
    return [after - before for before, after in pairwise(marks)]


def unbegun(round_: Round, done: Collected, last: int, world: World) -> list[Group]:
    """This engine's own among the first `last` prompts of a round that it did not begin: none where a queue hands out.

    A fixed assignment leaves them where another engine was quicker; nobody else may begin them.
    """
    if round_.assignment != "static":
        return []
    return [round_.group(p) for p in range(world.engine_index, last, world.engine_count) if p >= done.begun]


def _extend(part: Part, completion: Completion, round_: Round) -> None:
    """Add what the engine made."""
    aborted = completion.finish == "abort"
    if completion.tokens and completion.version != round_.version:
        raise StaleEngineError(f"a sample of weight version {completion.version} came into a round of {round_.version}")
    part.tokens += completion.tokens
    part.logp += completion.logp
    part.versions += [round_.version] * len(completion.tokens)
    if completion.experts is not None:
        # An earlier part's tokens ran again, by later weights: what counts is how their logp came about.
        known = completion.experts[:0] if part.experts is None else part.experts
        part.experts = torch.cat([known, completion.experts[len(known) :]])
    if not aborted:
        part.finish = completion.finish


def by_request(graded: list[tuple[object, Reward]]) -> dict[tuple[int, int], Reward]:
    """Results of a grader by request key: its own keys begin with the prompt's index, which its messages name."""
    return {(key[2], key[1]): reward for key, reward in graded if isinstance(key, tuple)}


def _grade(group: Group, sample: int, grader: Grader, tokenizer) -> None:
    prompt = group.prompt
    # Without its end token, as a reward reads it.
    text = tokenizer.decode(group.parts[sample].tokens, skip_special_tokens=True)
    item = RewardInput(prompt.data_source, text, prompt.ground_truth, prompt.extra)
    grader.submit((prompt.index, sample, group.position), item)


def _trajectory(round_: Round, group: Group, sample: int, rewards: dict[tuple[int, int], Reward]) -> Trajectory:
    prompt, part, reward = group.prompt, group.parts[sample], rewards[group.position, sample]
    before = [0] * len(prompt.tokens)
    logp = torch.tensor([0.0] * len(before) + part.logp, dtype=torch.float32)
    score = reward.score
    if not bool(torch.isfinite(logp).all()):
        score = math.nan
        if round_.bad_sample == "stop":
            raise ValueError(
                f"the engine reported a logp that is not finite for prompt {prompt.index}, sample {sample}, at weight "
                f"version {round_.version}; look at grad_norm of the steps before, or leave such samples out with "
                "--filter.bad-sample skip"
            )
    baseline = rewards[group.position, round_.samples].score if round_.greedy else 0.0
    if not math.isfinite(baseline):
        # There is nothing to subtract from any sample of this prompt.
        score = math.nan
    mask = torch.zeros(len(logp), dtype=torch.bool)
    mask[len(before) :] = True
    return Trajectory(
        prompt=prompt.index,
        sample=sample,
        position=group.position,
        tokens=torch.tensor(prompt.tokens + part.tokens),
        mask=mask,
        rollout_logp=logp,
        version=min(part.versions, default=round_.version),
        finish=part.finish,
        reward=score,
        parts=reward.parts,
        timed_out=reward.timed_out,
        baseline=baseline,
        versions=torch.tensor(before + part.versions),
        experts=_experts(group, sample),
    )


def _experts(group: Group, sample: int) -> torch.Tensor | None:
    """`Trajectory.experts` of a sample. Its prompt's are those of the group's first one, so that it can be shared."""
    own, prompt = group.parts[sample].experts, len(group.prompt.tokens)
    if own is None:
        return None
    first = group.parts[0].experts
    out = own.new_full((prompt + len(group.parts[sample].tokens), own.shape[1]), -1)
    out[: len(own)] = own
    if first is not None:
        out[:prompt] = first[:prompt]
    return out


def carried_by(groups: list[Group], world: World) -> list[int]:
    """How many groups each engine goes on with. Collective over those who sample."""
    row = torch.tensor([[world.engine_index, len(groups)]])
    rows = torch.cat(all_gather_rows(row, world.rollout_group)).tolist()
    # The ranks of an engine hold the same groups.
    count = dict(rows)
    return [count[engine] for engine in range(world.engine_count)]
