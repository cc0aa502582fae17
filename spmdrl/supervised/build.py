"""Builds a supervised job on every rank."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.config.supervised import SFTConfig, split_weight
from spmdrl.data import treefile
from spmdrl.data.batch import balance
from spmdrl.data.mixture import Drawn, Mixture
from spmdrl.data.rowfiles import open_rows
from spmdrl.data.tokens import Masked
from spmdrl.hub.grown import with_tokens
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import check_same_tokens, load_tokenizer
from spmdrl.policy.attention.packed import check_attention
from spmdrl.policy.backends import backend
from spmdrl.policy.contract import Objective
from spmdrl.policy.distillation import DistillObjective, reader_of
from spmdrl.policy.models import Models
from spmdrl.rollout.build import context_length
from spmdrl.session.checkpoints import Checkpoints
from spmdrl.session.generators import generator_states, set_generator_states
from spmdrl.session.journal import Journal
from spmdrl.session.session import Session
from spmdrl.spmd.world import World
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.generations import Generations
from spmdrl.supervised.objective import SftObjective
from spmdrl.supervised.rows import Rows, encoded, open_mixture, pack
from spmdrl.supervised.run import SupervisedRun


def with_steps(cfg: SFTConfig, mixture: Mixture) -> SFTConfig:
    """Return the settings with the number of steps that the epochs take.

    Raises:
        ValueError: it is not known.
    """
    if cfg.run.steps:
        return cfg
    if mixture.rows is None:
        raise ValueError("--run.steps 0: a stream does not tell how many rows it has; give the number of steps")
    steps = math.ceil(cfg.sft.epochs * mixture.rows / cfg.sft.rows_per_step)
    return replace(cfg, run=replace(cfg.run, steps=steps))


def build_sft(session: Session[SFTConfig]) -> SupervisedRun:
    """Everything that one job is made of. Collective over all ranks."""
    cfg, world = session.cfg, session.world
    check_attention(cfg, world.device)
    folder = model_folder(cfg)
    tokenizer = load_tokenizer(folder, cfg.model.trust_remote_code)
    context = context_length(folder, cfg.model.trust_remote_code)
    if cfg.sft.max_tokens > context:
        session.warn(
            f"--sft.max-tokens {cfg.sft.max_tokens}: {cfg.model.path} takes {context} tokens, so {context} it is"
        )
    encoder, mixture = Encoder(cfg, tokenizer, min(cfg.sft.max_tokens, context)), open_mixture(cfg)
    session.note(f"{mixture.rows or 'a stream of'} rows from {', '.join(cfg.data.train)}")
    data = Rows(cfg, world, mixture, encoder)
    held_out = evaluation_rows(session, encoder)
    session.note(f"building policy {cfg.model.path} ({cfg.model.dtype})")
    make = backend(cfg.policy.backend)
    # Noise belongs to a token of one sequence, so that none may stand for several.
    share = cfg.policy.share_prompts and not cfg.sft.neftune
    built = replace(cfg, policy=replace(cfg.policy, share_prompts=share), model=replace(cfg.model, path=str(folder)))
    models = Models(make(built, world, cfg.run.steps, trainable=True, adapt=True))
    objective: Objective = SftObjective(cfg.sft.loss, world.data_peers)
    if cfg.teacher.path:
        objective = taught(session, models)
    checkpoints = Checkpoints(session, models, data, digest(cfg))
    generations = None
    if cfg.generate.every and held_out:
        generations = Generations(session, models, tokenizer, folder, held_out)
    run = SupervisedRun(
        session=session,
        models=models,
        objective=objective,
        data=data,
        held_out=balance(pack(dealt(held_out, world)), world) if held_out else None,
        generations=generations,
        checkpoints=checkpoints,
        journal=Journal(session, checkpoints.start_step),
        counts=Counter(),
    )
    checkpoints.begin(Generators(world))
    return run


def taught(session: Session[SFTConfig], models: Models) -> DistillObjective:
    """Build the teacher, and return the objective of learning from it. Collective.

    Raises:
        ValueError: it does not read the student's tokens.
    """
    cfg, world, told = session.cfg, session.world, session.cfg.teacher
    session.note(f"building teacher {told.path}")
    with named("--teacher.path"):
        check_same_tokens(told.path, cfg.model.path, "--teacher.path", cfg.model.trust_remote_code)
        teacher = models.reference = backend(cfg.policy.backend)(cfg, world, 0, trainable=False, path=told.path)
    reader = reader_of(told, "teacher", [cfg.model.path, told.path], cfg.model)
    head = None if told.top_k else teacher.output_head()
    return DistillObjective(told, reader, {"reference": head}, told.temperature, world.data_peers)


def model_folder(cfg: SFTConfig) -> Path:
    """Return the folder of the model, with the tokens that `--sft.add-tokens` names."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    return with_tokens(folder, cfg.sft.add_tokens, cfg.model.trust_remote_code)


def evaluation_rows(session: Session[SFTConfig], encoder: Encoder) -> list[Masked]:
    """The sequences of the held-out rows, the same on every rank; empty where there is no evaluation.

    Raises:
        ValueError: they cannot be read, or none of them can be used.
    """
    cfg = session.cfg
    if not cfg.data.eval or not cfg.eval.every:
        return []
    source: Any = open_rows(cfg.data.eval)
    if hasattr(source, "rows"):
        raise ValueError(f"--data.eval {cfg.data.eval}: a stream cannot be measured again and again; take a file")
    count = min(len(source), cfg.eval.rows or len(source))
    found = encoded([(i, Drawn(source.where(i), partial(source.__getitem__, i))) for i in range(count)], encoder)
    if not found.sequences:
        raise ValueError(f"--data.eval {cfg.data.eval}: no row can be used, such as {'; '.join(found.refused[:3])}")
    if found.refused:
        session.warn(f"{len(found.refused)} rows of --data.eval are refused, the first one is {found.refused[0]}")
    session.note(f"{count - len(found.refused)} rows of {cfg.data.eval} are held out")
    return [sequence for *_, sequence in found.sequences]


def dealt(held_out: list[Masked], world: World) -> list[tuple[int, int, Masked]]:
    """This rank's sequences of the evaluation, with their places."""
    return [(i, 0, sequence) for i, sequence in enumerate(held_out)][world.rank :: world.size]


def digest(cfg: SFTConfig) -> str:
    """A hash of the sources' names and sizes: another file of the same name is noticed at a resume."""
    told = []
    for spec in cfg.data.train:
        path = Path(split_weight(spec)[0]).expanduser()
        told.append([spec, path.stat().st_size if path.is_file() else None])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


class Generators:
    """States of the random number generators; a `session.checkpoints.RankKept`."""

    def __init__(self, world: World):
        self.world = world

    def tree(self) -> dict:
        """See the contract."""
        return {"size": self.world.size, "generators": generator_states(self.world.device)}

    def restore(self, files: list[Path]) -> str:
        """See the contract."""
        if len(files) == self.world.size:
            set_generator_states(treefile.read(files[self.world.rank])["generators"], self.world.device)
        return ""
