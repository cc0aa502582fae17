"""Tiny random models that read images, with their tokenizer, processors and images; nothing is downloaded."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "smolvlm"]
TILED = ["idefics3", "smolvlm"]
"""Families that cut an image into tiles; their positions have one dimension."""
PATCH = 4
"""Side of a patch of the Qwen families in pixels; 2 x 2 patches become one token."""
TILE = 32
"""Side of a tile in pixels; a tile becomes 4 tokens."""
SPECIAL = [
    *("<pad>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
]
VOCAB = 320
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWER |= {"in_channels": 3, "initializer_range": 0.2}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 8,
    "initializer_range": 0.2,
}


@cache
def tokenizer() -> Any:
    """Bytes as tokens behind the special tokens of all families; two line ends in a row are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, "ĊĊ"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=SPECIAL[3:]
    )


def config(family: str) -> Any:
    """Config of a tiny model of this family, with attention "sdpa"."""
    import transformers

    ids = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 4, "vision_end_token_id": 5}
    two, three = ROPE | {"mrope_section": [4, 6, 6]}, ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if family == "qwen2_vl":
        tower = TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        made = transformers.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": two}, vision_config=tower, **ids)
    elif family == "qwen2_5_vl":
        tower = TOWER | WIDE | {"window_size": 16, "fullatt_block_indexes": [1]}
        made = transformers.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": two}, vision_config=tower, **ids)
    elif family == "qwen3_vl":
        tower = TOWER | WIDE | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text = TEXT | {"head_dim": 32, "rope_parameters": three}
        made = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **ids)
    elif family == "qwen3_5":
        # Narrower than the others, as its recurrent layers compute in float32 and would round more.
        tower = TOWER | WIDE | {"num_position_embeddings": 64, "out_hidden_size": 32}
        half = three | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
        text = TEXT | DELTA | {"hidden_size": 32, "rope_parameters": half}
        made = transformers.Qwen3_5Config(text_config=text, vision_config=tower, **ids)
    elif family == "idefics3":
        text = TEXT | {"model_type": "llama"}
        made = transformers.Idefics3Config(text_config=text, vision_config=SIGLIP, image_token_id=9, pad_token_id=0)
    elif family == "smolvlm":
        text = TEXT | {"model_type": "llama"}
        made = transformers.SmolVLMConfig(text_config=text, vision_config=SIGLIP, image_token_id=9, pad_token_id=0)
    else:
        raise ValueError(f"no tiny model of {family}: {', '.join(FAMILIES)}")
    return made


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Model of `AutoModelForImageTextToText` with random weights, the same at every call; not in training mode."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config(family), dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() < 2:
                    weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype).eval()


def processor_settings(family: str) -> dict[str, Any]:
    """What the preprocessor_config.json of a published model of this family would say, for the tiny model."""
    if family in TILED:
        name = {"idefics3": "Idefics3ImageProcessor", "smolvlm": "SmolVLMImageProcessor"}[family]
        sizes = {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}}
        return {"image_processor_type": name, "do_image_splitting": True} | sizes
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64 * 4, "longest_edge": 64 * 30},
    }


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of all families; IMAGE stands for `image_text`."""


def chat_tokenizer(family: str) -> Any:
    """A copy of the tokenizer with the family's chat template."""
    made = deepcopy(tokenizer())
    made.chat_template = TEMPLATE.replace("IMAGE", "{{ '" + image_text(family) + "' }}")
    return made


def saved(family: str, folder: Path) -> Path:
    """Write a folder like a published model's: the tiny model, its tokenizer with a template, and its processor."""
    tiny(family).save_pretrained(folder)
    chat_tokenizer(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_settings(family)))
    return folder


def images(n: int, seed: int = 0) -> list[Image.Image]:
    """`n` RGB images of noise, of unlike sizes and shapes from 17 to 80 pixels a side."""
    draw = np.random.default_rng(seed)
    sides = [(17 + 3 * int(draw.integers(22)), 17 + 3 * int(draw.integers(22))) for _ in range(n)]
    return [Image.fromarray(draw.integers(0, 256, (*side, 3), dtype=np.uint8)) for side in sides]


def image_text(family: str) -> str:
    """What the chat template of this family writes for one image."""
    return "<image>" if family in TILED else "<|vision_start|><|image_pad|><|vision_end|>"


def image_processor(family: str) -> Any:
    """Image processor of transformers (PIL backend) with `processor_settings`."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tiled = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
    settings = {k: v for k, v in processor_settings(family).items() if k != "image_processor_type"}
    return tiled.get(family, Qwen2VLImageProcessorPil)(**settings)


def processor(family: str) -> Any:
    """Processor of transformers for texts and images of this family, without videos, built as far as packages allow.

    SmolVLM's wants num2words, which it uses for videos only: a stand-in is set where the package is missing.
    """
    import transformers
    from transformers.models.smolvlm import processing_smolvlm

    names = {
        "qwen2_vl": "Qwen2VLProcessor",
        "qwen2_5_vl": "Qwen2_5_VLProcessor",
        "qwen3_vl": "Qwen3VLProcessor",
        "qwen3_5": "Qwen3VLProcessor",
        "idefics3": "Idefics3Processor",
        "smolvlm": "SmolVLMProcessor",
    }
    kind, pixels = getattr(transformers, names[family]), image_processor(family)
    if family == "idefics3":
        return kind(pixels, tokenizer(), image_seq_len=4)
    if family == "smolvlm":
        processing_smolvlm.num2words = processing_smolvlm.num2words or str
    made = object.__new__(kind)
    # The check of types would refuse a processor without videos; the video processors need torchvision.
    made.check_argument_for_proper_class = lambda *_: None
    made.__init__(pixels, tokenizer(), None, **({"image_seq_len": 4} if family == "smolvlm" else {}))
    return made
