"""Parts of supervised fine-tuning: its rows, model and loss."""

from spmdrl.config.sft import SFTConfig
from spmdrl.hub.grown import with_tokens
from spmdrl.hub.resolve import named, resolve
from spmdrl.policy.contract import MEASURE
from spmdrl.policy.distillation import DistillObjective, reader_of
from spmdrl.policy.likelihood import SftObjective
from spmdrl.policy.models import Models
from spmdrl.session.session import Session
from spmdrl.supervised.build import Start, assemble, begin, frozen, policy
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.rows import pack
from spmdrl.supervised.run import SupervisedRun
from spmdrl.supervised.stored_teacher import StoredTeacher
from spmdrl.supervised.teacher import Written, write_teacher


def begin_sft(cfg: SFTConfig) -> Start:
    """Read the tokenizer of the model with the tokens that `--sft.add-tokens` names, and the encoder of its rows."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    folder = with_tokens(folder, cfg.sft.add_tokens, cfg.model.trust_remote_code)
    return begin(cfg, folder, lambda tokenizer, longest: Encoder(cfg.data, tokenizer, longest, cfg.sft.train_on))


def build_sft(session: Session[SFTConfig]) -> SupervisedRun:
    """Everything that a job is made of. Collective over all ranks."""
    cfg, peers = session.cfg, session.world.data_peers
    begun = begin_sft(cfg)
    # Noise belongs to a token of one sequence, so that none may stand for several.
    share = cfg.policy.share_prompts and not cfg.sft.neftune
    plain = SftObjective(cfg.sft.loss, peers)
    stored = StoredTeacher(session, begun) if cfg.teacher.read else None
    run = assemble(
        session,
        begun,
        lambda: Models(policy(session, begun.folder, share)),
        lambda models: taught(session, models, stored) if has_teacher(cfg) else plain,
        lambda sequences, step: pack(sequences, cfg.sft.neftune * (step != MEASURE), (cfg.run.seed, step)),
        stored,
    )
    run.measured, run.stored = plain if has_teacher(cfg) else None, stored
    return run


def build_teacher_files(session: Session[SFTConfig]) -> Written:
    """Write the files of `--teacher.write`; there is nothing else to do. Collective over all ranks."""
    return write_teacher(session, begin_sft(session.cfg))


def has_teacher(cfg: SFTConfig) -> bool:
    """Return True for a job that learns from a teacher."""
    return bool(cfg.teacher.path or cfg.teacher.read)


def taught(session: Session[SFTConfig], models: Models, stored: StoredTeacher | None) -> DistillObjective:
    """Build the teacher, unless it answers from files, and return the objective of learning from it. Collective.

    Raises:
        ValueError: it does not read the student's tokens.
    """
    cfg, told, peers = session.cfg, session.cfg.teacher, session.world.data_peers
    if stored:
        return DistillObjective(told, stored.reader, {"reference": None}, told.temperature, peers)
    with named("--teacher.path"):
        teacher = models.reference = frozen(session, told.path, "--teacher.path")
    reader = reader_of(told, "teacher", [cfg.model.path, told.path], cfg.model)
    head = None if told.top_k else teacher.output_head()
    return DistillObjective(told, reader, {"reference": head}, told.temperature, peers)
