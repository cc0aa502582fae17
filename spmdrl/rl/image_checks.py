"""Refuses settings that read text only, in runs whose prompts have images."""

from collections.abc import Iterator
from pathlib import Path

from spmdrl.config.classifier import model_path
from spmdrl.config.engines import engine_name
from spmdrl.config.schema import Config
from spmdrl.data.prompts import PromptSet
from spmdrl.hub.build import sees_images
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import named, resolve
from spmdrl.session.image_reader import check_same_images


def check_image_prompts(cfg: Config, prompts: PromptSet, folder: Path) -> None:
    """Check that a run's settings support the images of its prompts. folder: folder of the trained model.

    Raises:
        ValueError: a setting supports text only, or another model of the run reads images in another way; the message
            names the setting.
    """
    row = next((prompt.index for prompt in prompts.prompts if prompt.images), None)
    if row is None:
        return
    if setting := text_setting(cfg):
        raise ValueError(
            f"{setting} reads text only, and {prompts.source} has prompts with images (the first is row {row}): change "
            "this setting, or leave these rows out"
        )
    for flag, path in _models(cfg):
        check_same_images(path, folder, cfg.model.trust_remote_code, flag)


def text_setting(cfg: Config) -> str:
    """Return a setting of a run that supports text only, or an empty string if all support images."""
    return next(_of_text(cfg), "")


def _of_text(cfg: Config) -> Iterator[str]:
    """Yield the settings that support text only."""
    if cfg.policy.backend != "fsdp":
        yield f"--policy.backend {cfg.policy.backend}"
    if (engine := engine_name(cfg)) == "sglang":
        yield f"--rollout.engine {engine}"
    if cfg.rollout.routing_replay:
        yield "--rollout.routing-replay"
    distill = getattr(cfg, "distill", None)
    if distill and distill.on_engine:
        yield "--distill.on-engine"
    if distill and distill.teacher_template:
        yield "--distill.teacher-template"
    if getattr(cfg, "aligns_tokens", False):
        yield "--distill.align"
    for flag, path in _models(cfg):
        with named(flag):
            config = read_config(resolve(path, cfg.model.trust_remote_code), cfg.model.trust_remote_code)
        if not sees_images(config):
            yield f"{flag} {path}"


def _models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the other models that read the prompts: flag and path."""
    if scorer := model_path(cfg.reward.model):
        yield "--reward.model", scorer
    if cfg.safety.cost_model:
        yield "--safety.cost-model", cfg.safety.cost_model
    if cfg.critic.path:
        yield "--critic.path", cfg.critic.path
    if cfg.reference.path:
        yield "--reference.path", cfg.reference.path
    if cfg.process_reward.path:
        yield "--process-reward.path", cfg.process_reward.path
    for teacher in getattr(cfg, "further_teachers", dict)().values():
        yield "--distill.more-teachers", teacher.path
