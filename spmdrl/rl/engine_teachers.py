"""Teachers in the run's own engine: their weights take the student's place once a step is sampled, and they read it.

The student's weights come back before anything is sampled again, as with judges. All ranks of an engine ask alike;
engines work on their own.
"""

from typing import cast

import torch
import torch.distributed as dist

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.judge import frozen_judges
from spmdrl.data.batch import Batch
from spmdrl.engines.engine import ReadingEngine, ScoreRequest
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.quantized import fp8_blocks
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import check_same_tokens
from spmdrl.policy.objectives.distillation import TargetReader
from spmdrl.rl.engine_judges import check_same_model, check_same_tensors
from spmdrl.rl.run import Run
from spmdrl.spmd.world import World
from spmdrl.weights.folder import Tensors

ALIKE = "a teacher in the engine has the student's architecture; leave --distill.on-engine out for others"


class EngineTeachers:
    """The teachers of a distillation on this rank's engine."""

    def __init__(self, run: Run):
        """Open the folders.

        Raises:
            ValueError: a teacher that the engine cannot be, with the setting to change.
        """
        cfg = cast(DistillationConfig, run.cfg)
        self.run, self.temperature = run, cfg.rollout.temperature
        self.folders: dict[str, Tensors] = {}
        paths, trust = cfg.engine_teachers(), cfg.model.trust_remote_code
        for name, path in paths.items():
            flag = "--reference.path" if name == "reference" else "--distill.more-teachers"
            with named(flag):
                folder = resolve(path, trust)
                check_same_tokens(path, cfg.model.path, flag, trust)
                check_same_model(folder, resolve(cfg.model.path, trust), f"{flag} {path}", trust, ALIKE)
                with plain_errors(folder):
                    self.folders[name] = Tensors(folder, fp8_blocks(folder))
                check_same_tensors(self.folders[name], run.models.policy, f"{flag} {path}", ALIKE)
        # No judge and no policy has them.
        first = -2 - len(frozen_judges(cfg))
        self.versions = {name: first - i for i, name in enumerate(paths)}

    def read(self, batch: Batch, reader: TargetReader, shares: dict[str, torch.Tensor]) -> None:
        """Add the columns of all teachers to the batch that a rank has sampled. Collective over the engine.

        shares: weight of each teacher in each sequence; one without any is not asked about it.
        """
        world = self.run.world
        engine = cast(ReadingEngine, self.run.memory.engine)
        for name, tensors in self.folders.items():
            asked_B = shares[name] > 0
            given = everyones(_given(batch, asked_B), world)
            columns = [x.new_zeros(batch.n_tokens, *x.shape[1:]) for x in reader.empty]
            if given:
                self.run.memory.lend(tensors, self.versions[name], "teacher")
                with self.run.timer("logp"):
                    found = engine.likeliest(given, reader.top_k, self.temperature, self.versions[name])
                at_T = batch.token["mask"] & batch.per_token(asked_B)
                if len(batch):
                    for column, parts in zip(columns, zip(*found, strict=True), strict=True):
                        column[at_T] = torch.cat(parts).to(column.dtype)
            batch.token |= dict(zip(reader.names(name), columns, strict=True))


def _given(batch: Batch, asked_B: torch.Tensor) -> list[ScoreRequest]:
    """The sequences of a batch that are asked about, whose trained tokens are their last ones."""
    lengths, out = batch.lengths.tolist(), []
    rows = zip(batch.token["tokens"].split(lengths), batch.token["mask"].split(lengths), asked_B.tolist(), strict=True)
    for tokens_L, mask_L, wanted in rows:
        count = int(mask_L.sum())
        if wanted and count:
            assert bool(mask_L[-count:].all()), "a response ends its sequence"
            out.append(ScoreRequest(tokens_L.tolist(), count))
    return out


def everyones(given: list[ScoreRequest], world: World) -> list[ScoreRequest]:
    """Return the sequences of an engine's first rank on all of its ranks. Collective over the engine."""
    group, device = world.engine_group, world.device
    if group is None:
        return given
    size = torch.tensor([len(given), sum(len(each.tokens) for each in given)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    numbers_N2 = torch.tensor([[len(each.tokens), each.count] for each in given], dtype=torch.int64, device=device)
    flat_T = torch.tensor([token for each in given for token in each.tokens], dtype=torch.int64, device=device)
    if world.engine_tp_rank:
        sequences, tokens = size.tolist()
        numbers_N2, flat_T = numbers_N2.new_zeros(sequences, 2), flat_T.new_zeros(tokens)
    if not int(size[0]):
        return []
    dist.broadcast(numbers_N2, group=group, group_src=0)
    dist.broadcast(flat_T, group=group, group_src=0)
    rows = flat_T.split(numbers_N2[:, 0].tolist())
    return [ScoreRequest(row.tolist(), count) for row, count in zip(rows, numbers_N2[:, 1].tolist(), strict=True)]
