"""Plays episodes in the terminal, by hand or with a model, and prints their messages, calls and rewards."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.env.answers import CONTROLS
from spmdrl.env.base import AssistantTurn, Call, Reply
from spmdrl.env.call_reading import python_call
from spmdrl.env.calls import FORMATS, format_of, parse, parse_turn
from spmdrl.env.pictures import has_images, in_words
from spmdrl.env.play import Play

HELP = """\
You are the assistant. Write a text, or a call of a tool: name(key=value), or as JSON
{"name": ..., "arguments": {...}}; a JSON list of calls makes several calls at once.
A line that ends with \\ continues in the next line. /quit ends the episode."""
Write = Callable[[str], None]
Generate = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""(messages, tools) -> text of the assistant's next turn, with special tokens but without the end-of-turn token."""


@dataclass(frozen=True)
class ModelPlayer:
    """A model that plays the assistant."""

    generate: Generate
    format: str
    """Name of the model's tool-call format in `FORMATS`, or "" if the format is unknown."""
    why: str = ""
    """The reason why the format is unknown."""


def by_hand(
    play: Play, row: dict[str, Any], seed: int, read: Callable[[str], str] = input, write: Write = print
) -> float:
    """Let the user play an episode by hand, and return the sum of its rewards.

    read: shows a prompt and returns the line that the user typed, or raises EOFError. write: prints a line.

    Raises:
        PlayError: the environment failed.
    """
    opened = play.open(row, seed)
    write(HELP)
    for tool in opened.tools:
        write(f"tool: {_tool_line(tool)}")
    names = {tool["function"]["name"] for tool in opened.tools}

    def next_turn(_: list[dict[str, Any]]) -> AssistantTurn | None:
        while True:
            try:
                line = read("> ")
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n{read('. ')}"
                return None if line.strip() == "/quit" else AssistantTurn(*parse_line(line, names))
            except EOFError:
                return None
            except ValueError as error:
                write(f"not understood: {error}")

    return _play(play, opened, next_turn, " early", write)


def by_model(
    play: Play, player: ModelPlayer, row: dict[str, Any], seed: int, turns: int, write: Write = print
) -> float:
    """Let a model play an episode of at most `turns` turns, and return the sum of its rewards.

    Raises:
        ValueError: the environment has tools, but the model's tool-call format is unknown.
        PlayError: the environment failed.
    """
    opened = play.open(row, seed)
    if opened.tools and player.format in ("", "none"):
        why = player.why or "the model's chat template shows no tool calls"
        raise ValueError(f"{why}: name the form of its calls with --format ({', '.join(FORMATS)})")
    left = iter(range(turns))

    def next_turn(messages: list[dict[str, Any]]) -> AssistantTurn | None:
        if has_images(messages):
            raise ValueError("the environment shows an image, and --model plays with text only: play it by hand")
        if next(left, None) is None:
            return None
        turn = parse_turn(player.generate(messages, opened.tools), player.format or "none", opened.tools)
        if turn.thought:
            write(_printable(f"assistant (thought): {turn.thought}"))
        if turn.content or not turn.calls:
            write(_message_line(turn.message))
        for call in turn.calls:
            write(f"assistant calls {_call_line(call)}")
        return turn

    return _play(play, opened, next_turn, f" at the limit of turns ({turns})", write)


def load_player(model: str, format: str, max_tokens: int, temperature: float, seed: int) -> ModelPlayer:
    """Load a model, onto a GPU if there is one.

    Args:
        model: folder or name, as in `--model.path`.
        format: the model's tool-call format; if empty, the format in its chat template.
        max_tokens: maximum number of tokens in a turn.
        temperature: sampling temperature; 0 for greedy decoding.
        seed: sampling seed.

    Raises:
        ValueError: the model cannot be loaded.
    """
    import torch

    from spmdrl.data.rendering import Dialogue, Renderer
    from spmdrl.data.template_ends import end_of_turn_tokens
    from spmdrl.hub.build import build_model
    from spmdrl.hub.resolve import named, resolve
    from spmdrl.hub.tokenizer import load_tokenizer

    with named("--model"):
        folder = resolve(model)
        tokenizer = load_tokenizer(folder)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = build_model(folder, "bfloat16" if device.type == "cuda" else "float32").to(device)
    render = Renderer(tokenizer)
    why = ""
    if not format and not render.shows_tools:
        why = "the model's chat template shows no tools"
    elif not format:
        try:
            format = format_of(render.template)
        except ValueError as error:
            why = str(error)
    ends = policy.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    ends |= set(end_of_turn_tokens(tokenizer, render.template))
    torch.manual_seed(seed)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}

    def generate(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        text = render(Dialogue(messages, tools), ask=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device)
        with torch.inference_mode():
            generated = policy.generate(
                input_ids=prompt.input_ids,
                attention_mask=prompt.attention_mask,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(ends),
                pad_token_id=tokenizer.pad_token_id,
                do_sample=bool(temperature),
                **sampling,
            )
        tokens = generated[0, prompt.input_ids.shape[1] :].tolist()
        tokens = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return ModelPlayer(generate, format, why)


def _play(
    play: Play, opened: Reply, next_turn: Callable[[list[dict]], AssistantTurn | None], cut: str, write: Write
) -> float:
    """Play an opened episode until it is done or `next_turn(messages)` returns None, and print it.

    Return the sum of its rewards. cut: words to print in the last line if `next_turn` returned None.
    """
    messages, reply, total = [], opened, 0.0
    while True:
        if reply.anew:
            messages = []
            write("the conversation continues from only these messages:")
        messages += reply.messages
        for message in reply.messages:
            write(_message_line(message))
        if reply.reward is not None:
            write(_reward_line(reply, "reward"))
            total += reply.reward
        turn = None if reply.done else next_turn(messages)
        if turn is None:
            break
        messages.append(turn.message)
        reply = play.turn(turn)
    final = play.score()
    if final.reward is not None:
        write(_reward_line(final, "final reward"))
        total += final.reward
    write(f"the episode has ended{'' if reply.done else cut}, with rewards of {total:g} in all")
    return total


def parse_line(line: str, names: set[str]) -> tuple[str, list[Call]]:
    """Return the text and the calls in a line that the user typed. names: the tools' names.

    Raises:
        ValueError: the line starts like a call but is not a valid call.
    """
    text = line.strip()
    if text.startswith(("{", "[{")):
        rest, calls, _ = parse(f"[TOOL_CALLS]{text}", "mistral")
        if rest or any(call.error for call in calls):
            why = next((call.error for call in calls if call.error), f"{rest!r} follows it")
            raise ValueError(f'write a call as {{"name": "...", "arguments": {{...}}}} ({why})')
        return "", calls
    name, opened, _ = text.partition("(")
    if not opened or name not in names:
        return line, []
    try:
        return "", [Call(name, python_call(text)[1], "call00000")]
    except ValueError as error:
        raise ValueError(f"write a call as {name}(key=value) with literal values ({error})") from None


def _printable(text: str) -> str:
    return CONTROLS.sub("\ufffd", text.encode("utf-8", "replace").decode())


def _message_line(message: dict[str, Any]) -> str:
    name = f" {message['name']}" if message.get("name") else ""
    return _printable(f"{message['role']}{name}: {in_words(message.get('content'))}")


def _call_line(call: Call) -> str:
    if call.arguments is None:
        return _printable(f"{call.name or 'a call'}: {call.error}")
    given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return _printable(f"{call.name}({given})")


def _tool_line(tool: dict[str, Any]) -> str:
    """Return a tool as `name(key: type)`, with the first line of its description."""
    about = tool["function"]
    kinds = {key: each.get("type", "any") for key, each in about.get("parameters", {}).get("properties", {}).items()}
    shown = [f"{key}: {kind if isinstance(kind, str) else ' or '.join(kind)}" for key, kind in kinds.items()]
    first = (about.get("description") or "").strip().partition("\n")[0]
    return _printable(f"{about['name']}({', '.join(shown)})  {first}")


def _reward_line(reply: Reply, what: str) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in reply.parts.items())
    return _printable(f"{what} {reply.reward:g}{f' ({parts})' if parts else ''}")
