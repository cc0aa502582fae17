"""A conversation of the policy with an environment, and what is needed to begin it or to take it up again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from spmdrl.config.environment import COLUMN, ROWS, EnvironmentConfig
from spmdrl.data.conversation import Conversation
from spmdrl.data.prompts import Prompt
from spmdrl.data.segment import STATES
from spmdrl.env.base import Call, Opening, Reply, Said
from spmdrl.env.opening import OPENING

KEYS = ("name", "settings")
"""Keys of a row's environment that is an object."""


@dataclass
class Talk:
    """A conversation under way."""

    opening: Opening
    begun: float
    """Time at which the episode began (time.monotonic()), as if it had never been cut short."""
    more: dict = field(default_factory=dict)
    """Variables of the chat template that its row gives."""
    messages: list[dict] = field(default_factory=list)
    """All messages up to the last observation, from the last ones on that took the place of all before."""
    tools: list[dict] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    """The policy's turns, in order."""
    asked: str = "open"
    """The request under way: `open`, `say`, `score`, or empty."""
    heard: tuple[list[int], bool] = ((), False)  # type: ignore[assignment]
    """Tokens of the turn that is being answered, and whether its last one ended it."""
    path: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [L]: all tokens up to the end of that turn."""
    waits: Callable[[], None] | None = None
    """Request that begins when the one under way is answered."""
    finish: str = ""
    """Reason of the end, while the final reward is asked for."""
    room: int = 0
    """Tokens that the episode may still take."""
    reward: float = 0.0
    """Of the turn that is being answered."""
    given: float = 0.0
    """All rewards so far."""
    turns: int = 0
    """Responses so far."""
    calls: float = 0.0
    """Calls of tools so far."""
    first: str = ""
    """Digest of the state in which the episode began, as the environment names it; empty where it does not."""
    resumed: bool = False
    """It was taken up again, and its environment is not open yet."""
    replayed: bool = False
    """It was taken up again without a state: its turns are run again."""
    failure: str = ""
    """Reason for which its environment could not be opened again."""

    def kept(self, state: object, seconds: float) -> dict:
        """Returns what a later step or another process needs to go on, as JSON values.

        state: of the environment. seconds: of the episode so far, which count towards its limit.
        """
        return {
            "messages": self.messages,
            "tools": self.tools,
            "said": [asdict(said) for said in self.said],
            "given": self.given,
            "reward": self.reward,
            "finish": self.finish,
            "turns": self.turns,
            "calls": self.calls,
            "first": self.first,
            "state": state,
            "seconds": seconds,
        }

    def resume(self, kept: dict) -> None:
        """Takes up what `kept` returned, but for the environment's state."""
        self.resumed, self.messages, self.tools = True, list(kept["messages"]), kept["tools"]
        self.said = [Said(**each | {"calls": [Call(**call) for call in each["calls"]]}) for each in kept["said"]]
        self.given, self.reward, self.finish = kept["given"], kept["reward"], kept["finish"]
        self.turns, self.calls, self.first = kept["turns"], kept["calls"], kept["first"]
        self.replayed = kept["state"] is None
        self.begun -= kept["seconds"]

    def take(self, reply: Reply) -> list[dict]:
        """Adds the last turn and the answer to it to the messages, or replaces them; returns those before."""
        before = self.messages
        self.messages = list(reply.messages) if reply.anew else [*before, self.said[-1].message, *reply.messages]
        return before

    def prompt(self, conversation: Conversation, hidden: bool) -> list[int]:
        """Returns the tokens of all messages. hidden: as in `Conversation.begin`. Raises ValueError."""
        return conversation.begin(self.messages, self.tools or None, hidden)

    def follows(
        self, conversation: Conversation, hidden: bool, before: list[dict], reply: Reply
    ) -> tuple[list[int], bool]:
        """Returns the tokens that the policy goes on after, and whether they are all of its context.

        before: messages before the last turn. reply: the answer to that, which `take` took.

        Raises:
            ValueError: the template does not go on so.
        """
        if reply.anew:
            return self.prompt(conversation, hidden), True
        made, ended = self.heard
        seen = conversation.next(before, self.said[-1].message, self.tools or None, made, ended, reply.messages)
        if seen.fork is None and not seen.tokens:
            raise ValueError(f"{conversation.name} writes nothing for the answer to a turn")
        return (seen.tokens, False) if seen.fork is None else (seen.fork, True)

    def state_of(self, key: str) -> int | None:
        """Returns the number of a state, which for the one in which the episode began is that of the prompt.

        key: digest of the state. None: the environment does not name it.
        """
        if not key:
            return None
        return 0 if key == self.first else 1 + int(key, 16) % (STATES - 1)

    def differs(self, reply: Reply) -> str:
        """Returns what is wrong where turns that were run again had other answers; empty where they had not.

        reply: to the request that opened the environment again.
        """
        again = list(reply.messages)
        for i, (said, answer) in enumerate(zip(self.said, reply.replayed, strict=False)):
            again = [*([] if i in reply.replayed_anew else [*again, said.message]), *answer]
        if not self.replayed or again == self.messages:
            return ""
        return (
            f"{self.opening.name}: it gave other messages when its turns were run again after a cut; one that depends "
            "on more than row and seed needs state() and restore(state)"
        )


def opening_of(found: EnvironmentConfig, prompt: Prompt, answer_column: str, seed: int) -> Opening:
    """Returns the environment of a prompt, with its row.

    answer_column: name under which an environment finds the truth of its row, beside `ground_truth`.

    Raises:
        ValueError: rows name their environments, and this one does not, or has a key that means nothing.
    """
    row = prompt.extra | {"extra_info": prompt.extra, "data_source": prompt.data_source}
    row |= {"prompt": prompt.asked, answer_column: prompt.ground_truth, "ground_truth": prompt.ground_truth}
    if prompt.opening is not None:
        row[OPENING] = prompt.opening
    name, settings = found.environment, found.settings
    if name == ROWS:
        named = prompt.extra.get(COLUMN)
        # A table gives every row the keys of all, with None in them.
        if isinstance(named, dict) and (odd := [k for k, v in named.items() if k not in KEYS and v is not None]):
            raise ValueError(
                f"row {prompt.index}: the environment in its column {COLUMN!r} has the key {odd[0]!r}, and takes only "
                f"{' and '.join(KEYS)}"
            )
        name, settings = _named(named) if isinstance(named, dict) else (named, {})
        if not isinstance(name, str) or not name or not isinstance(settings, dict):
            raise ValueError(
                f"row {prompt.index} has no environment in the column {COLUMN!r}, as --env rows wants it: a name, or "
                'an object {"name": ..., "settings": {...}}'
            )
    return Opening(name, row, seed, settings)


def _named(named: dict) -> tuple[object, object]:
    return named.get("name"), named.get("settings") or {}


def size_of(messages: list[dict]) -> int:
    """Returns the number of characters in the texts of messages."""
    return sum(len(message["content"]) for message in messages)
