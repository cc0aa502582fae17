"""Builds policies on paper from a model's config.json, without reading files of weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from spmdrl.config.classifier import FLAG, is_classifier, model_path
from spmdrl.config.schema import Config
from spmdrl.hub.resolve import named
from spmdrl.hub.shipped import shipped
from spmdrl.plan.numbers import META


def folder_of(path: str, trust_remote_code: bool = False) -> Path:
    """Return the folder with the config.json of a model path; its weights may be missing.

    Raises:
        ValueError: there is none; the message tells what to do.
    """
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local
    if found := shipped(path):
        return found
    from spmdrl.hub.resolve import resolve

    return resolve(path, trust_remote_code)


def folders_of(cfg: Config) -> dict[str, Path]:
    """Return the folder of every model path of a run: the policy's, and those of its other models that are set."""
    paths = {
        "--model.path": cfg.model.path,
        "--reference.path": cfg.reference.path,
        "--critic.path": cfg.critic.path,
        "--process-reward.path": cfg.process_reward.path,
        "--safety.cost-model": cfg.safety.cost_model,
    }
    scorer = cfg.reward.model
    paths[f"{FLAG} {scorer}: path" if is_classifier(scorer) else FLAG] = model_path(scorer)
    folders = {}
    for flag, path in paths.items():
        with named(flag):
            folders |= {path: folder_of(path, cfg.model.trust_remote_code)} if path else {}
    return folders


@contextmanager
def without_files(folders: dict[str, Path]) -> Iterator[None]:
    """Build policies inside this context from the config.json of these folders, on the meta device."""
    from spmdrl.policy import labels, models
    from spmdrl.policy.fsdp import policy as fsdp

    def find(path: str, *_: Any) -> Path:
        return folders[path]

    places: list[tuple[Any, str, Any]] = [
        (fsdp, "resolve", find),
        (fsdp, "fill_model", lambda model, *_: model.to(META)),
        (fsdp, "prediction_heads", lambda *_: []),
        (models, "check_same_tokens", lambda *_: None),
        (labels, "resolve", find),
        (labels, "check_head", lambda *_: None),
        (labels, "differing_tokens", lambda *_: ([], 0)),
    ]
    if find_spec("megatron") is not None:
        from spmdrl.policy.megatron import convert
        from spmdrl.policy.megatron import policy as megatron

        places += [
            (megatron, "resolve", find),
            (megatron, "prediction_heads", lambda *_: []),
            (megatron, "stored", lambda *_: []),
            (convert, "load", lambda *_: None),
        ]
    with ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(patch.object(module, name, value))
        yield
