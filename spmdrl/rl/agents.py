"""Conversations of the policy with environments in worker processes, from messages to tokens and back.

The environment opens the conversation. Each response is then parsed (`env/calls.py`) and sent to the environment
(`env/pool.py`). The environment's answer is tokenized and appended, and the policy continues from there
(`data/conversation.py`). Images in messages are read when they arrive, and their placeholders are expanded once
(`shown_images.py`). At the end the environment scores the conversation. All open conversations of an engine run
concurrently, so a slow tool delays only its own episode.
"""

import math
import time
from collections.abc import Callable

from spmdrl.config.environment import ROWS, EnvironmentConfig
from spmdrl.data.conversation import Conversation
from spmdrl.data.episode import Episode
from spmdrl.data.segment import Segment, Shown, prompt_segment, shared_length
from spmdrl.env.base import Reply, limits_of
from spmdrl.env.calls import parse_turn
from spmdrl.env.pool import Pool
from spmdrl.rl.conversation_state import ConversationState, opening_of, size_of
from spmdrl.rl.environment import COUNTS, Environment, Observation, Place, place_of
from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan
from spmdrl.rl.shown_images import expanded, names_in, read_reply
from spmdrl.rl.tool_calls import form_of, unfit
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.payload import Payload
from spmdrl.spmd.seeds import seed_for

SEED = 0x454E56
"""Constant mixed into environment seeds, so that they differ from all other seeds of the run."""
CHARACTERS = 200
"""Assumed maximum number of characters per token. A text longer than this times the token limit is rejected without
being tokenized."""


class Agents(Environment):
    """Runs the environments for one engine's episodes. This class is used only on the engine's first rank."""

    remote = True

    def __init__(
        self,
        found: EnvironmentConfig,
        renderer: Conversation,
        ends: set[int],
        longest_prompt: int,
        answer_column: str,
        weight: float,
        images: ImageReader | None = None,
    ):
        """Start the workers. Create the environment once to check it, unless each row names its own environment.

        ends: tokens that end a response. answer_column: another key, besides `ground_truth`, for the ground truth in
        the environment's row. weight: scaling factor for the environment's rewards (`config.environment.weight_of`).
        images: reads the images that environments show; None if the run reads text only.

        Raises:
            ValueError: the environment does not exist, the chat template does not render its tools, or the format of
                its tool calls is unknown.
        """
        super().__init__(images)
        self.found, self.renderer, self.ends = found, renderer, ends
        self.longest_prompt, self.answer_column, self.weight = longest_prompt, answer_column, weight
        self.format, self.hidden = form_of(found, renderer), found.calls != "auto"
        self.pool = Pool(found.workers, limits_of(found))
        self.hello = "each row's own"
        if found.environment != ROWS:
            try:
                self.hello = self.pool.check(found.environment, found.settings)
                if why := unfit(found, renderer, self.format, self.pool.tools[found.environment]):
                    raise ValueError(f"--env {found.environment}: {why}")
            except ValueError:
                self.pool.shutdown()
                raise
        self.turn_tokens, self.most_open = found.turn_tokens, found.max_open
        self.episodes: dict[Place, Episode] = {}
        """Episodes whose conversations are open, by (position, sample)."""
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)

    # ── methods of `Environment` ─────────────────────────────────────────────

    def open(self, plan: RolloutPlan, group: PromptGroup, episode: Episode) -> None:
        """Implements `Environment.open`."""
        place, prompt = place_of(episode), group.prompt
        # All samples of a prompt share a seed, because they are compared with each other. `born` distinguishes training
        # from evaluation, and does not change when a later step continues the group.
        seed = seed_for(plan.key[0], SEED, group.born, prompt.index, group.position)
        try:
            urls = self.images.urls(prompt.images) if self.images else ()
            opening = opening_of(self.found, prompt, self.answer_column, seed, urls)
        except ValueError as error:
            self._fail(episode, str(error))
            return
        episode.conversation = state = episode.conversation or ConversationState()
        state.open(opening, prompt.more)
        self.episodes[place] = episode
        self.pool.open(place, opening, state.turns, state.env_state)

    def answer(self, plan: RolloutPlan, group: PromptGroup, episode: Episode, finish: str) -> None:
        """Implements `Environment.answer`."""
        state: ConversationState = episode.conversation
        made, ended = self._response(episode)
        state.room = plan.room(episode)
        self.counts["turns"] += 1
        state.responses += 1
        if state.failure:
            self._fail(episode, state.failure)
            return
        if state.finish:
            # The environment answered this turn before the episode was cut short, so only the final reward is missing.
            self._begin(state, lambda: self._score(episode, state.finish))
            return
        # A complete turn is sent even if the token budget is used up, because the environment may end the episode after
        # this turn.
        whole = finish == "stop" or (self.turn_tokens and len(made) >= self.turn_tokens)
        if not whole:
            self._begin(state, lambda: self._score(episode, "length"))
            return
        turn = parse_turn(self.renderer.text_of(made, ended), self.format, state.tools)

        def say() -> None:
            state.request = "say"
            state.turns.append(turn)
            self.pool.say(place_of(episode), turn)

        self._begin(state, say)

    def poll(self, wait: float = 0.0) -> list[tuple[Place, Observation]]:
        """Implements `Environment.poll`."""
        until = time.monotonic() + wait
        while True:
            left = 0.0 if self.ready else max(0.0, until - time.monotonic())
            for place, reply in self.pool.poll(left):
                self._take(self.episodes[place], reply)
            if self.ready or not left or not self.pool.pending:
                break
        # Sort the observations, so that the order of replies that arrive together does not depend on timing.
        ready, self.ready = sorted(self.ready, key=lambda entry: entry[0]), []
        return ready

    def leave(self, episodes: list[Episode], keep: bool) -> None:
        """Implements `Environment.leave`."""
        for episode in episodes:
            place, state = place_of(episode), episode.conversation
            if self.episodes.pop(place, None) is None:
                continue
            if keep and state.request == "open" and not state.reopening:
                # The episode has no tokens, so a later step opens it from the beginning.
                episode.conversation = None
            elif keep:
                # The pending answer is dropped. The turn is sent and counted again when the episode resumes.
                again = state.request in ("say", "score") or state.next_request is not None
                self.counts["turns"] -= again
                state.responses -= again
                if state.request == "say":
                    state.turns.pop()
                state.cut(self.pool.state(place), bool(self.found.max_seconds))
            self.pool.close(place)

    def take_counts(self) -> dict[str, float]:
        """Implements `Environment.take_counts`."""
        counts, self.counts = self.counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def close(self) -> None:
        """Stop the workers."""
        self.pool.shutdown()

    # ── requests and replies ─────────────────────────────────────────────────

    def _response(self, episode: Episode) -> tuple[list[int], bool]:
        """Return the tokens of the episode's last response, and True if its last token is an end-of-turn token."""
        made = episode.response
        return made, bool(made) and made[-1] in self.ends

    def _begin(self, state: ConversationState, request: Callable[[], None]) -> None:
        """Send a request, or defer it until the pending request is answered."""
        if state.request:
            state.next_request = request
        else:
            request()

    def _take(self, episode: Episode, reply: Reply) -> None:
        state: ConversationState = episode.conversation
        request, state.request = state.request, ""
        for name in ("calls", "failed_calls", "malformed", "timeouts", "cut", "seconds"):
            self.counts[name] += reply.counts.get(name, 0.0)
        state.calls += reply.counts.get("calls", 0.0)
        again = request == "open" and state.reopening
        reply, held = read_reply(reply, self.images, state.name)
        failure = reply.failure or (state.difference(reply) if again else "")
        if failure and again and not state.next_request:
            # The engine is still sampling a response for this episode, so end the episode after that response.
            state.failure = failure
        elif failure:
            state.next_request = None
            self._fail(episode, failure)
        elif again:
            state.tools, state.reopening = reply.tools, False
        elif request == "open":
            self._opened(episode, state, reply, held)
        elif request == "say":
            self._answered(episode, state, reply, held)
        else:
            state.total += reply.reward or 0.0
            reward = self.weight * state.reward
            seen = Observation(over=state.finish, reward=reward, given=state.total, parts=reply.parts)
            if math.isfinite(state.total):
                self._over(episode, seen)
            else:
                self._unbounded(episode, state)
        if state.next_request and not state.request:
            begin, state.next_request = state.next_request, None
            begin()

    def _expanded(
        self, episode: Episode, tokens: list[int], messages: list[dict], held: dict[str, Payload]
    ) -> tuple[list[int], Shown]:
        """Return the tokens of messages with expanded placeholders, and the images that they show."""
        if self.images is None:
            return tokens, ()
        known = {image.name: image for s in episode.segments for _, image in s.images} | held
        return expanded(self.images, tokens, [known[name] for name in names_in(messages)])

    def _opened(self, episode: Episode, state: ConversationState, reply: Reply, held: dict[str, Payload]) -> None:
        state.tools = reply.tools
        if why := unfit(self.found, self.renderer, self.format, state.tools):
            self._fail(episode, f"{state.name}: {why}")
            return
        state.messages, state.first_state = list(reply.messages), reply.state_key
        size = size_of(state.messages)
        if size > CHARACTERS * self.longest_prompt:
            self._too_long(episode, f"{size} characters")
            return
        try:
            tokens = state.prompt(self.renderer, self.hidden)
            tokens, images = self._expanded(episode, tokens, state.messages, held)
        except ValueError as error:
            self._fail(episode, f"{state.name}: {error}")
            return
        if len(tokens) > self.longest_prompt:
            self._too_long(episode, f"{len(tokens)} tokens")
            return
        self.ready.append((place_of(episode), Observation(tokens, images=images)))

    def _answered(self, episode: Episode, state: ConversationState, reply: Reply, held: dict[str, Payload]) -> None:
        """Process the answer to a turn: continue the episode or end it."""
        state.reward = reply.reward or 0.0
        state.total += state.reward
        before = state.add_answer(reply)
        if not math.isfinite(state.total):
            self._unbounded(episode, state)
            return
        if reply.done or not reply.messages:
            self._score(episode, "stop")
            return
        if len(state.turns) >= self.found.max_turns:
            self._score(episode, "turns")
            return
        if self.found.max_seconds and time.monotonic() - state.began > self.found.max_seconds:
            self._score(episode, "time")
            return
        if size_of(reply.messages) > CHARACTERS * (len(episode) + state.room):
            self._score(episode, "length")
            return
        try:
            tokens, anew = state.next_tokens(self.renderer, self.hidden, before, reply, *self._response(episode))
            tokens, images = self._expanded(episode, tokens, state.messages if anew else reply.messages, held)
        except ValueError as error:
            self._fail(episode, f"{state.name}: {error}")
            return
        # At least the last token of a branch counts as new, even if the earlier path already contains the whole branch.
        shared = 0
        if anew:
            both = episode.along(Segment.distinct), prompt_segment(tokens, images).distinct()
            shared = min(shared_length(*both), len(tokens) - 1)
        if state.room <= len(tokens) - shared:
            self._score(episode, "length")
            return
        self.counts["forks"] += anew
        number, reward = state.state_number(reply.state_key), self.weight * state.reward
        seen = Observation(tokens, state=number, anew=anew, reward=reward, images=images)
        self.ready.append((place_of(episode), seen))
        state.reward = 0.0

    def _score(self, episode: Episode, finish: str) -> None:
        episode.conversation.request, episode.conversation.finish = "score", finish
        self.pool.score(place_of(episode))

    def _fail(self, episode: Episode, why: str) -> None:
        self.counts["failures"] += 1
        self._over(episode, Observation(over="abort", failure=why))

    def _unbounded(self, episode: Episode, state: ConversationState) -> None:
        self._fail(episode, f"{state.name}: its rewards add up to {state.total}, which is not finite")

    def _too_long(self, episode: Episode, size: str) -> None:
        self._fail(
            episode,
            f"its prompt is too long: the first messages of {episode.conversation.name} have {size}; raise "
            f"--rollout.max-prompt-tokens above {self.longest_prompt}",
        )

    def _over(self, episode: Episode, seen: Observation) -> None:
        place, state = place_of(episode), episode.conversation
        if self.episodes.pop(place, None) is not None:
            self.pool.close(place)
            if not seen.failure:
                self.counts["episodes"] += 1
                self.counts["whole_turns"] += state.responses
                self.counts["whole_calls"] += state.calls
        self.ready.append((place, seen))
