"""Checks that what a run's settings name is there: models, prompts, files of functions, a GPU."""

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
"""Settings that may name a function in a file, each with the function that a bare file stands for."""
ANSWER = 4.0
"""Seconds in which the hub must answer."""
Ask = Callable[[str, str], str]
"""Asks the hub for a repository by its kind (`model`, `dataset`) and name: empty, or the reason why it gives none."""


def ask_hub(kind: str, name: str) -> str:
    """Asks the hub whether it has a repository; returns the reason why it does not give it, empty if it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=ANSWER)
    except Exception as error:  # the hub client raises its own, its HTTP library's and OSError
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0][:160]}"
    return ""


def settings(config: Config, gpus: int, quick: bool, ask: Ask = ask_hub) -> list[Finding]:
    """Checks all that the settings of a run name. gpus: those that torch finds. quick: the hub is not asked."""
    asks = None if quick else ask
    found = [device(config, gpus)]
    named = {name: get(config, name) for name in MODELS}
    # Whether its file can be read was checked with the settings.
    named["reward.model"] = model_path(named["reward.model"])
    # Settings that name the same model make one line, under the first of them.
    for path in dict.fromkeys(path for path in named.values() if path):
        found.append(model(flag(next(name for name in MODELS if named[name] == path)), path, config, asks))
    found.append(data("--data.train", config.data.train, config, asks))
    if config.eval.every and config.data.eval:
        found.append(data("--data.eval", config.data.eval, config, asks))
    return found + functions(config)


def device(config: Config, gpus: int) -> Finding:
    """Checks that a GPU is there if the settings need one."""
    asked = f"--run.device {config.run.device}"
    if config.run.device == "cpu" or gpus:
        return ok("device", f"{asked}, {gpus} GPUs")
    fix = "start on a node with GPUs, or give --run.device cpu where the CPU is meant"
    if needs := gpu_needs(config):
        return fail("device", f"{asked} finds no GPU, and {', '.join(needs)} wants one", fix)
    if "host" in (config.policy.offload, config.reference.offload):
        return warn("device", f"{asked} takes the CPU, where an offload to the host moves nothing", fix)
    return ok("device", f"{asked} takes the CPU: no GPU here")


def gpu_needs(config: Config) -> list[str]:
    """Returns the settings that only a GPU serves, unless `--run.device cpu` says that the CPU is meant.

    Megatron's own kernels are for GPUs; a CPU runs small models through stand-ins.
    """
    rollout, named = config.rollout, engine_name(config) != "hf"
    needs = {
        "--run.device cuda": config.run.device == "cuda",
        "--policy.backend megatron": config.policy.backend == "megatron",
        "--policy.liger": config.policy.liger,
        f"--rollout.quantization {rollout.quantization}": named and rollout.quantization != "none",
        "--rollout.deterministic": named and rollout.deterministic,
    }
    return [name for name, needed in needs.items() if needed]


def model(name: str, path: str, config: Config, ask: Ask | None) -> Finding:
    """Checks one model folder, file or hub name as a run resolves it, without downloading or converting anything.

    Args:
        name: the flag.
        path: its value.
        config: settings, which say whether the model may bring code.
        ask: asks the hub; None does not.
    """
    from spmdrl.hub.folder import TINY, check_folder
    from spmdrl.hub.gguf import find_package_gguf
    from spmdrl.hub.resolve import MODELSCOPE, is_hub_name

    trust, local = config.model.trust_remote_code, Path(path).expanduser()
    fix = f"give {name} a folder with config.json and safetensors, or a hub name that can be downloaded"
    try:
        if path.startswith(MODELSCOPE):
            return on_modelscope(name, path, fix)
        if path.startswith("package:"):
            return ok(name, f"{path}: {find_package_gguf(path.removeprefix('package:'))}")
        if local.suffix == ".gguf" and local.is_file():
            return ok(name, path)
        if path == "tiny" or local.is_dir():
            folder = check_folder(TINY if path == "tiny" else local, trust)
            return ok(name, f"{path}: {len(list(folder.glob('*.safetensors')))} files of weights, whole")
    except ValueError as error:
        return fail(name, str(error), fix)
    if local.suffix == ".gguf" or not is_hub_name(path):
        return fail(name, f"{path} is no folder here", fix)
    return on_hub(name, "model", path, ask, fix)


def data(name: str, spec: str, config: Config, ask: Ask | None) -> Finding:
    """Checks that the first row of a source of prompts can be read. name: the flag. ask: as in `model`."""
    from spmdrl.data.sources import read_source

    fix = f"give {name} a file, folder or data set that can be read (docs/usage.md names the forms)"
    kind, _, rest = spec.partition(":")
    if kind == "ms":
        return on_modelscope(name, spec, fix)
    if kind == "hf":
        place = rest.split(":")[0]
        if Path(place).expanduser().is_dir():
            return ok(name, f"{spec}: a folder")
        return on_hub(name, "dataset", place, ask, fix)
    try:
        read_source(spec, config.data.prompt_column, config.data.answer_column, 1)
    except ValueError as error:
        return fail(name, str(error), fix)
    return ok(name, spec)


def on_hub(name: str, kind: str, repository: str, ask: Ask | None, fix: str) -> Finding:
    """Checks that a model or data set is in the hub's cache, or that the hub has it."""
    from huggingface_hub import snapshot_download

    try:
        return ok(name, f"{repository}: {snapshot_download(repository, repo_type=kind, local_files_only=True)}")
    except Exception:  # of the hub client: it is not in the cache, or no name of a repository
        lacks = f"{repository} is neither a folder here nor in the hub's cache"
    if hub_is_off(os.environ):
        return fail(name, f"{lacks}, and HF_HUB_OFFLINE is set", fix)
    if ask is None:
        return warn(name, f"{lacks}: a run would download it", "without --quick the hub is asked for it")
    why = ask(kind, repository)
    return (
        fail(name, f"{lacks}, and the hub does not give it ({why})", fix)
        if why
        else ok(name, f"{repository}: the hub has it, and the first start downloads it")
    )


def on_modelscope(name: str, spec: str, fix: str) -> Finding:
    """Checks that ModelScope's package is installed. spec: `ms:...`, of a model or a data set."""
    if find_spec("modelscope") is None:
        return fail(name, f"{spec} needs the package modelscope", "pip install modelscope")
    return warn(name, f"{spec}: a run downloads it from ModelScope, which is not asked here", fix)


def functions(config: Config) -> list[Finding]:
    """Checks the files of functions, and of a chat template, that the settings name."""
    found = []
    for name, default in FUNCTIONS.items():
        value = get(config, name)
        if ".py" in value:
            problems = file_problems(name, value, default)
            fix = "give path/to/file.py:function, from the folder of the start"
            found.append(fail(flag(name), "; ".join(problems), fix) if problems else ok(flag(name), value))
    template = config.data.chat_template
    if template.endswith(".jinja") and not Path(template).expanduser().is_file():
        fix = "give the file's path from the folder of the start, or the template's text"
        found.append(fail("--data.chat-template", f"there is no file {template}", fix))
    return found
