"""The reference's log p of every row, computed before the first step, so that no reference is there while it learns."""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from spmdrl.config.resume import settled
from spmdrl.data.batch import Batch, balance
from spmdrl.data.mixture import Drawn, Key, Mixture, Permuted
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.build import Placed, Start, digest
from spmdrl.supervised.rows import encoded

FOLDER, DONE = "reference_logp", "DONE"
STEPS = 4
"""Steps' rows that are computed together."""


class Known:
    """Log p of the tokens of each row, from files in the run folder that ranks have written; a `Precomputed`."""

    def __init__(self, session: Session[Any], begun: Start, pack: Callable[[Placed], Batch], build: Callable[[], Any]):
        """pack: without this column. build: makes the reference, which is gone afterwards."""
        self.session, self.begun, self.pack, self.build = session, begun, pack, build
        self.folder = session.folder / FOLDER
        self.places: dict[str, torch.Tensor] = {}
        """Name of a source -> int64 [rows, 2 sides, 3]: file, first number in it, count; -1: there is none."""
        self.logp: list[torch.Tensor] = []

    def fill(self, mixture: Mixture, held_out: Any) -> None:
        """See the contract."""
        parts = [part for part in mixture.parts if isinstance(part, Permuted)]
        sources = [source for part in parts for source in part.sources] + ([held_out] if held_out is not None else [])
        of = [digest(self.session.cfg), [(source.name, len(source)) for source in sources], settled(self.session.cfg)]
        told = hashlib.sha256(json.dumps(of, default=str, sort_keys=True).encode()).hexdigest()
        done = self.folder / DONE
        stale = torch.tensor([not done.exists() or done.read_text() != told], dtype=torch.int32)
        if all_reduce(stale, "max", self.session.world.host_group).item():
            if self.session.world.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            _wait(self.session)
            self._compute(sources, self.build())
            # Sharded models hold cycles.
            gc.collect()
            _wait(self.session)
            if self.session.world.is_first:
                done.write_text(told)
        self._read()

    def _compute(self, sources: list[Any], model: Any) -> None:
        cfg, world = self.session.cfg, self.session.world
        everyone = [(number, row) for number, source in enumerate(sources) for row in range(len(source))]
        self.session.note(f"the reference reads {len(everyone)} rows")
        rows: list[tuple[int, ...]] = []
        logp: list[torch.Tensor] = []
        count = max(STEPS * cfg.data.rows_per_step, world.size)
        for start in range(0, len(everyone), count):
            part = everyone[start : start + count]
            drawn = [Drawn(sources[n].where(row), partial(sources[n].__getitem__, row)) for n, row in part]
            mine = encoded(drawn, range(world.rank, len(part), world.size), self.begun.encode)
            batch = balance(self.pack(mine.sequences), world)
            with self.session.timer("logp"):
                found_T, _ = model.logprobs(batch, 1.0, "top")
            mask_T = batch.token["mask"]
            count_B = batch.sum_tokens(torch.ones_like(found_T)).long()
            keys = zip(*(x.tolist() for x in (batch.seq["position"], batch.seq["sample"], count_B)), strict=True)
            rows += [(*part[position], sample, trained) for position, sample, trained in keys]
            logp.append(found_T[mask_T])
        position = (world.holders == world.rank).nonzero()
        if len(position) and int(position[0, 1]) == 0:
            tensors = {"rows": torch.tensor(rows, dtype=torch.int64).view(-1, 4), "logp": torch.cat(logp)}
            names = json.dumps([source.name for source in sources])
            save_file(tensors, self.folder / f"{int(position[0, 0])}.safetensors", {"names": names})

    def _read(self) -> None:
        # Another number of ranks may have written them.
        for number, path in enumerate(sorted(self.folder.glob("*.safetensors"))):
            with safe_open(path, "pt") as file:
                names, rows_N4 = json.loads(file.metadata()["names"]), file.get_tensor("rows")
                self.logp.append(file.get_tensor("logp"))
            start_N = rows_N4[:, 3].cumsum(0) - rows_N4[:, 3]
            for source, name in enumerate(names):
                here = rows_N4[:, 0] == source
                row, side = rows_N4[here, 1], rows_N4[here, 2]
                size = int(row.max()) + 1 if len(row) else 0
                table = self.places.get(name, torch.full((0, 2, 3), -1, dtype=torch.int64))
                if len(table) < size:
                    table = torch.cat([table, torch.full((size - len(table), 2, 3), -1, dtype=torch.int64)])
                table[row, side] = torch.stack([torch.full_like(row, number), start_N[here], rows_N4[here, 3]], 1)
                self.places[name] = table

    def attach(self, key: Key, samples: list[int], sequences: list[Any]) -> None:
        """See the contract: the column is `ref_logp`."""
        name, row = key
        table = self.places.get(name)
        known = table[row].tolist() if table is not None and row < len(table) else [(-1, 0, 0)] * 2
        for sample, sequence in zip(samples, sequences, strict=True):
            number, start, count = known[sample]
            if number < 0 or count != int(sequence.mask.sum()):
                raise ValueError(
                    f"row {row} of {name} has changed since the reference read it (--reference.precompute)"
                )
            logp_T = torch.zeros(len(sequence), dtype=self.logp[number].dtype)
            sequence.columns["ref_logp"] = logp_T.masked_scatter(
                sequence.mask, self.logp[number][start : start + count]
            )


def _wait(session: Session[Any]) -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier(group=session.world.host_group)
