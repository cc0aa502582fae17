"""The form in which a policy writes calls of tools, and whether it can use the tools of an environment at all."""

from collections.abc import Collection

from spmdrl.config.environment import EnvironmentConfig
from spmdrl.data.conversation import Conversation
from spmdrl.env.calls import FORMATS, format_of


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
