"""A small model that reads images, and prompts with drawn images, for `vision.py`.

The model is an Idefics3, because TRL needs a processor of transformers, and that of Idefics3 has no part for videos and
so needs no torchvision. An image is one tile, whose sides have the same length in pixels in every image.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START, END, IMAGE = "<|im_start|>", "<|im_end|>", "<image>"
MARKS = ["<fake_token_around_image>", "<global-img>", IMAGE, "<end_of_utterance>"]
"""Tokens that Idefics3 writes around an image."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COLOURS = ["red", "green", "blue", "orange", "purple", "black"]


@dataclass
class Sizes:
    """Sizes of a model. An image takes (side / patch / merge) ** 2 tokens."""

    side: int = 256
    patch: int = 8
    merge: int = 2
    tower: dict[str, int] = field(
        default_factory=lambda: dict(hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3)
    )
    text: dict[str, int] = field(default_factory=dict)
    """Sizes of the language model; of those left out, `base` has its own."""
    base: str = ""
    """Model that gives the tokenizer and the weights of the language model; empty: random weights and tokens that are
    bytes."""

    @property
    def tokens(self) -> int:
        """Number of tokens of an image, without the marks around it."""
        return (self.side // self.patch // self.merge) ** 2


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", START, END, *letters])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token=END, additional_special_tokens=[START]
    )


def build(sizes: Sizes) -> tuple[Any, Any]:
    """Return a model and its tokenizer, with a chat template. Random weights are the same at every call."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration

    from spmdrl.hub.resolve import resolve

    tokenizer, text, weights = byte_tokenizer(), {"model_type": "llama"} | sizes.text, {}
    if sizes.base:
        folder = resolve(sizes.base)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        language = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        text, weights = language.config.to_dict() | sizes.text, dict(language.state_dict())
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.extra_special_tokens, *MARKS]})
    tokenizer.chat_template = TEMPLATE
    vocabulary = max(len(tokenizer), sizes.text.get("vocab_size", 0))
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text | {"vocab_size": vocabulary, "pad_token_id": tokenizer.pad_token_id},
            vision_config=sizes.tower | {"image_size": sizes.side, "patch_size": sizes.patch},
            scale_factor=sizes.merge,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for name, own in model.model.text_model.named_parameters():
            if f"model.{name}" in weights:
                # The tokens of MARKS have rows behind those of the base.
                given = weights[f"model.{name}"]
                own[: len(given)].copy_(given)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def write_model(folder: Path, sizes: Sizes) -> None:
    """Write a folder with a model, its tokenizer, and its processor for TRL."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    model, tokenizer = build(sizes)
    side = {"longest_edge": sizes.side}
    pixels = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor = Idefics3Processor(pixels, tokenizer, image_seq_len=sizes.tokens, chat_template=TEMPLATE)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    pixels.save_pretrained(folder)


def draw(folder: Path, rows: int, side: int) -> list[dict]:
    """Draw an image for each row, PNG files of side x side pixels, and return rows that show and describe them."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng, noise, out = random.Random(0), np.random.default_rng(0), []
    for row in range(rows):
        image = Image.fromarray(noise.integers(96, 160, (side, side, 3), dtype=np.uint8))
        pen, answer = ImageDraw.Draw(image), rng.randint(1, 6)
        for _ in range(answer):
            x, y, radius = rng.random() * side, rng.random() * side, rng.uniform(0.05, 0.15) * side
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=rng.choice(COLOURS))
        image.save(folder / f"{row:04}.png")
        prompt = [{"role": "user", "content": f"Image {row:04}: how many circles?"}]
        out.append({"prompt": prompt, "images": [f"{row:04}.png"], "answer": str(answer)})
    return out


def write_prompts(folder: Path, rows: int, side: int) -> None:
    """Write images and the file prompts.jsonl, which both sides read."""
    found = draw(folder, rows, side)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
