"""Finds the text that an assistant generates in a rendered dialogue, and rejects turns whose location is ambiguous.

Every turn is examined as the last message of a dialogue, as when a model generates it. Let P be the rendering of the
messages before the turn with a generation prompt, and E the rendering of the messages up to and including the turn.

- If E starts with P, the turn is the rest of E.
- Some generation prompts open a part that a finished turn lacks, such as a thought. E then diverges from P within that
  prompt, and the turn starts at this point. The point must not depend on the turn's text: if two other texts replace
  it, E must diverge from P at the same point.
- Some templates render earlier messages differently once the turn follows. The turn then starts in E after the last
  part of P, which consists of the end of the previous message and the generation prompt. In training, the turn follows
  P, as it does when a model generates it.
- For a turn that opens a dialogue, P lacks text that templates write at the start of E, such as a system message. The
  turn is then located in the dialogue with a question added before it. If E ends with the text found this way, that
  text is the turn. If not, the turn is the text in E after the question's generation prompt.

A turn ends with the last control token before any text that depends on the next message. If a template does not end
turns, the turn ends with the control token that starts the next message (`turn_end.py`).

A trained turn must be shown completely (`shown.py`), because a model would learn to omit a thought that the template
drops.

Turns of one dialogue share a sequence only if the sequence starts with the context and text of each turn. With a
template that rewrites earlier turns (Qwen3's drops their thoughts), each turn gets a separate sequence. Every token is
thus trained in exactly the context in which it would be generated.

A template can mark the text that an assistant generates (`{% generation %}`). Its marks are trusted, but a trained turn
must be shown completely between them. If the rendering of the whole dialogue omits a part of a turn, this turn gets a
separate sequence that ends with it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix

from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError
from spmdrl.data.row_columns import RowError
from spmdrl.data.shown import check_turn_shown
from spmdrl.data.turn_end import turn_with_end

OTHERS = ("Xk" + PROBE, "9w" + PROBE)
"""Two stand-ins for the text of a message; parts of a rendering that differ between them depend on the text."""


@dataclass(frozen=True)
class Turn:
    """Text that an assistant generates, as a character range in a sequence's text."""

    message: int
    """Index of the turn's message in the dialogue."""
    start: int
    end: int
    """Character range of the turn, up to and including the control token that ends it."""
    stops: bool
    """True if the turn ends with a control token; without such a token, the model does not learn to stop."""
    departs: bool
    """True if the turn starts inside the generation prompt, because the finished turn diverges from that prompt."""


@dataclass
class Sequence:
    """A training text and all assistant turns in it, including those that are not trained on."""

    text: str
    turns: list[Turn]


def sequences_of(render: Renderer, dialogue: Dialogue, trained: Collection[int] | None = None) -> list[Sequence]:
    """Return the sequences in which every assistant turn follows the context that it is generated in.

    There is only one sequence if the template never renders earlier messages differently. Messages after the last turn
    are omitted.
    trained: indices of the trained turns, which must be shown completely, or None for all turns.

    Raises TemplateError if the template rejects the dialogue or does not show one of its messages, or if the location
    of a turn in the rendered text is ambiguous. The error names the message, counted from 1.
    """
    upto = _beginnings(render, dialogue)
    turns = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
    if not turns:
        raise TemplateError("no message is an assistant's")
    out: list[Sequence] = []
    for i in range(turns[-1], -1, -1):
        try:
            # Non-assistant messages must be shown in the longest rendering, up to the last turn.
            if i not in turns:
                _check_message_shown(render, dialogue, i, turns[-1] + 1, upto(turns[-1] + 1))
                continue
            text, turn = _turn(render, dialogue, i, upto)
            if trained is None or i in trained:
                _check_turn(render, dialogue.messages[i], text, turn, i == turns[-1])
        except TemplateError as e:
            raise TemplateError(
                f"message {i + 1} ({dialogue.messages[i]['role']}): {e}{_advice_on_opening(dialogue)}"
            ) from e
        home = next((s for s in out if s.text.startswith(text)), None)
        if home:
            home.turns.insert(0, turn)
        else:
            out.append(Sequence(text, [turn]))
    return out[::-1]


def _advice_on_opening(dialogue: Dialogue) -> str:
    """Return advice for errors in a dialogue that starts with an assistant turn, else an empty string."""
    roles = [m["role"] for m in dialogue.messages if m["role"] not in ("system", "developer")]
    if roles[:1] != ["assistant"]:
        return ""
    return "; the dialogue begins with an assistant's turn: begin it with a user's message, or leave that turn out"


def trained_sequences(render: Renderer, dialogue: Dialogue, trained: Collection[int]) -> list[Sequence]:
    """Call `marked_sequences` if the template marks generated text, else `sequences_of`."""
    return (marked_sequences if render.marked else sequences_of)(render, dialogue, trained)


def _beginnings(render: Renderer, dialogue: Dialogue):
    """Return a cached function that renders the first messages of a dialogue."""

    @cache
    def upto(count: int, ask: bool = False) -> str:
        return render(dialogue.upto(count), ask)

    return upto


def _turn(render: Renderer, dialogue: Dialogue, i: int, upto) -> tuple[str, Turn]:
    """Return the training text up to the end of the turn in message i, and the turn's range in this text."""
    if all(m["role"] in ("system", "developer") for m in dialogue.messages[:i]):
        return _opening(render, dialogue, i, upto)
    prompt, written = upto(i, True), upto(i + 1)
    before, departs = prompt, False
    if written.startswith(prompt):
        start = len(prompt)
    else:
        message = dialogue.messages[i]
        others = [render(dialogue.upto(i).then(_with_text(message, other))) for other in OTHERS]
        joint = _after_message(render, dialogue, i, prompt)
        start = _whole(render, written, len(commonprefix([written, prompt, *others])))
        if start >= max(len(commonprefix([upto(i), prompt])), len(prompt) - len(joint)):
            before, departs = written[:start], True
        else:
            start = _after_rewriting(render, dialogue, i, joint, written, others)
    text, stops = turn_with_end(render, dialogue, i, upto)
    turn = text[start:]
    if not turn.strip():
        raise TemplateError("the template shows nothing of this turn")
    return before + turn, Turn(i, len(before), len(before) + len(turn), stops, departs)


def _opening(render: Renderer, dialogue: Dialogue, i: int, upto) -> tuple[str, Turn]:
    """Return the training text up to the end of a turn that opens a dialogue, and the turn's range in this text."""
    message, question = dialogue.messages[i], {"role": "user", "content": OTHERS[0]}
    messages = [*dialogue.messages[:i], question, *dialogue.messages[i:]]
    longer = Dialogue(messages, dialogue.tools, dialogue.more)
    begun = _beginnings(render, longer)
    whole, proved = _turn(render, longer, i + 1, begun)
    turn = whole[proved.start : proved.end]
    text, stops = turn_with_end(render, dialogue, i, upto)
    if text.endswith(turn):
        return text, Turn(i, len(text) - len(turn), len(text), stops, proved.departs)
    prompt = begun(i + 1, True)
    header = prompt[len(commonprefix([begun(i + 1), prompt])) :]
    others = [render(dialogue.upto(i).then(_with_text(message, other))) for other in OTHERS]
    start = _after_rewriting(render, dialogue, i, header, upto(i + 1), others)
    return text, Turn(i, start, len(text), stops, False)


def _after_message(render: Renderer, dialogue: Dialogue, i: int, prompt: str) -> str:
    """Return the longest suffix of turn i's prompt that does not depend on the text of the previous message."""
    changed = [render(_changed(dialogue.upto(i), i - 1, other), True) for other in OTHERS]
    return commonprefix([text[::-1] for text in (prompt, *changed)])[::-1]


def _after_rewriting(render: Renderer, dialogue: Dialogue, i: int, joint: str, written: str, others: list[str]) -> int:
    """Return the index where a turn starts in `written`, which renders earlier messages differently than the prompt.

    joint: the end of the prompt after the previous message's text. others: `written` with other texts for the turn.
    """
    at = written.rfind(joint, 0, len(commonprefix([written, *others])))
    if not joint or at < 0 or _holds_message_before(render, dialogue, i, joint):
        raise TemplateError(
            "the template renders the text before this turn differently once the turn is there, so it cannot be "
            "determined where the turn begins"
        )
    return at + len(joint)


def _holds_message_before(render: Renderer, dialogue: Dialogue, i: int, joint: str) -> bool:
    """Return True if the text of the previous message appears between the turn and `joint`, the end of its prompt."""
    if not i:
        return False
    before, turn = OTHERS
    text = render(_changed(dialogue.upto(i), i - 1, before).then(_with_text(dialogue.messages[i], turn)))
    latest = text.find(turn)
    return before in text[max(text.rfind(joint, 0, latest), 0) : latest]


def _whole(render: Renderer, text: str, at: int) -> int:
    """Return the index `at`, or the start of the control token that contains this index."""
    return next((m.start() for m in render.controls.finditer(text) if m.start() < at < m.end()), at)


def _check_message_shown(render: Renderer, dialogue: Dialogue, i: int, count: int, text: str) -> None:
    """Raise TemplateError if `text`, the rendering of the first `count` messages, does not show message i."""
    content = dialogue.messages[i].get("content")
    if not isinstance(content, str) or not content.strip() or content.strip() in text:
        return
    if render(_changed(dialogue.upto(count), i, OTHERS[0])) == text:
        raise TemplateError("the chat template does not show its content")


def _check_turn(render: Renderer, message: dict, text: str, turn: Turn, last: bool = True) -> None:
    """Raise TemplateError if `text` omits a part of a turn. last: as in `check_turn_shown`."""
    check_turn_shown(render.controls, message, text[turn.start : turn.end], text[: turn.start], last)


def _with_text(message: dict, text: str) -> dict:
    """Return a message with the same role and another text, which also replaces its thought."""
    return {"role": message["role"], "content": text} | ({k: text for k in THOUGHT_KEYS if message.get(k)})


def _changed(dialogue: Dialogue, i: int, text: str) -> Dialogue:
    """Return the dialogue with another text in message i."""
    messages = list(dialogue.messages)
    messages[i] = messages[i] | {"content": text}
    return Dialogue(messages, dialogue.tools, dialogue.more)


def marked_sequences(render: Renderer, dialogue: Dialogue, trained: Collection[int]) -> list[Sequence]:
    """Return the training sequences of a dialogue whose template marks the generated text of each turn.

    trained: indices of the trained turns. Raises TemplateError like `sequences_of`, and RowError if the number of
    marked parts differs from the number of turns.
    """
    messages = dialogue.messages
    if not any(message["role"] == "assistant" for message in messages):
        raise TemplateError("no message is an assistant's")
    try:
        whole = _marked_sequence(render, dialogue)
    except TemplateError as e:
        raise TemplateError(f"{e}{_advice_on_opening(dialogue)}") from e
    alone: dict[int, Sequence] = {}
    for i, message in enumerate(messages):
        try:
            if message["role"] != "assistant":
                _check_message_shown(render, dialogue, i, len(messages), whole.text)
            elif i in trained and not _shows_turn(render, message, whole, i):
                alone[i] = _ending_with(render, dialogue, i)
        except TemplateError as e:
            raise TemplateError(f"message {i + 1} ({message['role']}): {e}") from e
    whole.turns = [turn for turn in whole.turns if turn.message not in alone]
    return [*alone.values(), *([whole] if whole.turns else [])]


def _ending_with(render: Renderer, dialogue: Dialogue, i: int) -> Sequence:
    """Return the sequence that ends with the turn in message i."""
    found = _marked_sequence(render, dialogue.upto(i + 1))
    found.turns = found.turns[-1:]
    last = all(message["role"] != "assistant" for message in dialogue.messages[i + 1 :])
    _check_turn(render, dialogue.messages[i], found.text, found.turns[0], last)
    return found


def _shows_turn(render: Renderer, message: dict, sequence: Sequence, i: int) -> bool:
    turn = next(turn for turn in sequence.turns if turn.message == i)
    try:
        _check_turn(render, message, sequence.text, turn)
    except TemplateError:
        return False
    return True


def _marked_sequence(render: Renderer, dialogue: Dialogue) -> Sequence:
    """Render a dialogue and locate the marked part of each turn."""
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
            "the chat template does not mark one part as generated for each turn of an assistant (parts: "
            f"{len(parts)}, turns: {len(turns)}): correct the template, or use one without marks (--data.chat-template)"
        )
    controls = {m.end() for m in render.controls.finditer(text)}
    ended = [(i, start, start + len(text[start:end].rstrip())) for i, (start, end) in zip(turns, parts, strict=True)]
    return Sequence(text, [Turn(i, start, end, end in controls, False) for i, start, end in ended])
