"""Determines the policy's tool-call format, checks that the chat template supports tools, and parses an episode's tool
calls.

`CallReader` reads calls for samples.jsonl without the tools' schemas. Some formats write arguments as plain text
(`qwen3_coder`, `glm`). For these formats, arguments that are not JSON are returned as text.
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
"""Tool calls of a turn, each with `name` and `arguments`, or `name` and `error` if the arguments cannot be parsed."""


@dataclass(frozen=True)
class CallReader:
    """Parses the tool calls in the turns of an episode."""

    conversation: Conversation
    format: str
    """Tool-call format of the policy, one of the names in `env.calls.FORMATS`."""
    ends: Collection[int]
    """Tokens that end a turn."""
    turn_tokens: int
    """Maximum tokens per turn, or 0 for no limit. A turn that reaches the limit is sent to the environment
    unfinished."""

    def of(self, episode: Episode) -> dict[int, Calls]:
        """Return the tool calls of all turns that have calls, by the index of the turn's last sampled segment."""
        places: dict[int, list[int]] = {}
        for i, s in enumerate(episode.segments):
            if s.sampled:
                places.setdefault(s.turn, []).append(i)
        out = {}
        for turn, indices in places.items():
            made = [token for i in indices for token in episode.segments[i].tokens.tolist()]
            ended = bool(made) and made[-1] in self.ends
            whole = ended or (self.turn_tokens and len(made) >= self.turn_tokens)
            # A turn that was cut off by the episode's token limit was never sent to the environment.
            if turn < episode.turns - 1 or episode.finish != "length" or whole:
                calls = parse(self.conversation.text_of(made, ended), self.format)[1]
                if calls:
                    out[indices[-1]] = [_row(call) for call in calls]
        return out


def _row(call: Call) -> dict[str, Any]:
    return {"name": call.name} | ({"error": call.error} if call.arguments is None else {"arguments": call.arguments})


def call_reader(cfg: Config, tokenizer: Any) -> CallReader | None:
    """Return a run's tool-call reader, or None without an environment. Raises the errors of `form_of`."""
    if not cfg.env:
        return None
    found, conversation = conversation_of(cfg, tokenizer)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    ends = stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
    return CallReader(conversation, form_of(found, conversation), ends, found.turn_tokens)


def conversation_of(cfg: Config, tokenizer: Any) -> tuple[EnvironmentConfig, Conversation]:
    """Return the environment settings of a run, and the renderer for its conversations.

    Raises:
        ValueError: a setting of the environment or the chat template is invalid.
    """
    found = read_environment(cfg.env)
    template, more = template_text(cfg.data.chat_template), template_kwargs(cfg.data)
    return found, Conversation(tokenizer, template, found.history, more)


def form_of(found: EnvironmentConfig, conversation: Conversation) -> str:
    """Return the tool-call format that the user set, or the chat template's format if it is `auto`.

    Returns `none` if the template has no tool-call format.

    Raises:
        ValueError: the format is unknown.
    """
    form = format_of(conversation.render.template) if found.calls == "auto" else found.calls
    if form not in FORMATS:
        raise ValueError(f"calls {form!r} (--env): take auto or one of {', '.join(FORMATS)}")
    return form


def unfit(found: EnvironmentConfig, conversation: Conversation, form: str, tools: Collection) -> str:
    """Return the reason why the policy cannot use an environment's tools; empty if it can.

    If the user set the format, the template need not render the tools, because the policy may have learned to call
    them.

    form: as returned by `form_of`.
    """
    if not tools or found.calls != "auto":
        return ""
    if not conversation.render.shows_tools:
        return conversation.no_tools
    if form == "none":
        return (
            f"{conversation.name} shows no known format of calls: name it by `calls` in the YAML file of --env, one of "
            f"{', '.join(FORMATS)}"
        )
    return ""
