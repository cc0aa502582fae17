"""Computes the reference's log p of every row before the first step, so that training needs no reference."""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable
from typing import Any

import torch

from spmdrl.config.resume import fixed_settings
from spmdrl.data.batch import Batch
from spmdrl.data.mixture import Key, Mixture
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.build import Placed, Start, digest
from spmdrl.supervised.stored import MANIFEST, NoNumbersError, Stored, indexed, read_manifest, wait, write

FOLDER, FLAG = "reference_logp", "--reference.precompute"


class Known:
    """Reads log p of the tokens of each row from files in the run folder; a `Precomputed`."""

    def __init__(self, session: Session[Any], begun: Start, pack: Callable[[Placed], Batch], build: Callable[[], Any]):
        """pack: without this column. build: builds the reference, which is freed afterwards."""
        self.session, self.begun, self.pack, self.build = session, begun, pack, build
        self.folder = session.folder / FOLDER
        self.stored: Stored | None = None

    def fill(self, mixture: Mixture, held_out: Any) -> None:
        """See the contract."""
        sources, world = indexed(mixture) + ([held_out] if held_out is not None else []), self.session.world
        of = [
            digest(self.session.cfg),
            [(source.name, len(source)) for source in sources],
            fixed_settings(self.session.cfg),
        ]
        identity = hashlib.sha256(json.dumps(of, default=str, sort_keys=True).encode()).hexdigest()
        there = (self.folder / MANIFEST).is_file() and read_manifest(self.folder, FLAG).get("of") == identity
        if all_reduce(torch.tensor([not there], dtype=torch.int32), "max", world.host_group).item():
            if world.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            wait(world)
            self.session.note(f"the reference reads {sum(map(len, sources))} rows")
            model = self.build()
            read = lambda batch: {"logp": model.logprobs(batch, 1.0, "top")[0]}  # noqa: E731
            write(self.session, sources, self.begun.encode, self.pack, read, self.folder, {"of": identity}, 1.0)
            del model, read
            # Sharded models hold cycles.
            gc.collect()
        self.stored = Stored(self.folder, read_manifest(self.folder, FLAG), FLAG, ("logp",))

    def attach(self, key: Key, sequences: list[Any]) -> None:
        """See the contract: the column is `ref_logp`."""
        assert self.stored, "it was filled"
        name, row = key
        for sequence in sequences:
            try:
                (sequence.columns["ref_logp"],) = self.stored.columns(sequence.tokens, sequence.mask, ("logp",))
            except NoNumbersError as error:
                raise ValueError(
                    f"row {row} of {name} has changed since the reference read it (--reference.precompute)"
                ) from error
