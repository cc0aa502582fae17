"""Calls of tools: the form in which a policy writes them, whether it can use an environment's tools at all, and the
calls that stand in the turns of an episode, for samples.jsonl.

`CallReader` has no schemas of the tools. Forms that write arguments as plain text (`qwen3_coder`, `glm`) therefore give
those that are no JSON as text.
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
    """Most tokens of a turn, after which its environment hears it as it is; 0: no such limit."""

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
            # A turn that the limit of the episode cut was not shown to the environment.
            if turn < episode.turns - 1 or episode.finish != "length" or whole:
                calls = parse(self.conversation.text_of(made, ended), self.format)[1]
                if calls:
                    out[indices[-1]] = [_row(call) for call in calls]
        return out


def _row(call: Call) -> dict[str, Any]:
    return {"name": call.name} | ({"error": call.error} if call.arguments is None else {"arguments": call.arguments})


def call_reader(cfg: Config, tokenizer: Any) -> CallReader | None:
    """Return the reader for the episodes of a run; None where it has no environment.

    Raises:
        ValueError: nobody can tell how the model writes calls.
    """
    if not cfg.env:
        return None
    found = read_environment(cfg.env)
    template, more = template_text(cfg.data.chat_template), template_kwargs(cfg.data)
    conversation = Conversation(tokenizer, template, found.history, more)
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    ends = stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
    return CallReader(conversation, form_of(found, conversation), ends, found.turn_tokens)


def form_of(found: EnvironmentConfig, conversation: Conversation) -> str:
    """Returns the form that the user named or that the chat template shows; `none` where it shows none.

    Raises:
        ValueError: there is no such form, or the template shows one that no reader reads.
    """
    form = format_of(conversation.render.template) if found.calls == "auto" else found.calls
    if form not in FORMATS:
        raise ValueError(f"calls {form!r} (--env): take auto or one of {', '.join(FORMATS)}")
    return form


def unfit(found: EnvironmentConfig, conversation: Conversation, form: str, tools: Collection) -> str:
    """Returns the reason for which the policy cannot use an environment's tools; empty where it can.

    form: as `form_of` returned it. A template may show no tools where the user named the form: the policy then knows
    them from elsewhere.
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
