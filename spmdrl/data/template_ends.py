"""Finds the tokens with which a chat template ends an assistant turn: models learn them, and engines stop at them.

The tokens come from the turns that `turns.py` finds in test dialogues, so engines stop where models learned to stop.
"""

from collections.abc import Iterator
from typing import Any

from spmdrl.config.schema import TrainingConfig
from spmdrl.data.chat import CHATML, chosen_template, template_text
from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError, tool_call
from spmdrl.data.turns import trained_sequences

QUESTION = {"role": "user", "content": "Xk" + PROBE}
ANSWER = {"role": "assistant", "content": "9w" + PROBE}


def job_template(cfg: TrainingConfig, tokenizer: Any) -> str:
    """Return the jinja text of the template that a job renders dialogues with, or an empty string if it renders none.

    Raises ValueError if `--data.chat-template` is not a template, or names a file that cannot be read.
    """
    found = chosen_template(tokenizer, template_text(cfg.data.chat_template))
    if getattr(cfg, "env", ""):
        return found or CHATML
    return found if cfg.data.chat != "off" or cfg.data.RENDERS_MESSAGES else ""


def end_of_turn_tokens(tokenizer: Any, template: str) -> tuple[int, ...]:
    """Return the ids of the control tokens with which a template ends turns; the first one ends a plain-text answer.

    Turns with tool calls can end with a different token. Tokens that also occur inside turns, such as after a thought
    or a call, are omitted. The result is empty if there is no template, or if it is ambiguous where turns end.
    """
    if not template:
        return ()
    ends, inner = list[str](), set[str]()
    try:
        render = Renderer(tokenizer, template)
    except TemplateError:
        return ()
    for dialogue in _probes():
        try:
            sequences = trained_sequences(render, dialogue, ())
        except ValueError:
            continue
        for turn in (s.text[t.start : t.end] for s in sequences for t in s.turns):
            found = list(render.controls.finditer(turn))
            stops = bool(found) and found[-1].end() == len(turn)
            ends += [found[-1].group()] if stops else []
            inner |= {m.group() for m in (found[:-1] if stops else found)}
    outer = [end for end in dict.fromkeys(ends) if end.strip() and end not in inner]
    return tuple(tokenizer.convert_tokens_to_ids(outer))


def _probes() -> Iterator[Dialogue]:
    """Yield test dialogues: one or two answers, a thought, and two calls or one (some templates accept only one)."""
    yield Dialogue([QUESTION, ANSWER])
    yield Dialogue([QUESTION, ANSWER, QUESTION, ANSWER])
    yield Dialogue([QUESTION, ANSWER | dict.fromkeys(THOUGHT_KEYS, PROBE)])
    for count in (2, 1):
        calls = [tool_call(PROBE, {"a": PROBE}, i) for i in range(count)]
        answers = [{"role": "tool", "name": PROBE, "tool_call_id": call["id"], "content": PROBE} for call in calls]
        yield Dialogue([QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers, ANSWER])
