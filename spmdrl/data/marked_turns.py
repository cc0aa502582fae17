"""Finds the text that an assistant generates by the marks of a template (`{% generation %}`).

The marks are taken at their word, but a turn that is trained must be shown whole between them (`turn_shown.py`). Where
the rendering of the whole dialogue leaves out a part of a turn, as templates do that drop earlier thoughts, the turn
has a sequence of its own, in which it is the last one and follows what a model would see.
"""

from collections.abc import Collection

from spmdrl.data.dialogues import RowError
from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.turn_shown import check_turn_shown
from spmdrl.data.turns import Sequence, Turn, check_message_shown, unasked


def marked_sequences(render: Renderer, dialogue: Dialogue, trained: Collection[int]) -> list[Sequence]:
    """Return the sequences of a dialogue; one where the template shows every trained turn whole in the whole dialogue.

    trained: indices of the turns that are trained.

    Raises:
        RowError: there are not as many marked parts as turns.
        TemplateError: the template refuses the dialogue, or leaves out a part of a turn that is trained or of another
            message; the error names the message, counted from 1.
    """
    messages = dialogue.messages
    if not any(message["role"] == "assistant" for message in messages):
        raise TemplateError("no message is an assistant's")
    try:
        whole = _sequence(render, dialogue)
    except TemplateError as e:
        raise TemplateError(f"{e}{unasked(dialogue)}") from e
    alone: dict[int, Sequence] = {}
    for i, message in enumerate(messages):
        try:
            if message["role"] != "assistant":
                check_message_shown(render, dialogue, i, len(messages), whole.text)
            elif i in trained and not _shows(render, message, whole, i):
                alone[i] = _last(render, dialogue, i)
        except TemplateError as e:
            raise TemplateError(f"message {i + 1} ({message['role']}): {e}") from e
    whole.turns = [turn for turn in whole.turns if turn.message not in alone]
    return [*alone.values(), *([whole] if whole.turns else [])]


def _last(render: Renderer, dialogue: Dialogue, i: int) -> Sequence:
    """Return the sequence that ends with the turn of message i."""
    found = _sequence(render, dialogue.upto(i + 1))
    found.turns = found.turns[-1:]
    turn, text = found.turns[0], found.text
    last = all(message["role"] != "assistant" for message in dialogue.messages[i + 1 :])
    check_turn_shown(render.controls, dialogue.messages[i], text[turn.start : turn.end], text[: turn.start], last)
    return found


def _shows(render: Renderer, message: dict, sequence: Sequence, i: int) -> bool:
    turn = next(turn for turn in sequence.turns if turn.message == i)
    text = sequence.text
    try:
        check_turn_shown(render.controls, message, text[turn.start : turn.end], text[: turn.start])
    except TemplateError:
        return False
    return True


def _sequence(render: Renderer, dialogue: Dialogue) -> Sequence:
    """Return the rendering of a dialogue, with the marked part of each turn."""
    text, places = render.marks(dialogue)
    parts: list[tuple[int, int]] = []
    for start, end in places:
        if parts and parts[-1][1] == start:
            parts[-1] = (parts[-1][0], end)
        elif text[start:end].strip():
            parts.append((start, end))
    turns = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    if len(parts) != len(turns):
        raise RowError(
            f"the chat template marks {len(parts)} parts as generated, and the dialogue has {len(turns)} turns of "
            "an assistant: mend the template, or give one without marks (--data.chat-template)"
        )
    controls = {m.end() for m in render.controls.finditer(text)}
    ended = [(i, start, start + len(text[start:end].rstrip())) for i, (start, end) in zip(turns, parts, strict=True)]
    return Sequence(text, [Turn(i, start, end, end in controls, False) for i, start, end in ended])
