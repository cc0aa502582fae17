"""A Hugging Face model that writes the assistant's turns of conversations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.env.calls import format_of

Generate = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""(messages, tools) -> text of the assistant's next turn, with its control tokens, without the token that ends it."""


@dataclass(frozen=True)
class ModelPlayer:
    """A model that continues conversations."""

    generate: Generate
    format: str
    """The form in which it writes tool calls; empty if its template shows none that can be read."""
    why: str = ""
    """The reason for an empty format."""


def load_player(model: str, format: str, max_tokens: int, temperature: float, seed: int) -> ModelPlayer:
    """Load a model, onto a GPU if there is one.

    Args:
        model: folder or name, as `--model.path`.
        format: of tool calls; empty takes the one that the chat template shows.
        max_tokens: of a turn.
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
