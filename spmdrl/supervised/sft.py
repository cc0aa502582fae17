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
    run = assemble(
        session,
        begun,
        lambda: Models(policy(session, begun.folder, share)),
        lambda models: taught(session, models) if cfg.teacher.path else plain,
        lambda sequences, step: pack(sequences, cfg.sft.neftune * (step != MEASURE), (cfg.run.seed, step)),
    )
    run.measured = plain if cfg.teacher.path else None
    return run


def taught(session: Session[SFTConfig], models: Models) -> DistillObjective:
    """Build the teacher, and return the objective of learning from it. Collective.

    Raises:
        ValueError: it does not read the student's tokens.
    """
    cfg, told = session.cfg, session.cfg.teacher
    with named("--teacher.path"):
        teacher = models.reference = frozen(session, told.path, "--teacher.path")
    reader = reader_of(told, "teacher", [cfg.model.path, told.path], cfg.model)
    head = None if told.top_k else teacher.output_head()
    return DistillObjective(told, reader, {"reference": head}, told.temperature, session.world.data_peers)
