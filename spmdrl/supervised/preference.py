"""Builds preference learning: its rows, models and loss."""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spmdrl.config.preference import PreferenceConfig, has_pairs, has_reference, losses_of, takes_other_prompts
from spmdrl.config.resume import fixed_settings
from spmdrl.config.schema import is_average
from spmdrl.data.batch import Batch
from spmdrl.data.mixture import Key, Mixture
from spmdrl.data.placeholders import COLUMN, distinct_tokens
from spmdrl.data.preferences import CHOSEN
from spmdrl.hub.resolve import resolve
from spmdrl.policy.contract import Objective
from spmdrl.policy.models import Models, check_alike, shares_prompts
from spmdrl.policy.objectives.pairs import LabelledObjective, PairObjective
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.build import Start, assemble, begin, digest, frozen, policy
from spmdrl.supervised.pair_encoder import PairEncoder, pack_pair_sides
from spmdrl.supervised.rows import Placed
from spmdrl.supervised.run import SupervisedRun
from spmdrl.supervised.stored import MANIFEST, NoNumbersError, Stored, indexed, read_manifest, wait, write

AHEAD = "--reference.precompute"


def begin_preference(cfg: PreferenceConfig) -> Start:
    """Load the tokenizer and build the row encoder."""
    folder, pairs = resolve(cfg.model.path, cfg.model.trust_remote_code), has_pairs(cfg.preference)
    beside = any(takes_other_prompts(name) for name in losses_of(cfg.preference))
    encoder = lambda tokenizer, longest, images: PairEncoder(cfg.data, tokenizer, longest, pairs, beside, images)  # noqa: E731
    return begin(cfg, folder, encoder)


def build_preference(session: Session[PreferenceConfig]) -> SupervisedRun:
    """Build a preference learning job. Collective over all ranks."""
    cfg = session.cfg
    begun, pairs, share = begin_preference(cfg), has_pairs(cfg.preference), shares_prompts(cfg.policy)

    ahead = cfg.reference.precompute
    average = is_average(cfg.reference) and cfg.policy.backend == "fsdp"
    reference = partial(frozen, session, cfg.reference.path, "--reference.path", average=average)
    plain = partial(pack_pair_sides, pairs=pairs, share=share, placeholder=begun.placeholder)
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
        lambda sequences, step: plain(sequences, columns=columns),
        StoredReference(session, begun, plain, reference) if ahead else None,
        lambda held_out: [piece for _, number, piece in held_out if number == CHOSEN],
    )
    if run.models.reference is not None:
        run.add_frozen = partial(add_reference, run.models)
    run.moves = cfg.reference
    return run


def add_reference(models: Models, batch: Batch) -> None:
    """Add the column `ref_logp`, the reference's log p of each token, unless the batch already has it. Collective."""
    if "ref_logp" not in batch.token:
        assert models.reference is not None, "build_preference checks it"
        batch.token["ref_logp"], _ = models.reference.logprobs(batch, 1.0, "top")


def objective(cfg: PreferenceConfig, session: Session[PreferenceConfig], models: Models) -> Objective:
    """Return the objective that computes the losses of `--preference`."""
    chosen, peers, losses = cfg.preference, session.world.data_peers, losses_of(cfg.preference)
    if has_pairs(chosen):
        return PairObjective(losses, chosen, models.policy, peers)
    return LabelledObjective(next(iter(losses)), chosen, models.policy, peers)


class StoredReference:
    """The reference's log p of all trained tokens, stored in the run folder. Implements `Precomputed`."""

    def __init__(self, session: Session[Any], begun: Start, pack: Callable[[Placed], Batch], build: Callable[[], Any]):
        """Store the arguments. pack: packs sequences without `ref_logp`. build: builds the reference."""
        self.session, self.begun, self.pack, self.build = session, begun, pack, build
        self.folder = session.folder / "reference_logp"
        self.stored: Stored | None = None

    def fill(self, mixture: Mixture, held_out: Any) -> None:
        """Implements `Precomputed.fill`. The reference is built only if files are missing, and freed afterwards."""
        sources, world = indexed(mixture) + ([held_out] if held_out is not None else []), self.session.world
        cfg = self.session.cfg
        of = [digest(cfg), [(source.name, len(source)) for source in sources], fixed_settings(cfg)]
        identity = hashlib.sha256(json.dumps(of, default=str, sort_keys=True).encode()).hexdigest()
        there = (self.folder / MANIFEST).is_file() and read_manifest(self.folder, AHEAD).get("of") == identity
        if all_reduce(torch.tensor([not there], dtype=torch.int32), "max", world.host_group).item():
            if world.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            wait(world)
            self.session.note(f"number of rows that the reference reads: {sum(map(len, sources))}")
            model = self.build()
            read = lambda batch: {"logp": model.logprobs(batch, 1.0, "top")[0]}  # noqa: E731
            write(self.session, sources, self.begun.encode, self.pack, read, self.folder, {"of": identity}, 1.0)
            del model, read
            # Sharded models have reference cycles, so only the garbage collector frees their memory.
            gc.collect()
        self.stored = Stored(self.folder, read_manifest(self.folder, AHEAD), AHEAD, ("logp",))

    def attach(self, key: Key, sequences: list[Any]) -> None:
        """Implements `Precomputed.attach`. The added column is `ref_logp`."""
        assert self.stored, "`fill` must be called before `attach`"
        name, row = key
        for sequence in sequences:
            try:
                tokens = distinct_tokens(sequence.tokens, sequence.columns.get(COLUMN))
                (sequence.columns["ref_logp"],) = self.stored.columns(tokens, sequence.mask, ("logp",))
            except NoNumbersError as error:
                raise ValueError(
                    f"row {row} of {name} has changed since the reference's log p was computed (--reference.precompute)"
                ) from error
