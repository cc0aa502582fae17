"""Builds supervised fine-tuning: its rows, model and loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from spmdrl.config.load import Loaded
from spmdrl.config.sft import SFTConfig
from spmdrl.data.batch import Batch
from spmdrl.hub.grown import with_tokens
from spmdrl.hub.resolve import named, resolve
from spmdrl.policy.contract import MEASURE
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.distillation import DistillObjective, build_reader
from spmdrl.policy.objectives.likelihood import SftObjective
from spmdrl.session.job import Job
from spmdrl.session.session import Session
from spmdrl.supervised.build import Start, assemble, begin, frozen, policy
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.entry import settle
from spmdrl.supervised.rows import Placed, pack
from spmdrl.supervised.run import SupervisedRun
from spmdrl.supervised.stored_teacher import StoredTeacher
from spmdrl.supervised.teacher import Written, write_teacher


def begin_sft(cfg: SFTConfig) -> Start:
    """Add the tokens of `--sft.add-tokens` to the model, load its tokenizer and build the row encoder."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    folder = with_tokens(folder, cfg.sft.add_tokens, cfg.model.trust_remote_code)
    encoder = lambda tokenizer, longest, images: Encoder(cfg.data, tokenizer, longest, cfg.sft.train_on, images)  # noqa: E731
    return begin(cfg, folder, encoder)


def settle_sft(job: Job[Any], loaded: Loaded[SFTConfig]) -> Loaded[SFTConfig]:
    """Return the result of `settle`. Without `--run.dir`, the folder in `--teacher.write` becomes the run folder."""
    config = loaded.config
    if config.teacher.write and not config.run.dir:
        folder = str(Path(config.teacher.write).expanduser())
        loaded = replace(loaded, config=replace(config, run=replace(config.run, dir=folder)))
    return settle(job, loaded)


def build_sft(session: Session[SFTConfig]) -> SupervisedRun | Written:
    """Build a supervised fine-tuning job, or write the files of `--teacher.write`. Collective over all ranks."""
    cfg, peers = session.cfg, session.world.data_peers
    begun = begin_sft(cfg)
    if cfg.teacher.write:
        return write_teacher(session, begun)
    # Each sequence has its own noise, so sequences cannot share the tokens of a prompt.
    share = cfg.policy.share_prompts and not cfg.sft.neftune
    plain = SftObjective(cfg.sft.loss, peers)
    stored = StoredTeacher(session, begun) if cfg.teacher.read else None

    def packed(sequences: Placed, step: int) -> Batch:
        noise = cfg.sft.neftune * (step != MEASURE)
        return pack(sequences, noise, (cfg.run.seed, step), placeholder=begun.placeholder)

    run = assemble(
        session,
        begun,
        lambda: Models(policy(session, begun.folder, share)),
        lambda models: teacher_objective(session, models, stored) if cfg.has_teacher else plain,
        packed,
        stored,
    )
    if cfg.has_teacher:
        objective, frozen_model = cast(DistillObjective, run.objective), cast(Any, stored or run.models.reference)
        run.measured = plain
        run.add_frozen = lambda batch: objective.add_teacher(batch, "reference", frozen_model)
    return run


def teacher_objective(session: Session[SFTConfig], models: Models, stored: StoredTeacher | None) -> DistillObjective:
    """Build the teacher, unless its values are read from files, and return the distillation objective. Collective.

    Raises:
        ValueError: teacher and student have different tokenizers.
    """
    cfg, chosen, peers = session.cfg, session.cfg.teacher, session.world.data_peers
    if stored:
        return DistillObjective(chosen, stored.reader, {"reference": None}, chosen.temperature, peers)
    with named("--teacher.path"):
        teacher = models.reference = frozen(session, chosen.path, "--teacher.path")
    reader = build_reader(chosen, "teacher", [cfg.model.path, chosen.path], cfg.model)
    head = None if chosen.top_k else teacher.output_head()
    return DistillObjective(chosen, reader, {"reference": head}, chosen.temperature, peers)
