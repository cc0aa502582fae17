"""Finds the text that an assistant generates in a rendered dialogue, and proves it for each turn.

Every turn is looked at in the place where a model generates it: at the end of the dialogue so far. Let P be the
rendering of the messages before it with the generation prompt, and E that of the messages up to and with it.

- If E begins with P, the turn is the rest of E.
- Some generation prompts open what a finished turn lacks, a thought for instance. E then departs from P within that
  prompt, and the turn begins there. The place must not depend on the turn's text: two other texts depart there too.
- Some templates render earlier messages otherwise once the turn is there. The turn then begins in E after the whole
  generation prompt and the end of the message before it, and is trained after P, which is what a model would see.
- Before a turn that opens a dialogue, templates leave out of P what they write at the beginning of E, such as a message
  of the system. The turn is then the end of E that is the whole turn after a question, or else what follows in E on the
  generation prompt that such a question has.

A turn ends with the last control token before anything that depends on the next message; in a template that ends no
turns, with the control token by which the next message begins (`turn_end.py`).

A turn that is trained must be shown whole: a thought that the template drops would be trained away (`turn_shown.py`).

Turns of one dialogue share a sequence only if its text begins with the context and the text of each. A template that
rewrites earlier turns (Qwen3 drops their thoughts) breaks this, and such a turn has a sequence of its own. So every
token is trained after exactly those that it would be generated after.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix

from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError
from spmdrl.data.turn_end import end_of_turn
from spmdrl.data.turn_shown import check_turn_shown, without_thought

OTHERS = ("Xk" + PROBE, "9w" + PROBE)
"""Texts that stand for that of a message; they differ in the first character and not in the last."""


@dataclass(frozen=True)
class Turn:
    """Text that an assistant generates, as a place in the text of a sequence."""

    message: int
    """Index of its message."""
    start: int
    end: int
    """Its first character, and the one after its last: after the control token that ends the turn."""
    stops: bool
    """It ends with a control token; otherwise nothing teaches the model to stop."""
    departs: bool
    """The generation prompt goes on otherwise than the turn begins."""


@dataclass
class Sequence:
    """One text that is trained on, and the turns in it that are trained."""

    text: str
    turns: list[Turn]


def sequences_of(render: Renderer, dialogue: Dialogue, trained: Collection[int] | None = None) -> list[Sequence]:
    """Return the sequences in which every turn of an assistant follows the context in which it is generated.

    There is one where the template keeps what it rendered. Messages after the last turn are left out. trained: indices
    of the turns that are trained, which must be shown whole; None: all.

    Raises:
        TemplateError: the template refuses the dialogue or does not show one of its messages, or a turn cannot be
            proved; the message tells which, counted from 1.
    """
    upto = _beginnings(render, dialogue)
    turns = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
    if not turns:
        raise TemplateError("no message is an assistant's")
    out: list[Sequence] = []
    for i in range(turns[-1], -1, -1):
        try:
            # A message of others is asked for in the longest rendering: what counts is what the turns after it see.
            if i not in turns:
                check_message_shown(render, dialogue, i, turns[-1] + 1, upto(turns[-1] + 1))
                continue
            text, turn = _turn(render, dialogue, i, upto)
            if trained is None or i in trained:
                shown, before = text[turn.start : turn.end], text[: turn.start]
                check_turn_shown(render.controls, dialogue.messages[i], shown, before, i == turns[-1])
        except TemplateError as e:
            raise TemplateError(f"message {i + 1} ({dialogue.messages[i]['role']}): {e}{unasked(dialogue)}") from e
        home = next((s for s in out if s.text.startswith(text)), None)
        if home:
            home.turns.insert(0, turn)
        else:
            out.append(Sequence(text, [turn]))
    return out[::-1]


def unasked(dialogue: Dialogue) -> str:
    """Return what helps where a template refuses a dialogue that begins with an assistant's turn; else nothing."""
    roles = [m["role"] for m in dialogue.messages if m["role"] not in ("system", "developer")]
    if roles[:1] != ["assistant"]:
        return ""
    return "; the dialogue begins with an assistant's turn: begin it with a user's message, or leave that turn out"


def _beginnings(render: Renderer, dialogue: Dialogue):
    """Return the function that renders the first messages of a dialogue, each count of them once."""

    @cache
    def upto(count: int, ask: bool = False) -> str:
        return render(dialogue.upto(count), ask)

    return upto


def _turn(render: Renderer, dialogue: Dialogue, i: int, upto) -> tuple[str, Turn]:
    """Return the text up to the end of the turn that message i holds, and the turn."""
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
    text, stops = _ended(render, dialogue, i, upto)
    turn = text[start:]
    if not turn.strip():
        raise TemplateError("the template shows nothing of this turn")
    return before + turn, Turn(i, len(before), len(before) + len(turn), stops, departs)


def _opening(render: Renderer, dialogue: Dialogue, i: int, upto) -> tuple[str, Turn]:
    """Return the text up to the end of a turn that answers nobody, and the turn.

    It begins where its end is the whole turn after a question, else after the generation prompt of a question's answer.
    """
    message, question = dialogue.messages[i], {"role": "user", "content": OTHERS[0]}
    messages = [*dialogue.messages[:i], question, *dialogue.messages[i:]]
    longer = Dialogue(messages, dialogue.tools, dialogue.more)
    begun = _beginnings(render, longer)
    whole, proved = _turn(render, longer, i + 1, begun)
    turn = whole[proved.start : proved.end]
    text, stops = _ended(render, dialogue, i, upto)
    if text.endswith(turn):
        return text, Turn(i, len(text) - len(turn), len(text), stops, proved.departs)
    prompt = begun(i + 1, True)
    header = prompt[len(commonprefix([begun(i + 1), prompt])) :]
    others = [render(dialogue.upto(i).then(_with_text(message, other))) for other in OTHERS]
    start = _after_rewriting(render, dialogue, i, header, upto(i + 1), others)
    return text, Turn(i, start, len(text), stops, False)


def _after_message(render: Renderer, dialogue: Dialogue, i: int, prompt: str) -> str:
    """Return the end of the prompt of turn i that does not depend on the text of the message before it."""
    changed = [render(_changed(dialogue.upto(i), i - 1, other), True) for other in OTHERS]
    return commonprefix([text[::-1] for text in (prompt, *changed)])[::-1]


def _after_rewriting(render: Renderer, dialogue: Dialogue, i: int, joint: str, written: str, others: list[str]) -> int:
    """Return the place where a turn begins in `written`, which renders earlier messages otherwise than its prompt.

    joint: the end of the prompt, after the message before the turn. others: `written` with other texts of the turn.
    """
    at = written.rfind(joint, 0, len(commonprefix([written, *others])))
    if not joint or at < 0 or _holds_message_before(render, dialogue, i, joint):
        raise TemplateError(
            "the template renders what is before this turn otherwise once the turn is there, so that its beginning "
            "cannot be proved"
        )
    return at + len(joint)


def _holds_message_before(render: Renderer, dialogue: Dialogue, i: int, joint: str) -> bool:
    """Return True if the text of the message before a turn stands between the end of its prompt and what it says."""
    if not i:
        return False
    before, turn = OTHERS
    text = render(_changed(dialogue.upto(i), i - 1, before).then(_with_text(dialogue.messages[i], turn)))
    latest = text.find(turn)
    return before in text[max(text.rfind(joint, 0, latest), 0) : latest]


def _ended(render: Renderer, dialogue: Dialogue, i: int, upto) -> tuple[str, bool]:
    """Return the rendering up to message i, cut after the control token that ends it, and whether there is one."""
    after = [m for m in dialogue.messages[i + 1 : i + 2] if m["role"] != "assistant"]
    if not after:
        after = [{"role": "tool" if dialogue.messages[i].get("tool_calls") else "user", "content": PROBE}]
    written, tail = upto(i + 1), _tail(render, upto(i + 1))
    kind, end, follows = _end_before(render, dialogue.upto(i + 1), after[0], written, tail)
    if end is None and (brief := without_thought(dialogue.messages[i])):
        # The template may drop the thought as soon as a message follows; what begins that message stays the same.
        shorter = dialogue.upto(i).then(brief)
        kind, end, _ = _end_before(render, shorter, after[0], text := render(shorter), _tail(render, text))
        return (written + end.group(), True) if kind == "next" and end else (written, False)
    if end is None:
        return written, False
    return (written if kind == "last" else follows)[: tail + end.end()], True


def _tail(render: Renderer, text: str) -> int:
    """Return the place where the control tokens at the end of a text begin."""
    tail = len(text)
    for found in reversed(list(render.controls.finditer(text))):
        if text[found.end() : tail].strip():
            break
        tail = found.start()
    return tail


def _end_before(render: Renderer, dialogue: Dialogue, after: dict, written: str, tail: int):
    """Return what `end_of_turn` says of the last turn of a dialogue, and the rendering with the message after it."""
    try:
        follows = render(dialogue.then(after))
    except TemplateError:
        follows = written
    followed = follows[tail:] if follows.startswith(written[:tail]) else ""
    return *end_of_turn(render.controls, render.call_ends, written[tail:], followed), follows


def _whole(render: Renderer, text: str, at: int) -> int:
    """Return the place, or where the control token begins that it lies in."""
    return next((m.start() for m in render.controls.finditer(text) if m.start() < at < m.end()), at)


def check_message_shown(render: Renderer, dialogue: Dialogue, i: int, count: int, text: str) -> None:
    """Raise TemplateError if `text`, the rendering of the first `count` messages, leaves out message i of others."""
    content = dialogue.messages[i].get("content")
    if not isinstance(content, str) or not content.strip() or content.strip() in text:
        return
    if render(_changed(dialogue.upto(count), i, OTHERS[0])) == text:
        raise TemplateError("the chat template does not show its content")


def _with_text(message: dict, text: str) -> dict:
    """Return a message of the same role that begins with another text."""
    return {"role": message["role"], "content": text} | ({k: text for k in THOUGHT_KEYS if message.get(k)})


def _changed(dialogue: Dialogue, i: int, text: str) -> Dialogue:
    """Return the dialogue with another text in message i."""
    messages = list(dialogue.messages)
    messages[i] = messages[i] | {"content": text}
    return Dialogue(messages, dialogue.tools, dialogue.more)
