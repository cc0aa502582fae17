"""Renders prompts for the teachers in distillation, and runs teachers in the engine."""

import sys
from dataclasses import replace
from typing import Any, cast

import torch

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.judge import frozen_judges
from spmdrl.data.batch import Batch
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.engines.build import context_length
from spmdrl.engines.engine import ReadingEngine, ScoreRequest
from spmdrl.hub.resolve import resolve
from spmdrl.policy.objectives.distillation import TargetReader
from spmdrl.rl.engine_models import EngineModels
from spmdrl.rl.run import Run
from spmdrl.spmd.exchange import broadcast_rows
from spmdrl.spmd.world import World


def room(cfg: DistillationConfig) -> int:
    """Return the maximum sequence length, in tokens, that all teachers can read and a micro-batch can hold."""
    trust = cfg.model.trust_remote_code
    paths = [cfg.reference.path, *(each.path for each in cfg.further_teachers().values())]
    return min(*(context_length(resolve(path, trust), trust) for path in paths), cfg.policy.max_tokens_per_microbatch)


def teacher_prompts(
    cfg: DistillationConfig, tokenizer: Any, chat_template: str, student: PromptSet
) -> dict[int, list[int]]:
    """Return the tokens of the teacher's prompts by row index.

    `--distill.teacher-template` renders them if set.

    tokenizer: the teacher's tokenizer. chat_template: template in the format of `--data.chat-template`, or empty to use
    the tokenizer's template. Without either template, prompts are plain text. student: the student's prompts.

    Raises:
        ValueError: the template cannot render a row, the teacher's prompts lack a column that the student's have, or a
            prompt is too long.
    """
    wanted = {prompt.index for prompt in student.prompts}
    template = cfg.distill.teacher_template
    left = room(cfg) - cfg.rollout.max_new_tokens
    chat = cfg.data.chat if chat_template or getattr(tokenizer, "chat_template", None) else "off"
    data = replace(cfg.data, template=template or cfg.data.template, chat_template=chat_template, chat=chat)
    found = load_prompts(cfg.data.train, data, tokenizer, sys.maxsize, cfg.data.limit, teacher=True)
    odd = [line for line in found.left if line not in student.left]
    if odd and chat != cfg.data.chat:
        raise ValueError(
            f"--reference.path {cfg.reference.path}: in the teacher's prompts {odd[0]}; the student's prompts have it, "
            "so take a teacher with a chat template, or leave the column out of the rows"
        )
    tokens = {prompt.index: prompt.tokens for prompt in found.prompts if prompt.index in wanted}
    if long := sum(len(each) > left for each in tokens.values()):
        flag = "--distill.teacher-template: with it" if template else "--distill.align: in the teacher's tokens"
        shorten = "shorten it, or leave" if template else "leave"
        raise ValueError(
            f"{flag} {long} of {len(tokens)} prompts of --data.train are longer than the {left} tokens that the "
            f"teachers' contexts and --policy.max-tokens-per-microbatch leave room for; {shorten} those rows out"
        )
    return tokens


class EngineTeachers:
    """Teachers that run in this rank's engine. After sampling, their weights temporarily replace the student's."""

    def __init__(self, run: Run):
        """Open the teachers' folders.

        Raises:
            ValueError: a teacher cannot run in the engine; the message names the setting to change.
        """
        cfg = cast(DistillationConfig, run.cfg)
        self.run, self.temperature = run, cfg.rollout.temperature
        advice = "a teacher in the engine needs the student's architecture; leave --distill.on-engine out for others"
        # Frozen judges have weight versions -2, -3 and so on; the teachers get the next lower numbers.
        self.models = EngineModels(cfg, -2 - len(frozen_judges(cfg)), advice)
        for name, path in cfg.engine_teachers().items():
            self.models.open(name, path, "--reference.path" if name == "reference" else "--distill.more-teachers")
        self.models.check_policy(run.models.policy)

    def read(self, batch: Batch, reader: TargetReader, shares: dict[str, torch.Tensor]) -> None:
        """Add the columns of all teachers to a batch that this rank sampled. All ranks of the engine must call this.

        shares: weight of each teacher for each sequence. A teacher skips sequences for which its weight is 0.
        """
        world, memory = self.run.world, self.run.memory
        engine = cast(ReadingEngine, memory.engine)
        for name in self.models.folders:
            read_B = shares[name] > 0
            requests = _share(_requests(batch, read_B), world)
            columns = [x.new_zeros(batch.n_tokens, *x.shape[1:]) for x in reader.empty]
            if requests:
                version = self.models.load(name, memory, "teacher")
                with self.run.timer("logp"):
                    found = engine.likeliest(requests, reader.top_k, self.temperature, version)
                at_T = batch.token["mask"] & batch.per_token(read_B)
                if len(batch):
                    for column, parts in zip(columns, zip(*found, strict=True), strict=True):
                        column[at_T] = torch.cat(parts).to(column.dtype)
            batch.token |= dict(zip(reader.names(name), columns, strict=True))


def _requests(batch: Batch, read_B: torch.Tensor) -> list[ScoreRequest]:
    """Return scoring requests for the selected sequences. The trained tokens come last in each sequence."""
    lengths, out = batch.lengths.tolist(), []
    rows = zip(batch.token["tokens"].split(lengths), batch.token["mask"].split(lengths), read_B.tolist(), strict=True)
    for tokens_L, mask_L, wanted in rows:
        count = int(mask_L.sum())
        if wanted and count:
            assert bool(mask_L[-count:].all()), "a response ends its sequence"
            out.append(ScoreRequest(tokens_L.tolist(), count))
    return out


def _share(requests: list[ScoreRequest], world: World) -> list[ScoreRequest]:
    """Broadcast the requests of the engine's first rank, which has all samples. Collective over the engine."""
    sizes_N2 = torch.tensor([[len(each.tokens), each.count] for each in requests], dtype=torch.int64).view(-1, 2)
    tokens_T = torch.tensor([token for each in requests for token in each.tokens], dtype=torch.int64)
    sizes_N2, tokens_T = (broadcast_rows(rows, world.engine_group, world.device) for rows in (sizes_N2, tokens_T))
    pieces = tokens_T.split(sizes_N2[:, 0].tolist())
    return [ScoreRequest(piece.tolist(), count) for piece, count in zip(pieces, sizes_N2[:, 1].tolist(), strict=True)]
