"""State of an episode's conversation with an environment, which a later step or another process can resume."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spmdrl.config.environment import COLUMN, ROWS, EnvironmentConfig
from spmdrl.data.conversation import Conversation
from spmdrl.data.prompts import Prompt
from spmdrl.data.segment import STATES
from spmdrl.env.base import AssistantTurn, Call, Opening, Reply
from spmdrl.env.messages import OPENING
from spmdrl.env.pictures import parts_in, with_images
from spmdrl.rl.shown_images import bare

KEYS = ("name", "settings")
"""Keys that an object in a row's environment column may have: the environment's name and its settings."""
SAVED = {
    **{"messages": "messages", "tools": "tools", "said": "turns", "given": "total", "reward": "reward"},
    **{"finish": "finish", "turns": "responses", "calls": "calls", "first": "first_state", "state": "env_state"},
    "seconds": "seconds",
}
"""Maps a key in a checkpoint to a field of `ConversationState`."""


@dataclass
class ConversationState:
    """Conversation state of an episode. The tokens are stored separately, in the `Episode`.

    Only `rl/agents.py` changes this state, on the first rank of an engine. A checkpoint contains the fields in SAVED.
    """

    messages: list[dict] = field(default_factory=list)
    """Messages up to the last observation. An answer that rewrites the history replaces all messages. Images are named
    (`shown_images.py`)."""
    tools: list[dict] = field(default_factory=list)
    turns: list[AssistantTurn] = field(default_factory=list)
    """The policy's turns that the environment received, in order."""
    total: float = 0.0
    """Sum of the rewards so far."""
    reward: float = 0.0
    """Reward for the turn that the environment is answering."""
    finish: str = ""
    """Reason why the conversation ends; empty until the final reward is requested."""
    responses: int = 0
    """Number of responses so far, including responses that were cut off."""
    calls: float = 0.0
    """Number of tool calls so far."""
    first_state: str = ""
    """Digest of the initial state if the environment names states, otherwise empty."""
    env_state: Any = None
    """JSON value that the environment needs to resume an episode that was cut short, or None if the environment replays
    the turns instead."""
    seconds: float = 0.0
    """Elapsed seconds when the episode was cut short, or 0 if episodes have no time limit."""

    opening: Opening | None = None
    """The environment that is open or being opened, or None between rollouts."""
    variables: dict = field(default_factory=dict)
    """Variables for the chat template, from the row."""
    began: float = 0.0
    """Start time (time.monotonic()), adjusted as if the episode had never been cut short."""
    request: str = ""
    """The pending request to the environment: `open`, `say`, `score`, or empty."""
    next_request: Callable[[], None] | None = None
    """Function that sends the next request once the pending request is answered, or None if there is no next
    request."""
    reopening: bool = False
    """True if the conversation is being resumed and its environment is not open yet."""
    failure: str = ""
    """Reason why the environment could not be reopened; empty if there was no failure."""
    room: int = 0
    """Maximum number of tokens that may still be added to the episode."""

    def open(self, opening: Opening, variables: dict) -> None:
        """Start the conversation, or resume it after it was cut short."""
        self.opening, self.variables, self.request = opening, variables, "open"
        self.began = time.monotonic() - self.seconds

    def cut(self, env_state: object, timed: bool) -> None:
        """Stop the conversation at the end of a rollout; a later rollout continues it.

        timed: True if episodes have a time limit.
        """
        self.env_state, self.opening, self.request, self.next_request = env_state, None, "", None
        self.reopening, self.failure = True, ""
        # The elapsed time is saved only if it is needed, so that checkpoints otherwise do not depend on a clock.
        self.seconds = time.monotonic() - self.began if timed else 0.0

    def copy(self) -> "ConversationState":
        """Return a copy that can continue without changing this state.

        Only a conversation that was cut short can be copied.
        """
        return replace(self, turns=list(self.turns))

    def saved(self) -> dict:
        """Return the fields that another process needs to resume the conversation, as JSON values."""
        values = {key: getattr(self, name) for key, name in SAVED.items()}
        return values | {"said": [asdict(turn) for turn in self.turns]}

    @staticmethod
    def restored(saved: dict) -> "ConversationState":
        """Rebuild a conversation from the values that `saved` returned.

        The conversation's environment has to be reopened.
        """
        calls = [[Call(**call) for call in turn["calls"]] for turn in saved["said"]]
        turns = [AssistantTurn(**turn | {"calls": made}) for turn, made in zip(saved["said"], calls, strict=True)]
        values: dict[str, Any] = {name: saved[key] for key, name in SAVED.items()}
        values["turns"] = turns
        return ConversationState(**values, reopening=True)

    def add_answer(self, reply: Reply) -> list[dict]:
        """Append the last turn and its answer to the messages, and return the previous messages.

        If the answer rewrites the history, it replaces all messages instead.
        """
        before = self.messages
        self.messages = list(reply.messages) if reply.anew else [*before, self.turns[-1].message, *reply.messages]
        return before

    def prompt(self, renderer: Conversation, hidden: bool) -> list[int]:
        """Return the unexpanded tokens of all messages, as `Conversation.begin` does.

        hidden: True if the template may omit the tools.
        """
        return renderer.of(self.variables).begin(bare(self.messages), self.tools or None, hidden)

    def next_tokens(
        self, renderer: Conversation, hidden: bool, before: list[dict], reply: Reply, made: list[int], ended: bool
    ) -> tuple[list[int], bool]:
        """Return the unexpanded tokens that the policy continues from, and True if they are its complete context.

        before: messages before the last turn. reply: answer to the last turn, already added by `add_answer`. made:
        tokens of the turn. ended: True if the turn's last token is an end-of-turn token.

        Raises:
            ValueError: the template renders nothing for the answer, or cannot continue with it.
        """
        if reply.anew:
            return self.prompt(renderer, hidden), True
        renderer = renderer.of(self.variables)
        turn, new = self.turns[-1].message, bare(reply.messages)
        seen = renderer.next(bare(before), turn, self.tools or None, made, ended, new)
        if seen.fork is None and not seen.tokens:
            raise ValueError(f"{renderer.name} renders no text for the answer to a turn")
        return (seen.tokens, False) if seen.fork is None else (seen.fork, True)

    def state_number(self, key: str) -> int | None:
        """Return the number assigned to a state.

        The initial state has number 0, like the state of the prompt.

        key: digest of the state. Returns None if the environment does not name states.
        """
        if not key:
            return None
        return 0 if key == self.first_state else 1 + int(key, 16) % (STATES - 1)

    def difference(self, reply: Reply) -> str:
        """Return an error message if replayed turns got different answers, otherwise an empty string.

        reply: the answer to the request that reopened the environment.
        """
        again = list(reply.messages)
        for i, (turn, answer) in enumerate(zip(self.turns, reply.replayed, strict=False)):
            again = [*([] if i in reply.replayed_anew else [*again, turn.message]), *answer]
        if self.env_state is not None or again == self.messages:
            return ""
        return (
            f"{self.name}: it gave other messages when its turns were run again after a cut; an environment that "
            "depends on more than row and seed needs state() and restore(state)"
        )

    @property
    def name(self) -> str:
        """Name of the environment, or an empty string if no environment is open."""
        return self.opening.name if self.opening else ""


def opening_of(
    found: EnvironmentConfig, prompt: Prompt, answer_column: str, seed: int, images: Sequence[str] = ()
) -> Opening:
    """Return the `Opening` for a prompt's environment: its name, settings, row and seed.

    answer_column: another key, besides `ground_truth`, for the ground truth in the row. images: the prompt's images as
    data URLs, which stand in their places in the prompt and, in the same order, in the row's column `images`.

    Raises:
        ValueError: each row must name its environment, and this row names none or has an unknown key.
    """
    row = prompt.extra | {"extra_info": prompt.extra, "data_source": prompt.data_source}
    row |= {"prompt": prompt.content, answer_column: prompt.ground_truth, "ground_truth": prompt.ground_truth}
    if prompt.opening is not None:
        row[OPENING] = prompt.opening
    if images:
        row["images"] = list(images)
        assert isinstance(prompt.content, list)
        whole = with_images(prompt.opening or prompt.content, [{"image": url} for url in images])
        row["prompt"] = whole[-len(prompt.content) :]
        if prompt.opening is not None:
            row[OPENING] = whole
    name, settings = found.environment, found.settings
    if name == ROWS:
        named = prompt.extra.get(COLUMN)
        # Table formats such as Parquet give every row the union of all keys, with None for missing values.
        if isinstance(named, dict) and (odd := [k for k, v in named.items() if k not in KEYS and v is not None]):
            raise ValueError(
                f"row {prompt.index}: the environment in its column {COLUMN!r} has the unknown key {odd[0]!r}; it may "
                f"have {' and '.join(KEYS)}"
            )
        name, settings = (named.get("name"), named.get("settings") or {}) if isinstance(named, dict) else (named, {})
        if not isinstance(name, str) or not name or not isinstance(settings, dict):
            raise ValueError(
                f"row {prompt.index} has no environment in the column {COLUMN!r}, as --env rows requires: a name, or "
                'an object {"name": ..., "settings": {...}}'
            )
    return Opening(name, row, seed, settings)


def size_of(messages: list[dict]) -> int:
    """Return the total number of characters in the messages' text; images do not count."""
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    return sum(map(len, texts)) + sum(len(part["text"]) for part in parts_in(messages) if part["type"] == "text")
