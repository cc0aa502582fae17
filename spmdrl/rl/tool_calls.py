"""Tool calls: the format in which the policy writes them, a check that the chat template shows tools and format, and a
reader of the calls in an episode's turns.

`CallReader` reads calls for samples.jsonl without the tools' schemas. In formats that write arguments as plain text
(`qwen3_coder`, `glm`) it therefore returns arguments that are not JSON as text.
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
"""Calls of a turn, each with `name` and `arguments`, or with `name` and `error` if the arguments cannot be parsed."""


@dataclass(frozen=True)
class CallReader:
    """Reads the tool calls in the turns of an episode."""

    conversation: Conversation
    format: str
    """Format in which the policy writes calls, one of the names in `env.calls.FORMATS`."""
    ends: Collection[int]
    """Tokens that end a turn."""
    turn_tokens: int
    """Maximum number of tokens of a turn, at which the turn is sent to the environment unfinished; 0: no limit."""

    def of(self, episode: Episode) -> dict[int, Calls]:
        """Return the calls of each turn that has calls, by the index of the last sampled segment of the turn."""
        places: dict[int, list[int]] = {}
        for i, s in enumerate(episode.segments):
            if s.sampled:
                places.setdefault(s.turn, []).append(i)
        out = {}
        for turn, indices in places.items():
            made = [token for i in indices for token in episode.segments[i].tokens.tolist()]
            ended = bool(made) and made[-1] in self.ends
            whole = ended or (self.turn_tokens and len(made) >= self.turn_tokens)
            # The environment did not receive a turn that was cut off by the limit of the episode.
            if turn < episode.turns - 1 or episode.finish != "length" or whole:
                calls = parse(self.conversation.text_of(made, ended), self.format)[1]
                if calls:
                    out[indices[-1]] = [_row(call) for call in calls]
        return out


def _row(call: Call) -> dict[str, Any]:
    return {"name": call.name} | ({"error": call.error} if call.arguments is None else {"arguments": call.arguments})


def call_reader(cfg: Config, tokenizer: Any) -> CallReader | None:
    """Return the reader of calls in a run's episodes; None without an environment. Raises the errors of `form_of`."""
    if not cfg.env:
        return None
    found, conversation = conversation_of(cfg, tokenizer)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    ends = stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
    return CallReader(conversation, form_of(found, conversation), ends, found.turn_tokens)


def conversation_of(cfg: Config, tokenizer: Any) -> tuple[EnvironmentConfig, Conversation]:
    """Return the settings of a run's environment, and the renderer of its conversations.

    Raises:
        ValueError: a setting of the environment or the chat template is invalid.
    """
    found = read_environment(cfg.env)
    template, more = template_text(cfg.data.chat_template), template_kwargs(cfg.data)
    return found, Conversation(tokenizer, template, found.history, more)


def form_of(found: EnvironmentConfig, conversation: Conversation) -> str:
    """Return the format of calls that the user named, or else the chat template's; `none` if the template has none.

    Raises:
        ValueError: the format is unknown.
    """
    form = format_of(conversation.render.template) if found.calls == "auto" else found.calls
    if form not in FORMATS:
        raise ValueError(f"calls {form!r} (--env): take auto or one of {', '.join(FORMATS)}")
    return form


def unfit(found: EnvironmentConfig, conversation: Conversation, form: str, tools: Collection) -> str:
    """Return the reason for which the policy cannot use an environment's tools; empty if it can.

    If the user named the format, the template need not show the tools, because the policy may have learnt to call them.

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
