"""Builds a supervised job on every rank, from the models and loss of `sft.py`, `preference.py` or `reward_model.py`."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import treefile
from spmdrl.config.supervised import SupervisedConfig, split_weight
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import balance
from spmdrl.data.mixture import Permuted
from spmdrl.data.rowfiles import open_rows
from spmdrl.data.template_ends import end_of_turn_tokens, job_template
from spmdrl.engines.build import context_length
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import check_same_tokens, load_tokenizer
from spmdrl.policy.attention.packed import check_attention
from spmdrl.policy.contract import MEASURE, Objective
from spmdrl.policy.fsdp.lora import BaseOf
from spmdrl.policy.models import Models, backend
from spmdrl.policy.self_check import choose_form
from spmdrl.session.checkpoints import Checkpoints
from spmdrl.session.image_reader import ImageReader, check_same_images, image_reader
from spmdrl.session.journal import Journal
from spmdrl.session.session import Session
from spmdrl.spmd.generators import generator_states, set_generator_states
from spmdrl.spmd.world import World
from spmdrl.supervised.generations import Generations
from spmdrl.supervised.rows import NAMED, Encode, Placed, Precomputed, Rows, encoded, open_mixture, rows_due
from spmdrl.supervised.run import SupervisedRun


@dataclass
class Start:
    """A job's tokenizer, length limit and encoder, which are available before the models are built."""

    folder: Path
    """The model folder, from which the tokenizer was loaded."""
    tokenizer: Any
    longest: int
    """Maximum number of tokens per sequence."""
    encode: Encode
    placeholder: int | None = None
    """Id of the placeholder tokens of images, or None if the model reads text only."""


def begin(cfg: SupervisedConfig, folder: Path, encoder: Callable[[Any, int, ImageReader | None], Encode]) -> Start:
    """Load the model's tokenizer and length limit, and build the encoder.

    encoder: function that takes the tokenizer, the maximum number of tokens per sequence, and the reader of images or
    None, and returns a row encoder.
    """
    trust = cfg.model.trust_remote_code
    tokenizer, longest = load_tokenizer(folder, trust), min(cfg.data.max_tokens, context_length(folder, trust))
    reader = image_reader(folder, tokenizer, trust)
    placeholder = reader.vision.image if reader else None
    return Start(folder, tokenizer, longest, encoder(tokenizer, longest, reader), placeholder)


def policy(session: Session[SupervisedConfig], folder: Path, share: bool) -> Any:
    """Build the trained model. Collective. share: whether to compute shared prompts only once."""
    cfg = session.cfg
    session.note(f"building policy {cfg.model.path} ({cfg.model.dtype})")
    built = replace(cfg, policy=replace(cfg.policy, share_prompts=share), model=replace(cfg.model, path=str(folder)))
    model = backend(cfg.policy.backend)(built, session.world, cfg.run.steps, trainable=True, adapt=True)
    choose_form(model, "policy", f"--model.path {cfg.model.path}", session.note)
    return model


def frozen(
    session: Session[SupervisedConfig], path: str, flag: str, learning: Any = None, average: bool = False
) -> Any:
    """Build a frozen language model. Collective.

    path: model path, or empty for `--model.path`. flag: name of the setting that holds the path, for messages.
    learning: the policy. If it has LoRA adapters on top of this model, return the policy with disabled adapters instead
    of a second copy of the model. average: whether the model will be updated as a moving average of the policy's
    weights.

    Raises:
        ValueError: the model's tokenizer, or its way to read images, differs from the policy's.
    """
    cfg = session.cfg
    if learning and cfg.lora.rank and path in ("", cfg.model.path):
        return BaseOf(learning)
    if path:
        with named(flag):
            check_same_tokens(path, cfg.model.path, flag, cfg.model.trust_remote_code)
            folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
            check_same_images(path, folder, cfg.model.trust_remote_code, flag)
    role = flag.split(".")[0].strip("-")
    session.note(f"building {role} {path or cfg.model.path}")
    more = {"average": True} if average else {}
    model = backend(cfg.policy.backend)(cfg, session.world, 0, trainable=False, path=path, **more)
    choose_form(model, role, f"{flag} {path}" if path else f"--model.path {cfg.model.path}", session.note)
    return model


def last_of_rows(held_out: Placed) -> list[Any]:
    """Return the last sequence of each held-out row."""
    return list({place: piece for place, _, piece in held_out}.values())


@dataclass
class Progress:
    """State that is checkpointed in addition to the models. Implements `session.checkpoints.Kept`."""

    data: Rows
    objective: Objective

    def state(self) -> dict[str, Any]:
        """Implements `Kept.state`."""
        return self.data.state() | {"moved": list(getattr(self.objective, "running", []))}

    def restore(self, state: dict[str, Any]) -> None:
        """Implements `Kept.restore`."""
        self.data.restore(state)
        if state.get("moved"):
            self.objective.running[:] = state["moved"]  # type: ignore[attr-defined]


def assemble(
    session: Session[SupervisedConfig],
    begun: Start,
    build_models: Callable[[], Models],
    build_objective: Callable[[Models], Objective],
    pack: Callable[[Placed, int], Batch],
    known: Precomputed | None = None,
    prompts_of: Callable[[Placed], list[Any]] | None = None,
) -> SupervisedRun:
    """Build a job from its rows, models and loss. Collective over all ranks.

    pack: function that turns this rank's sequences and the step number (MEASURE for an evaluation) into a batch. known:
    computes per-token values before the models are built, or None if the job needs none. prompts_of: selects the
    held-out sequences that provide the prompts of `--generate`; by default, the last sequence of each row. A prompt
    consists of the tokens before its sequence's last trained span.
    """
    cfg, world = session.cfg, session.world
    check_attention(cfg, world.device)
    if cfg.data.max_tokens > begun.longest:
        session.warn(
            f"--data.max-tokens {cfg.data.max_tokens}: {cfg.model.path} takes at most {begun.longest} tokens, so the "
            f"limit is {begun.longest}"
        )
    mixture = open_mixture(cfg)
    session.note(f"rows of {', '.join(cfg.data.train)}: {mixture.rows or 'a stream'}")
    if rows_due(cfg, mixture.rows, 0) > (mixture.rows or cfg.data.rows_per_step):
        session.warn(
            f"--data.rows-per-step {cfg.data.rows_per_step}: --data.train has fewer rows, {mixture.rows}, so a step "
            "takes some of them more than once"
        )
    note_template(session, begun.tokenizer)
    data = Rows(cfg, world, mixture, begun.encode, known)
    held_out = evaluation_rows(session, begun.encode)
    if known:
        source: Any = open_rows(cfg.data.eval) if held_out else None
        known.fill(mixture, source)
        for place, _, sequence in held_out:
            known.attach((source.name, place), [sequence])
    models = build_models()
    objective = build_objective(models)
    checkpoints = Checkpoints(session, models, Progress(data, objective), digest(cfg))
    generations = None
    if cfg.generate.every and held_out:
        answered = (prompts_of or last_of_rows)(held_out)
        generations = Generations(session, models, begun.tokenizer, begun.folder, answered)
    mine = [each for each in held_out if each[0] % world.size == world.rank]
    run = SupervisedRun(
        session=session,
        models=models,
        objective=objective,
        data=data,
        pack=pack,
        held_out=balance(pack(mine, MEASURE), world) if held_out else None,
        generations=generations,
        checkpoints=checkpoints,
        journal=Journal(session, checkpoints.start_step),
        counts=Counter(),
    )
    checkpoints.begin(Generators(world))
    return run


def note_template(session: Session[SupervisedConfig], tokenizer: Any) -> None:
    """Log which template is used if the tokenizer has none. Warn if the template ends turns without a control token."""
    cfg = session.cfg
    template = job_template(cfg, tokenizer)
    if template and not getattr(tokenizer, "chat_template", None):
        name = "ChatML" if cfg.data.chat_template == "chatml" else "--data.chat-template"
        session.note(f"the tokenizer has no chat template: rows are rendered by {name}, which is saved with the model")
    if template and not end_of_turn_tokens(tokenizer, template):
        session.warn(
            "the chat template ends a turn with no control token of the tokenizer, so the model cannot learn "
            'to stop: add its tokens (--sft.add-tokens "<|im_start|>" "<|im_end|>" for ChatML), or choose another '
            "template (--data.chat-template)"
        )


def evaluation_rows(session: Session[SupervisedConfig], encode: Encode) -> Placed:
    """Return the sequences of the held-out rows, identical on all ranks, or an empty list if the job does not evaluate.

    Raises:
        ValueError: the rows are a stream or cannot be read, or none of them is usable.
    """
    cfg = session.cfg
    if not cfg.data.eval or not cfg.eval.every:
        return []
    source: Any = open_rows(cfg.data.eval)
    if hasattr(source, "rows"):
        raise ValueError(f"--data.eval {cfg.data.eval}: a stream cannot be read again for each evaluation; use a file")
    if not len(source):
        raise ValueError(f"{cfg.data.eval} holds no rows (--data.eval)")
    count = min(len(source), cfg.eval.rows or len(source))
    rows = Permuted([source], seed=0, shuffle=False)
    found = encoded([rows.draw() for _ in range(count)], range(count), encode)
    if not found.sequences:
        raise ValueError(
            f"--data.eval {cfg.data.eval}: no row can be used: "
            f"{'; '.join(found.refused[:3]) or 'all are longer than --data.max-tokens'}"
        )
    if session.world.is_first:
        found.name_rows()
    if found.refused:
        session.warn(f"--data.eval: rows that are refused: {len(found.refused)}; the first is {found.refused[0]}")
    counts = "".join(f", {found.counts[name]} {name}" for name in NAMED if found.counts[name])
    session.note(f"held-out rows of {cfg.data.eval}: {len({place for place, *_ in found.sequences})}{counts}")
    return found.sequences


def digest(cfg: SupervisedConfig) -> str:
    """Return a hash of the `--data.train` sources and their file sizes, used to detect changed files on resume."""
    sources = []
    for spec in cfg.data.train:
        path = Path(split_weight(spec)[0]).expanduser()
        sources.append([spec, path.stat().st_size if path.is_file() else None])
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


class Generators:
    """Checkpoints the states of a rank's random number generators. Implements `session.checkpoints.RankKept`."""

    def __init__(self, world: World):
        self.world = world

    def tree(self) -> dict:
        """Implements `RankKept.tree`."""
        return {"size": self.world.size, "generators": generator_states(self.world.device)}

    def restore(self, files: list[Path]) -> str:
        """Implements `RankKept.restore`."""
        if len(files) == self.world.size:
            set_generator_states(treefile.read(files[self.world.rank])["generators"], self.world.device)
        return ""
