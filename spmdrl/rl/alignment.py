"""Distills from a teacher with a different tokenizer, by comparing spans of text.

The teacher reads its own prompt, followed by the student's response re-encoded with the teacher's tokenizer. The loss
compares text spans that end at a token boundary in both tokenizations (`rl/retokenize.py`,
`policy/objectives/aligned.py`). The metric `align/left_out` is the fraction of responses that cannot be aligned; the
log gives the reasons.
"""

import logging

import torch

from spmdrl.config.distillation import DistillationConfig
from spmdrl.data.batch import Batch
from spmdrl.data.chat import chosen_template
from spmdrl.data.placeholders import refuse_images
from spmdrl.data.template_ends import job_template
from spmdrl.data.tree import prompt_lengths
from spmdrl.engines.build import stop_tokens
from spmdrl.health.status import tick
from spmdrl.hub.build import never_sampled
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import has_tokenizer, load_tokenizer
from spmdrl.policy.contract import OutputHead, Policy
from spmdrl.policy.objectives.aligned import LEAD, OUTSIDE, SHIFT, AlignedObjective
from spmdrl.policy.objectives.distillation import TargetReader
from spmdrl.rl.retokenize import Aligned, Pair, UnreadableError
from spmdrl.rl.run import Run
from spmdrl.rl.teachers import room, teacher_prompts
from spmdrl.tracking.metrics import Metrics
from spmdrl_kernels.aligned import Matched
from spmdrl_kernels.linear import linear_logprob, wide

log = logging.getLogger("spmdrl")


class Alignment:
    """Runs the teacher and aligns its tokens with the student's, for distillation across tokenizers."""

    def __init__(self, run: Run, cfg: DistillationConfig, reader: TargetReader):
        """reader: computes the student's targets from the teacher's hidden states.

        Raises:
            ValueError: the teacher has no tokenizer, or its prompts are too long or cannot be rendered.
        """
        self.run, self.cfg, self.reader = run, cfg, reader
        trust = cfg.model.trust_remote_code
        own, folder = resolve(cfg.model.path, trust), resolve(cfg.reference.path, trust)
        if not has_tokenizer(folder):
            raise ValueError(
                f"--reference.path {cfg.reference.path}: the folder has no tokenizer, which --distill.align "
                f"{cfg.distill.align} needs to encode the student's text; copy the tokenizer's files into the folder, "
                "or take --distill.align off"
            )
        tokenizer = load_tokenizer(folder, trust)
        template, theirs = job_template(cfg, run.tokenizer), chosen_template(tokenizer)
        ends = stop_tokens(own, run.tokenizer, template), stop_tokens(folder, tokenizer, theirs)
        self.pair = Pair(run.tokenizer, tokenizer, *ends, template)
        # --data.chat-template is meant for the student's tokenizer, so the teacher's prompts do not use it.
        self.prompts, self.room = teacher_prompts(cfg, tokenizer, "", run.prompts), room(cfg)
        self.matched = None
        if cfg.distill.align == "gold":
            mine, theirs = (read_config(each, trust) for each in (own, folder))
            sizes = mine.get_text_config().vocab_size, theirs.get_text_config().vocab_size
            common = self.pair.both(sizes, (never_sampled(mine), never_sampled(theirs)))
            self.matched = Matched(*common, cfg.distill.beta)
        self.named: set[str] = set()

    @property
    def teacher(self) -> Policy:
        """The teacher model, which is on the ranks that train."""
        assert self.run.models.reference is not None
        return self.run.models.reference

    def objective(self) -> AlignedObjective:
        """Return the objective for an update. Collective over the ranks that train."""
        run, head, matched = self.run, self.teacher.output_head(), self.matched
        if matched is not None:
            here = run.world.device
            matched = Matched(matched.student_M.to(here), matched.teacher_M.to(here), matched.beta)
        temperature = self.cfg.rollout.temperature
        return AlignedObjective(
            self.cfg.distill, self.reader, head, matched, temperature, run.peers, run.world.sp_group
        )

    def score(self, batch: Batch) -> Metrics:
        """Add the teacher's columns to a batch. Collective over the ranks that train."""
        found, metrics = self.align(batch)
        kept = [i for i, each in enumerate(found) if each is not None]
        read = self.in_teacher_tokens(batch, kept, [each for each in found if each is not None])
        (states_UE,) = self.teacher.read(read, self.cfg.rollout.temperature, self.reader) or self.reader.empty
        base, others, span = self.places(batch, read, kept, [each for each in found if each is not None])
        lead_T = torch.full((batch.n_tokens,), OUTSIDE, dtype=torch.int32)
        for mine, at in zip(span, base[0].tolist(), strict=True):
            lead_T[mine.start : mine.stop] = at - torch.arange(mine.start, mine.stop, dtype=torch.int32)
        batch.token[LEAD] = lead_T
        name = self.reader.names("reference")[0]
        batch.token[name] = states_UE.new_zeros(batch.n_tokens, states_UE.shape[1])
        batch.token[name][base[0]] = states_UE[base[1]]
        batch.token[SHIFT] = torch.zeros(batch.n_tokens, dtype=wide(states_UE))
        batch.token[SHIFT].index_add_(0, base[0][others[0]], self.factors(read, states_UE, others[1]))
        inside = int((lead_T[batch.token["mask"]] != OUTSIDE).sum())
        tokens = int(batch.token["mask"].sum())
        metrics.add("align/tokens", inside / max(1, tokens), tokens)
        metrics.add("align/span", inside / max(1, len(span)), len(span))
        return metrics

    def align(self, batch: Batch) -> tuple[list[Aligned | None], Metrics]:
        """Return each sequence's alignment, and metrics.

        The alignment is None for a sequence that cannot be aligned; `align/left_out` is the fraction of such sequences.
        """
        lengths, metrics, out = batch.lengths.tolist(), Metrics(), []
        starts = prompt_lengths(batch.lengths, batch.token["mask"]).tolist()
        rows = zip(batch.token["tokens"].split(lengths), batch.token["mask"].split(lengths), strict=True)
        seq = zip(starts, batch.seq["prompt"].tolist(), batch.identity["paths"].tolist(), strict=True)
        for (tokens_L, mask_L), (start, prompt, paths) in zip(rows, seq, strict=True):
            tick()
            try:
                if paths > 1 or not mask_L[start:].all():
                    raise UnreadableError("it has several turns")
                aligned = self.pair.align(tokens_L[start:].tolist(), tokens_L[:start].tolist())
                if (length := len(self.prompts[prompt]) + len(aligned.teacher)) > self.room:
                    raise UnreadableError(
                        f"it has {length} tokens for the teacher, whose context and --policy.max-tokens-per-microbatch "
                        f"allow {self.room}"
                    )
                out.append(aligned)
            except UnreadableError as why:
                out.append(None)
                if (text := str(why)) not in self.named and len(self.named) < 20:
                    self.named.add(text)
                    log.warning("--distill.align: a response to row %d is left out: %s", prompt, text)
            metrics.add("align/left_out", float(out[-1] is None))
        return out, metrics

    def in_teacher_tokens(self, batch: Batch, kept: list[int], found: list[Aligned]) -> Batch:
        """Return the aligned sequences in the teacher's tokens, each with the teacher's prompt in front.

        kept: indices of the aligned sequences in the batch; found: their alignments.
        """
        refuse_images(batch, "--distill.align")
        chosen = batch.select(torch.tensor(kept, dtype=torch.int64))
        prompts = [self.prompts[prompt] for prompt in chosen.seq["prompt"].tolist()]
        pairs = [(prompt, each.teacher) for prompt, each in zip(prompts, found, strict=True)]
        tokens = torch.tensor([token for prompt, response in pairs for token in prompt + response], dtype=torch.int64)
        mask = [x for prompt, response in pairs for x in [False] * len(prompt) + [True] * len(response)]
        lengths = torch.tensor([len(prompt) + len(response) for prompt, response in pairs], dtype=torch.int64)
        return Batch(lengths, {"tokens": tokens, "mask": torch.tensor(mask, dtype=torch.bool)}, dict(chosen.seq))

    def places(
        self, batch: Batch, read: Batch, kept: list[int], found: list[Aligned]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[range]]:
        """Return the token positions of the N aligned spans in `batch` (student) and `read` (teacher).

        Each span has one base token of the student and one of the teacher. The loss compares the two models'
        distributions at these base tokens.

        Returns:
            The positions of the base tokens: the student's in `batch` [N] and the teacher's in `read` [N].
            For each of the teacher's M other tokens in the spans, the index of its span [M] and its position in `read`
                [M].
            For each span, the range of its positions in `batch`.
        """
        last = self.cfg.distill.merge == "last"
        starts = [
            (one.cu_seqlens[:-1] + prompt_lengths(one.lengths, one.token["mask"])).tolist() for one in (batch, read)
        ]
        base: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        spans: list[range] = []
        for number, (index, aligned) in enumerate(zip(kept, found, strict=True)):
            first = starts[0][index], starts[1][number]
            for mine, theirs in aligned.spans:
                here = range(first[0] + mine.start, first[0] + mine.stop)
                there = range(first[1] + theirs.start, first[1] + theirs.stop)
                base.append((here[-1 if last else 0], there[-1 if last else 0]))
                others += [(len(spans), row) for row in there if row != base[-1][1]]
                spans.append(here)
        return columns(base), columns(others), spans

    @torch.no_grad()
    def factors(self, read: Batch, states_UE: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
        """Return the teacher's logp for the tokens at positions `rows_M` of `read`, as a CPU tensor.

        Collective over the ranks that train.
        """
        head: OutputHead = self.teacher.output_head()
        if not len(rows_M):
            return torch.zeros(0, dtype=wide(states_UE))
        here = self.run.world.device
        logp_M, _ = linear_logprob(
            *(states_UE[rows_M].to(here), head.weight_VD, read.token["tokens"][rows_M].to(here)),
            self.cfg.rollout.temperature * head.divisor,
            entropy=False,
            softcap=head.softcap,
            excluded=head.excluded,
        )
        return logp_M.cpu()


def columns(pairs: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the first and the second numbers of the pairs as two int64 tensors."""
    return list(torch.tensor(pairs, dtype=torch.int64).reshape(len(pairs), 2).unbind(1))
