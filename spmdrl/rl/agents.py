"""Conversations of the policy with environments in worker processes, from messages to tokens and back.

A conversation is opened, then each response is read (`env/calls.py`) and said to its environment (`env/pool.py`), whose
messages become the tokens that the policy goes on after (`data/conversation.py`); at the end it is scored. All of an
engine's conversations go on at the same time: a slow tool delays its own episode alone.
"""

import math
import time
from collections.abc import Callable

import torch

from spmdrl.config.environment import ROWS, EnvironmentConfig
from spmdrl.data.conversation import Conversation
from spmdrl.data.episode import Episode
from spmdrl.data.segment import shared_length
from spmdrl.env.base import Reply, limits_of
from spmdrl.env.calls import hear
from spmdrl.env.pool import Pool
from spmdrl.rl.environment import COUNTS, Observation, Place, place_of
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.rl.talks import Talk, opening_of, size_of
from spmdrl.rl.tool_forms import form_of, unfit
from spmdrl.spmd.seeds import seed_for

SEED = 0x454E56
"""Key of the seeds of environments."""
CHARACTERS = 200
"""More than a token stands for. A text that has more for each token that there may be is refused as it is, at once."""


class Agents:
    """The environments of one engine's episodes; of several ranks, the first one has them."""

    opens_later = True

    def __init__(
        self,
        found: EnvironmentConfig,
        conversation: Conversation,
        ends: set[int],
        longest_prompt: int,
        answer_column: str,
        weight: float,
    ):
        """Start the workers and make the environment once.

        ends: tokens that end a response. answer_column: name under which an environment finds the truth of its row,
        beside `ground_truth`. weight: of the environment's rewards among the run's (`config.environment.weight_of`).

        Raises:
            ValueError: there is no such environment, or it has tools and nobody can tell how the model learns of them
                or calls them.
        """
        self.found, self.conversation, self.ends = found, conversation, ends
        self.longest_prompt, self.answer_column, self.weight = longest_prompt, answer_column, weight
        self.format, self.hidden = form_of(found, conversation), found.calls != "auto"
        self.pool = Pool(found.workers, limits_of(found))
        self.hello = "each row's own"
        if found.environment != ROWS:
            try:
                self.hello = self.pool.check(found.environment, found.settings)
                if why := unfit(found, conversation, self.format, self.pool.tools[found.environment]):
                    raise ValueError(f"--env {found.environment}: {why}")
            except ValueError:
                self.pool.shutdown()
                raise
        self.turn_tokens, self.most_open = found.turn_tokens, found.max_open
        self.talks: dict[Place, Talk] = {}
        self.ready: list[tuple[Place, Observation]] = []
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)

    # ── the contract ─────────────────────────────────────────────────────────

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """See the contract."""
        place, prompt = place_of(episode), group.prompt
        # All samples of a prompt begin alike, as they are compared. `born` tells training and evaluation apart, and
        # stays as it is in a group that a later step goes on with.
        seed = seed_for(plan.key[0], SEED, group.born, prompt.index, group.position)
        try:
            opening = opening_of(self.found, prompt, self.answer_column, seed)
        except ValueError as error:
            self._fail(place, str(error))
            return
        talk = self.talks[place] = Talk(opening, time.monotonic(), prompt.more)
        kept = episode.talk
        if kept is None:
            self.pool.open(place, opening)
            return
        talk.resume(kept)
        self.pool.open(place, talk.opening, talk.said, kept["state"])

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """See the contract."""
        talk, place = self.talks[place_of(episode)], place_of(episode)
        made, talk.room = episode.response, plan.room(episode)
        ended = bool(made) and made[-1] in self.ends
        self.counts["turns"] += 1
        talk.turns += 1
        if talk.failure:
            self._fail(place, talk.failure)
            return
        if talk.finish:
            # The turn was answered before a cut, and the final reward was not.
            self._begin(place, talk, lambda: self._score(place, talk, talk.finish))
            return
        # One that is whole is heard even if no token is left: the environment may end the episode by it.
        whole = finish == "stop" or (self.turn_tokens and len(made) >= self.turn_tokens)
        if not whole:
            self._begin(place, talk, lambda: self._score(place, talk, "length"))
            return
        said = hear(self.conversation.text_of(made, ended), self.format, talk.tools)
        talk.heard, talk.path = (made, ended), episode.tokens

        def say() -> None:
            talk.asked = "say"
            talk.said.append(said)
            self.pool.say(place, said)

        self._begin(place, talk, say)

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """See the contract."""
        until = time.monotonic() + wait
        while True:
            left = 0.0 if self.ready else max(0.0, until - time.monotonic())
            for place, reply in self.pool.poll(left):
                self._take(place, reply)
            if self.ready or not left or not self.pool.pending:
                break
        # In an order that no clock has a part in, as far as that goes: what came together is sorted.
        ready, self.ready = sorted(self.ready, key=lambda entry: entry[0]), []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """See the contract."""
        for episode in episodes:
            place = place_of(episode)
            talk = self.talks.pop(place, None)
            if talk is None:
                continue
            if keep and talk.asked == "open" and not talk.resumed:
                # It has no token, and begins anew.
                episode.talk = None
            elif keep:
                # An answer is not awaited: the turn is said again, and counted, when the episode goes on.
                again = talk.asked in ("say", "score") or talk.waits is not None
                self.counts["turns"] -= again
                talk.turns -= again
                if talk.asked == "say":
                    talk.said.pop()
                episode.talk = self._kept(place, talk)
            self.pool.close(place)

    def take_counts(self) -> dict[str, float]:
        """See the contract."""
        counts, self.counts = self.counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown()

    # ── requests and replies ─────────────────────────────────────────────────

    def _begin(self, place: Place, talk: Talk, request: Callable[[], None]) -> None:
        """Begin a request, after the one under way."""
        if talk.asked:
            talk.waits = request
        else:
            request()

    def _take(self, place: Place, reply: Reply) -> None:
        talk = self.talks[place]
        asked, talk.asked = talk.asked, ""
        for name in ("calls", "failed_calls", "malformed", "timeouts", "cut", "seconds"):
            self.counts[name] += reply.counts.get(name, 0.0)
        talk.calls += reply.counts.get("calls", 0.0)
        again = asked == "open" and talk.resumed
        failure = reply.failure or (talk.differs(reply) if again else "")
        if failure and again and not talk.waits:
            # The engine is at work on the episode, which ends when its response is there.
            talk.failure = failure
        elif failure:
            talk.waits = None
            self._fail(place, failure)
        elif asked == "open":
            self._opened(place, talk, reply)
        elif asked == "say":
            self._said(place, talk, reply)
        else:
            talk.given += reply.reward or 0.0
            reward = self.weight * talk.reward
            seen = Observation(over=talk.finish, reward=reward, given=talk.given, parts=reply.parts)
            if math.isfinite(talk.given):
                self._over(place, seen)
            else:
                self._unbounded(place, talk)
        if talk.waits and not talk.asked:
            request, talk.waits = talk.waits, None
            request()

    def _opened(self, place: Place, talk: Talk, reply: Reply) -> None:
        talk.tools = reply.tools
        if talk.resumed:
            talk.resumed = False
            return
        if why := unfit(self.found, self.conversation, self.format, talk.tools):
            self._fail(place, f"{talk.opening.name}: {why}")
            return
        talk.messages, talk.first = list(reply.messages), reply.state_key
        size = size_of(talk.messages)
        if size > CHARACTERS * self.longest_prompt:
            self._too_long(place, f"{size} characters")
            return
        try:
            tokens = talk.prompt(self.conversation.of(talk.more), self.hidden)
        except ValueError as error:
            self._fail(place, f"{talk.opening.name}: {error}")
            return
        if len(tokens) > self.longest_prompt:
            self._too_long(place, f"{len(tokens)} tokens")
            return
        self.ready.append((place, Observation(tokens)))

    def _said(self, place: Place, talk: Talk, reply: Reply) -> None:
        """Go on after the answer to a turn, or end the episode."""
        talk.reward = reply.reward or 0.0
        talk.given += talk.reward
        before = talk.take(reply)
        if not math.isfinite(talk.given):
            self._unbounded(place, talk)
            return
        if reply.done or not reply.messages:
            self._score(place, talk, "stop")
            return
        if len(talk.said) >= self.found.max_turns:
            self._score(place, talk, "turns")
            return
        if self.found.max_seconds and time.monotonic() - talk.begun > self.found.max_seconds:
            self._score(place, talk, "time")
            return
        if size_of(reply.messages) > CHARACTERS * (len(talk.path) + talk.room):
            self._score(place, talk, "length")
            return
        try:
            tokens, anew = talk.follows(self.conversation.of(talk.more), self.hidden, before, reply)
        except ValueError as error:
            self._fail(place, f"{talk.opening.name}: {error}")
            return
        # A branch has one token of its own at least.
        shared = min(shared_length(talk.path, torch.tensor(tokens)), len(tokens) - 1) if anew else 0
        if talk.room <= len(tokens) - shared:
            self._score(place, talk, "length")
            return
        self.counts["forks"] += anew
        self.ready.append(
            (place, Observation(tokens, talk.state_of(reply.state_key), anew, reward=self.weight * talk.reward))
        )
        talk.reward = 0.0

    def _score(self, place: Place, talk: Talk, finish: str) -> None:
        talk.asked, talk.finish = "score", finish
        self.pool.score(place)

    def _fail(self, place: Place, why: str) -> None:
        self.counts["failures"] += 1
        self._over(place, Observation(over="abort", failure=why))

    def _unbounded(self, place: Place, talk: Talk) -> None:
        self._fail(place, f"{talk.opening.name}: its rewards add up to {talk.given}, which is not finite")

    def _too_long(self, place: Place, size: str) -> None:
        name = self.talks[place].opening.name
        self._fail(
            place,
            f"its prompt is too long: the first messages of {name} have {size}; raise --rollout.max-prompt-tokens "
            f"{self.longest_prompt}",
        )

    def _over(self, place: Place, seen: Observation) -> None:
        talk = self.talks.pop(place, None)
        if talk is not None:
            self.pool.close(place)
            if not seen.failure:
                self.counts["episodes"] += 1
                self.counts["whole_turns"] += talk.turns
                self.counts["whole_calls"] += talk.calls
        self.ready.append((place, seen))

    def _kept(self, place: Place, talk: Talk) -> dict:
        """Returns all by which a later step or another process goes on with an episode, as JSON values."""
        self.pool.save(place)
        there = dict(self.pool.poll())
        state = there.pop(place).state
        for other, reply in there.items():
            self._take(other, reply)
        # Without a limit no clock has a part in what a checkpoint holds.
        return talk.kept(state, time.monotonic() - talk.begun if self.found.max_seconds else 0.0)
