"""Tool calls: the form in which a policy writes them, whether it can use an environment's tools, and the calls in the
turns of an episode, for samples.jsonl.

`CallReader` does not know the tools' schemas. In forms that write arguments as plain text (`qwen3_coder`, `glm`) it
therefore returns arguments that are not JSON as text.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spmdrl.config.environment import EnvironmentConfig, read_environment
from spmdrl.config.schema import Config
from spmdrl.config.template import template_kwargs
from spmdrl.data.chat import template_text
from spmdrl.data.conversation import Conversation
from spmdrl.data.episode import Episode
from spmdrl.data.template_ends import job_template
from spmdrl.engines.build import stop_tokens
from spmdrl.env.calls import FORMATS, Call, format_of, parse
from spmdrl.hub.resolve import resolve

Calls = list[dict[str, Any]]
"""Calls of a turn: each with `name` and `arguments`, or with `error` in the place of the latter."""


@dataclass(frozen=True)
class CallReader:
    """Reads the calls of turns."""

    conversation: Conversation
    format: str
    """A name of `env.calls.FORMATS`."""
    ends: Collection[int]
    """Tokens that end a turn."""
    turn_tokens: int
    """Most tokens of a turn, after which its environment receives it as it is; 0: no limit."""

    def of(self, episode: Episode) -> dict[int, Calls]:
        """Return the calls of each turn that has any, by the index of the last sampled segment of the turn."""
        places: dict[int, list[int]] = {}
        for i, s in enumerate(episode.segments):
            if s.sampled:
                places.setdefault(s.turn, []).append(i)
        out = {}
        for turn, indices in places.items():
            made = [token for i in indices for token in episode.segments[i].tokens.tolist()]
            ended = bool(made) and made[-1] in self.ends
            whole = ended or (self.turn_tokens and len(made) >= self.turn_tokens)
            # The environment did not receive a turn that was cut by the limit of the episode.
            if turn < episode.turns - 1 or episode.finish != "length" or whole:
                calls = parse(self.conversation.text_of(made, ended), self.format)[1]
                if calls:
                    out[indices[-1]] = [_row(call) for call in calls]
        return out


def _row(call: Call) -> dict[str, Any]:
    return {"name": call.name} | ({"error": call.error} if call.arguments is None else {"arguments": call.arguments})


def call_reader(cfg: Config, tokenizer: Any) -> CallReader | None:
    """Return the reader for the episodes of a run; None without an environment. Raises ValueError as `form_of`."""
    if not cfg.env:
        return None
    found, conversation = conversation_of(cfg, tokenizer)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    ends = stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
    return CallReader(conversation, form_of(found, conversation), ends, found.turn_tokens)


def conversation_of(cfg: Config, tokenizer: Any) -> tuple[EnvironmentConfig, Conversation]:
    """Return the settings of a run's environment, and the renderer of its conversations. Raises ValueError."""
    found = read_environment(cfg.env)
    template, more = template_text(cfg.data.chat_template), template_kwargs(cfg.data)
    return found, Conversation(tokenizer, template, found.history, more)


def form_of(found: EnvironmentConfig, conversation: Conversation) -> str:
    """Return the form of calls that the user named or that the chat template shows; `none` if it shows none.

    Raises:
        ValueError: the form is unknown.
    """
    form = format_of(conversation.render.template) if found.calls == "auto" else found.calls
    if form not in FORMATS:
        raise ValueError(f"calls {form!r} (--env): take auto or one of {', '.join(FORMATS)}")
    return form


def unfit(found: EnvironmentConfig, conversation: Conversation, form: str, tools: Collection) -> str:
    """Return why the policy cannot use an environment's tools; empty if it can.

    form: as returned by `form_of`. If the user named the form, the template need not show the tools: the policy then
    knows them from elsewhere.
    """
    if not tools or found.calls != "auto":
        return ""
    if not conversation.render.shows_tools:
        return conversation.no_tools
    if form == "none":
        return (
            f"{conversation.name} shows no form of calls that is read here: name it by `calls` in the YAML file of "
            f"--env, one of {', '.join(FORMATS)}"
        )
    return ""
