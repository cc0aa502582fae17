"""Checks that the models, prompts, function files and GPUs in a run's settings exist."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from spmdrl.config.classifier import model_path
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import flag, get
from spmdrl.config.named import file_problems
from spmdrl.config.schema import Config
from spmdrl.tools.doctor_findings import Finding, fail, ok, warn
from spmdrl.tools.doctor_machine import hub_is_off

MODELS = ("model.path", "reference.path", "critic.path", "process_reward.path", "reward.model", "safety.cost_model")
FUNCTIONS = {"reward.function": "compute_score", "algo.loss": "", "algo.advantage": "", "filter.keep": ""}
"""Setting that can name a function in a file -> default function if the value names only the file."""
Query = Callable[[str, str], str]
"""Looks up a repository on the hub by kind (`model`, `dataset`) and name, like `query_hub`."""


def query_hub(kind: str, name: str) -> str:
    """Look up a repository on the hub; return "" if the hub has it, or the reason why the lookup failed."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=4.0)
    except Exception as error:  # the hub client raises OSError, errors of its HTTP library, and its own errors
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0][:160]}"
    return ""


def settings(config: Config, gpus: int, quick: bool, query: Query = query_hub) -> list[Finding]:
    """Check that the GPUs, models, data, functions and chat template named in a run's settings exist.

    gpus: number of GPUs that torch finds. quick: whether to skip hub queries.
    """
    hub = None if quick else query
    found = [device(config, gpus)]
    named = {name: get(config, name) for name in MODELS}
    # `reward.model` may be a file that names a model; validating the settings has already read the file.
    named["reward.model"] = model_path(named["reward.model"])
    # Settings with the same model share one line, which names the first such setting.
    for path in dict.fromkeys(path for path in named.values() if path):
        found.append(model(flag(next(name for name in MODELS if named[name] == path)), path, config, hub))
    found.append(data("--data.train", config.data.train, config, hub))
    if config.eval.every and config.data.eval:
        found.append(data("--data.eval", config.data.eval, config, hub))
    return found + _functions(config)


def device(config: Config, gpus: int) -> Finding:
    """Check that there is a GPU if the settings need one."""
    flags = f"--run.device {config.run.device}"
    if config.run.device == "cpu" or gpus:
        return ok("device", f"{flags}, {'1 GPU' if gpus == 1 else f'{gpus} GPUs'}")
    fix = "start on a node with GPUs, or give --run.device cpu to use the CPU"
    if needs := _gpu_needs(config):
        verb = "needs" if len(needs) == 1 else "need"
        return fail("device", f"{flags} finds no GPU, and {', '.join(needs)} {verb} one", fix)
    if "host" in (config.policy.offload, config.reference.offload):
        return warn("device", f"{flags} uses the CPU, where an offload to the host moves nothing", fix)
    return ok("device", f"{flags} uses the CPU: no GPU on this machine")


def _gpu_needs(config: Config) -> list[str]:
    """Return the settings that need a GPU. Megatron also runs on a CPU, but fast enough only for small models."""
    rollout, named = config.rollout, engine_name(config) != "hf"
    needs = {
        "--run.device cuda": config.run.device == "cuda",
        "--policy.backend megatron": config.policy.backend == "megatron",
        "--policy.liger on": config.policy.liger == "on",
        f"--rollout.quantization {rollout.quantization}": named and rollout.quantization != "none",
        "--rollout.deterministic": named and rollout.deterministic,
    }
    return [name for name, needed in needs.items() if needed]


def model(name: str, path: str, config: Config, query: Query | None) -> Finding:
    """Check that a model's folder, file or hub name exists, without downloading or converting anything.

    name: the flag. path: the flag's value. query: looks up a name on the hub. Use None to skip the lookup.
    """
    from spmdrl.hub.folder import TINY, check_folder
    from spmdrl.hub.gguf import find_package_gguf
    from spmdrl.hub.resolve import MODELSCOPE, is_hub_name

    trust, local = config.model.trust_remote_code, Path(path).expanduser()
    fix = f"give {name} a folder with config.json and safetensors, or a hub name that can be downloaded"
    try:
        if path.startswith(MODELSCOPE):
            return _on_modelscope(name, path, fix)
        if path.startswith("package:"):
            return ok(name, f"{path}: {find_package_gguf(path.removeprefix('package:'))}")
        if local.suffix == ".gguf" and local.is_file():
            return ok(name, path)
        if path == "tiny" or local.is_dir():
            folder = check_folder(TINY if path == "tiny" else local, trust)
            return ok(name, f"{path}: complete files of weights: {len(list(folder.glob('*.safetensors')))}")
    except ValueError as error:
        return fail(name, str(error), fix)
    if local.suffix == ".gguf" or not is_hub_name(path):
        return fail(name, f"{path} is not a folder or a file on this machine", fix)
    return _on_hub(name, "model", path, query, fix)


def data(name: str, spec: str, config: Config, query: Query | None) -> Finding:
    """Check that the first row of a prompt source can be read, or that the hub has the dataset.

    name, query: see `model`.
    """
    from spmdrl.data.sources import read_source

    fix = f"give {name} a file, folder or data set that can be read (docs/usage.md names the forms)"
    kind, _, rest = spec.partition(":")
    if kind == "ms":
        return _on_modelscope(name, spec, fix)
    if kind == "hf":
        place = rest.split(":")[0]
        if Path(place).expanduser().is_dir():
            return ok(name, f"{spec}: a folder")
        return _on_hub(name, "dataset", place, query, fix)
    try:
        read_source(spec, config.data.prompt_column, config.data.answer_column, 1)
    except ValueError as error:
        return fail(name, str(error), fix)
    return ok(name, spec)


def _on_hub(name: str, kind: str, repository: str, query: Query | None, fix: str) -> Finding:
    """Check that a model or dataset is in the hub cache or on the hub."""
    from huggingface_hub import snapshot_download

    try:
        return ok(name, f"{repository}: {snapshot_download(repository, repo_type=kind, local_files_only=True)}")
    except Exception:  # the hub client raises various exceptions if the name is invalid or not in the cache
        lacks = f"{repository} is neither a folder on this machine nor in the hub's cache"
    if hub_is_off(os.environ):
        return fail(name, f"{lacks}, and HF_HUB_OFFLINE is set", fix)
    if query is None:
        return warn(name, f"{lacks}: a run would download it", "without --quick the doctor looks for it on the hub")
    if why := query(kind, repository):
        return fail(name, f"{lacks}, and the hub does not provide it ({why})", fix)
    return ok(name, f"{repository}: the hub has it, and the first start downloads it")


def _on_modelscope(name: str, spec: str, fix: str) -> Finding:
    """Check that ModelScope's package is installed. spec: `ms:` followed by a model or dataset name."""
    if find_spec("modelscope") is None:
        return fail(name, f"{spec} needs the package modelscope", "pip install modelscope")
    return warn(name, f"{spec}: a run downloads it from ModelScope; the doctor does not look there", fix)


def _functions(config: Config) -> list[Finding]:
    """Check that function files exist and define their functions, and that the chat template file exists."""
    found = []
    for name, default in FUNCTIONS.items():
        value = get(config, name)
        if ".py" in value:
            problems = file_problems(name, value, default)
            fix = "give path/to/file.py:function, relative to the working directory"
            found.append(fail(flag(name), "; ".join(problems), fix) if problems else ok(flag(name), value))
    template = config.data.chat_template
    if template.endswith(".jinja") and not Path(template).expanduser().is_file():
        fix = "give the file's path relative to the working directory, or the template's text"
        found.append(fail("--data.chat-template", f"the file {template} does not exist", fix))
    return found
