"""Lets a Hugging Face model play episodes of an environment, and prints the conversations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.env.calls import FORMATS, format_of, parse_turn
from spmdrl.env.conversation_text import ANEW, call_line, end_lines, message_line, plain, reward_line
from spmdrl.env.play import Play

Speak = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""(messages, tools) -> text of the assistant's next turn, with its control tokens, without the token that ends it."""


@dataclass(frozen=True)
class Speaker:
    """A model that continues conversations."""

    speak: Speak
    format: str
    """The form in which it writes tool calls; empty if its template shows none that is read."""
    why: str = ""
    """The reason then."""


def by_model(
    play: Play,
    speaker: Speaker,
    row: dict[str, Any],
    seed: int,
    turns: int,
    write: Callable[[str], None] = print,
) -> float:
    """Let a model play an episode of at most `turns` turns, and return the sum of its rewards.

    Raises:
        ValueError: the environment has tools, and the model's form of calls is not known.
        PlayError: the environment failed.
    """
    opened = play.open(row, seed)
    if opened.tools and speaker.format in ("", "none"):
        why = speaker.why or "the model's chat template shows no tool calls"
        raise ValueError(f"{why}: name their form with --format ({', '.join(FORMATS)})")
    messages = list(opened.messages)
    for message in messages:
        write(message_line(message))
    total, done = 0.0, False
    for _ in range(turns):
        turn = parse_turn(speaker.speak(messages, opened.tools), speaker.format or "none", opened.tools)
        if turn.thought:
            write(plain(f"assistant (thought): {turn.thought}"))
        if turn.content or not turn.calls:
            write(message_line(turn.message))
        for call in turn.calls:
            write(f"assistant calls {call_line(call)}")
        reply = play.turn(turn)
        messages = [*([] if reply.anew else [*messages, turn.message]), *reply.messages]
        if reply.anew:
            write(ANEW)
        for message in reply.messages:
            write(message_line(message))
        if shown := reward_line(reply):
            write(shown)
        total += reply.reward or 0.0
        if done := reply.done:
            break
    final = play.score()
    for line in end_lines(final, total, "" if done else f" after {turns} turns"):
        write(line)
    return total + (final.reward or 0.0)


def load_speaker(model: str, format: str = "", most: int = 256, temperature: float = 1.0, seed: int = 0) -> Speaker:
    """Return a model that speaks, on a GPU if there is one.

    Args:
        model: folder or name, as `--model.path`.
        format: of tool calls; empty takes the one that the chat template shows.
        most: tokens of a turn.
        temperature: of sampling; 0 takes the likeliest token.
        seed: of all draws.

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
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}

    def speak(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        text = render(Dialogue(messages, tools), ask=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device)
        with torch.inference_mode():
            made = policy.generate(
                input_ids=prompt.input_ids,
                attention_mask=prompt.attention_mask,
                max_new_tokens=most,
                eos_token_id=sorted(ends),
                pad_token_id=tokenizer.pad_token_id,
                **(how or {"do_sample": False}),
            )
        tokens = made[0, prompt.input_ids.shape[1] :].tolist()
        tokens = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return Speaker(speak, format, why)
