"""The chat template of a job on given rows: one that its tokenizer lacks, and what is said of it at the start."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from spmdrl.config.supervised import SupervisedConfig
from spmdrl.data.mixture import Mixture
from spmdrl.data.template_ends import end_of_turn_tokens, job_template
from spmdrl.session.session import Session
from spmdrl.supervised.preview import ROWS

C = TypeVar("C", bound=SupervisedConfig)


def with_template(cfg: C, begin: Callable[[C], Any], mixture: Mixture) -> C:
    """Return the settings with ChatML as the chat template, where the tokenizer has none and the first rows want one.

    So that the template is recorded with the run and saved with the model. begin: as of `Job`. mixture: it is
    drawn from.

    Raises:
        ValueError: the model's tokenizer cannot be read, or ChatML would render pairs of plain text, too.
    """
    if cfg.data.chat_template or cfg.data.chat == "off":
        return cfg
    begun = begin(cfg)
    if getattr(begun.tokenizer, "chat_template", None):
        return cfg
    given = replace(cfg, data=replace(cfg.data, chat_template="chatml"))
    rendered, as_chat = begin(given).encode, begin(replace(cfg, data=replace(cfg.data, chat="on"))).encode
    drawn = mixture.draw(min(ROWS, mixture.rows or ROWS))
    wants = next((each for each in drawn if not _takes(begun.encode, each) and _takes(rendered, each)), None)
    if wants is None:
        return cfg
    # Without a template, --data.chat on refuses what a template would render.
    if pair := next((each for each in drawn if _takes(begun.encode, each) and not _takes(as_chat, each)), None):
        raise ValueError(
            f"{wants.where} needs a chat template, which the tokenizer lacks, and {pair.where} is a plain pair, which "
            "a template would render as a dialogue: choose one for all rows with --data.chat-template (for example "
            "chatml), or leave one kind of rows out (--data.train)"
        )
    return given


def _takes(encode: Callable[[dict], Any], drawn: Any) -> bool:
    try:
        encode(drawn.read())
    except ValueError:
        return False
    return True


def say_template(session: Session[SupervisedConfig], tokenizer: Any) -> None:
    """Say by which template rows are rendered that the tokenizer lacks, and warn of one that ends no turns."""
    cfg = session.cfg
    template = job_template(cfg, tokenizer)
    if template and not getattr(tokenizer, "chat_template", None):
        name = "ChatML" if cfg.data.chat_template == "chatml" else "--data.chat-template"
        session.note(f"the tokenizer has no chat template: rows are rendered by {name}, which the model is saved with")
    if template and not end_of_turn_tokens(tokenizer, template):
        session.warn(
            "the chat template ends a turn with no control token of the tokenizer, so that nothing teaches the model "
            'to stop: add its tokens (--sft.add-tokens "<|im_start|>" "<|im_end|>" for ChatML), or choose another '
            "template (--data.chat-template)"
        )
