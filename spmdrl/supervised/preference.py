"""Builds preference learning: its rows, models and loss."""

from functools import partial

import torch

from spmdrl.config.preference import PreferenceConfig, has_pairs, has_reference, losses_of, takes_other_prompts
from spmdrl.config.schema import is_average
from spmdrl.data.batch import Batch
from spmdrl.data.preferences import CHOSEN
from spmdrl.hub.resolve import resolve
from spmdrl.policy.contract import Objective
from spmdrl.policy.models import Models, check_alike, shares_prompts
from spmdrl.policy.objectives.pairs import LabelledObjective, PairObjective
from spmdrl.session.session import Session
from spmdrl.supervised.build import Start, assemble, begin, frozen, policy
from spmdrl.supervised.pair_encoder import PairEncoder, pack_pair_sides
from spmdrl.supervised.precomputed import Known
from spmdrl.supervised.run import SupervisedRun


def begin_preference(cfg: PreferenceConfig) -> Start:
    """Read the tokenizer, and build the encoder of the rows."""
    folder, pairs = resolve(cfg.model.path, cfg.model.trust_remote_code), has_pairs(cfg.preference)
    beside = any(takes_other_prompts(name) for name in losses_of(cfg.preference))
    return begin(cfg, folder, lambda tokenizer, longest: PairEncoder(cfg.data, tokenizer, longest, pairs, beside))


def build_preference(session: Session[PreferenceConfig]) -> SupervisedRun:
    """Build the job. Collective over all ranks."""
    cfg = session.cfg
    begun, pairs, share = begin_preference(cfg), has_pairs(cfg.preference), shares_prompts(cfg.policy)

    ahead = cfg.reference.precompute
    average = is_average(cfg.reference) and cfg.policy.backend == "fsdp"
    reference = partial(frozen, session, cfg.reference.path, "--reference.path", average=average)
    columns = {"ref_logp": torch.float64 if cfg.model.dtype == "float64" else torch.float32} if ahead else None

    def models() -> Models:
        out = Models(policy(session, begun.folder, cfg.policy.share_prompts))
        if has_reference(cfg.preference) and not ahead:
            out.reference = reference(out.policy)
            out.keep_reference = cfg.reference.refresh_every > 0
            if out.keep_reference:
                check_alike(out.policy, out.reference)
        return out

    run = assemble(
        session,
        begun,
        models,
        lambda models: objective(cfg, session, models),
        lambda sequences, step: pack_pair_sides(sequences, pairs, share, columns=columns),
        Known(session, begun, partial(pack_pair_sides, pairs=pairs, share=share), reference) if ahead else None,
        lambda held_out: [piece for _, number, piece in held_out if number == CHOSEN],
    )
    if run.models.reference is not None:
        run.add_frozen = partial(add_reference, run.models)
    run.moves = cfg.reference
    return run


def add_reference(models: Models, batch: Batch) -> None:
    """Add the reference's log p of each token, unless the batch has it. Collective."""
    if "ref_logp" not in batch.token:
        batch.token["ref_logp"], _ = models.reference.logprobs(batch, 1.0, "top")


def objective(cfg: PreferenceConfig, session: Session[PreferenceConfig], models: Models) -> Objective:
    """Return the objective of the losses that the settings name."""
    chosen, peers, losses = cfg.preference, session.world.data_peers, losses_of(cfg.preference)
    if has_pairs(chosen):
        return PairObjective(losses, chosen, models.policy, peers)
    return LabelledObjective(next(iter(losses)), chosen, models.policy, peers)
