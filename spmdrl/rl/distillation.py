"""Distillation: responses from the data set, the teachers' log-probabilities, and the student update.

The first teacher is the run's frozen `reference`. Teachers read the same responses as the student, but their prompts
may contain text that the student does not see.
"""

from functools import cached_property
from typing import Any, cast

import torch

from spmdrl.config.distillation import DistillationConfig
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode, episode_of
from spmdrl.data.mixture import drawn_indices
from spmdrl.data.placeholders import refuse_images
from spmdrl.data.prompts import Prompt
from spmdrl.data.template_ends import end_of_turn_tokens, job_template
from spmdrl.data.tree import prompt_lengths
from spmdrl.policy.objectives.distillation import DistillObjective, build_reader, share_name
from spmdrl.rl.alignment import Alignment
from spmdrl.rl.run import PolicyGradient, Run
from spmdrl.rl.teachers import EngineTeachers, teacher_prompts
from spmdrl.rl.update import refresh_reference
from spmdrl.spmd.seeds import seed_for
from spmdrl.tracking.metrics import Metrics

GIVEN = 0x617E
"""Seed constant for drawing the prompts whose response is taken from the data set."""


class Distillation(PolicyGradient):
    """Learning method that scores the student's samples with the teachers and moves the student towards them."""

    replays = False

    def __init__(self, run: Run):
        """Open the teachers, and render their prompts.

        Raises:
            ValueError: a setting contradicts the models or the data; the message names the setting.
        """
        super().__init__(run)
        self.cfg = cast(DistillationConfig, run.cfg)
        paths = [self.cfg.model.path, self.cfg.reference.path, *(t.path for t in self.cfg.further_teachers().values())]
        self.reader = build_reader(self.cfg.distill, "distill", paths, self.cfg.model)
        self.on_engine = EngineTeachers(run) if self.cfg.distill.on_engine else None
        self.alignment = Alignment(run, self.cfg, self.reader) if self.cfg.aligns_tokens else None
        # For a teacher with another tokenizer, `Alignment` renders the prompts.
        template = self.cfg.distill.teacher_template and self.alignment is None
        self.prompts: dict[int, list[int]] = {}
        prompts = run.prompts.prompts
        if template:
            self.prompts = teacher_prompts(self.cfg, run.tokenizer, self.cfg.data.chat_template, run.prompts)
        self.sources, self.shares_of = {p.index: p.data_source for p in prompts}, shares_by_source(self.cfg)
        if unknown := sorted(self.shares_of.keys() - {"", *self.sources.values()}):
            raise ValueError(
                f"--distill.more-teachers: no row of --data.train has the data_source {', '.join(unknown)}; its rows "
                f"have {', '.join(sorted(set(self.sources.values())))}"
            )
        if self.cfg.distill.given_per_step:
            for prompt in prompts:
                answer(prompt, self.cfg)

    def pack(self, episodes: list[Episode], step: int) -> Batch:
        """Return a batch with this rank's episodes and its responses from the data set.

        Collective, within a rollout phase.

        If the teachers run in the engine, their columns are added to the batch.
        """
        batch = super().pack(episodes + self.given(step), step)
        if self.on_engine:
            self.on_engine.read(batch, self.reader, self.shares(batch))
        return batch

    def given(self, step: int) -> list[Episode]:
        """Return this rank's share of the step's episodes with responses from the data set."""
        run, count, seed = self.run, self.cfg.distill.given_per_step, self.cfg.run.seed
        if not count or run.sampler is None or run.world.engine_tp_rank:
            return []
        prompts, world, out = run.prompts.prompts, run.world, []
        drawn = drawn_indices(len(prompts), step * count, count, seed_for(seed, GIVEN), self.cfg.data.shuffle)
        # These episodes are numbered after the sampled prompts.
        first = self.cfg.rollout.prompts_per_step
        for place in range(world.engine_index, count, world.engine_count):
            prompt = prompts[drawn[place]]
            tokens = self._response(answer(prompt, self.cfg), prompt.chat)
            whole = torch.tensor(prompt.tokens + tokens, dtype=torch.int64)
            mask = torch.arange(len(whole)) >= len(prompt.tokens)
            columns = whole, mask, torch.zeros(len(whole)), run.memory.version
            images = run.images.read_again(prompt.images) if run.images else ()
            out.append(episode_of(prompt.index, 0, first + place, *columns, images=images, reward=float("nan")))
        return out

    @cached_property
    def _turn_end(self) -> int:
        """The token that ends an answer in the chat template."""
        tokenizer: Any = self.run.tokenizer
        return next(iter(end_of_turn_tokens(tokenizer, job_template(self.cfg, tokenizer))), tokenizer.eos_token_id)

    def _response(self, text: str, chat: bool) -> list[int]:
        """Tokenize a response with its end token, truncated to `--rollout.max-new-tokens`.

        chat: True if the response's prompt was rendered with the chat template.
        """
        tokenizer: Any = self.run.tokenizer
        end = self._turn_end if chat else tokenizer.eos_token_id
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, end]
        return tokens[: self.cfg.rollout.max_new_tokens]

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add the teachers' columns to a batch. Collective over the ranks that train or score."""
        return batch, self.answer(batch)

    def answer(self, batch: Batch) -> Metrics:
        """Add the teachers' columns to a batch, on ranks that train and on ranks that only score."""
        if self.alignment is not None:
            return self.alignment.score(batch)
        for name, share_B in self.shares(batch).items():
            batch.seq[share_name(name)] = share_B
            if self.on_engine:
                continue
            # `read` is collective, so all ranks at the same data position must select the same sequences.
            selected = batch if bool((share_B > 0).all()) else batch.select(torch.nonzero(share_B > 0).flatten())
            read = with_teacher_prompts(selected, self.prompts) if self.prompts else selected
            found = self.teachers[name].read(read, self.cfg.rollout.temperature, self.reader) or self.reader.empty
            # `read` has the same sampled tokens as the selected sequences of `batch`, in the same order.
            here_T = batch.token["mask"] & batch.per_token(share_B > 0)
            for column, x_T in zip(self.reader.names(name), found, strict=True):
                batch.token[column] = x_T.new_zeros(batch.n_tokens, *x_T.shape[1:])
                batch.token[column][here_T] = x_T[read.token["mask"]]
        return Metrics()

    @property
    def teachers(self) -> dict[str, Any]:
        """All teachers by name, the reference first. The value is None for teachers that run in the engine."""
        if self.on_engine:
            return dict.fromkeys(self.on_engine.models.folders)
        return {"reference": self.run.models.reference} | self.run.models.teachers

    def shares(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return each teacher's weights [B] for the sequences, by teacher name.

        The weights for a sequence sum to 1.
        """
        sources = [self.sources[prompt] for prompt in batch.seq["prompt"].tolist()]
        rows = [self.shares_of.get(source, self.shares_of[""]) for source in sources]
        table_BK = torch.tensor(rows, dtype=torch.float64).view(len(batch), len(self.teachers))
        return dict(zip(self.teachers, table_BK.unbind(1), strict=True))

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch unchanged, because the loss is a divergence and needs no advantages."""
        return batch

    def update(self, batch: Batch, step: int) -> Metrics:
        """Update the student on a batch with the teachers' columns. Collective over the ranks that train.

        step: 0-based.
        """
        models, cfg = self.run.models, self.cfg
        stats = models.policy.update(batch, self.objective(), cfg.algo.updates_per_step)
        refresh_reference(models, cfg.reference.refresh_every, step, cfg.reference.mix)
        return stats

    def objective(self) -> DistillObjective:
        """Return the objective for an update, with the teachers' output heads. Collective over the ranks that train."""
        if self.alignment is not None:
            return self.alignment.objective()
        heads = {name: None if self.reader.top_k else each.output_head() for name, each in self.teachers.items()}
        # Student and teachers are compared at the student's sampling temperature.
        return DistillObjective(self.cfg.distill, self.reader, heads, self.cfg.rollout.temperature, self.run.peers)


def shares_by_source(cfg: DistillationConfig) -> dict[str, list[float]]:
    """Return the teachers' weights for each `data_source`, with the reference's weight first.

    The key "" holds the weights for all other sources.
    """
    further = list(cfg.further_teachers().values())
    mixed = [1.0, *(0.0 if each.source else each.weight for each in further)]
    out = {"": [weight / sum(mixed) for weight in mixed]}
    for source in {each.source for each in further} - {""}:
        alone = [0.0, *(float(each.source == source) for each in further)]
        out[source] = [weight / sum(alone) for weight in alone]
    return out


def answer(prompt: Prompt, cfg: DistillationConfig) -> str:
    """Return the data set's response to a prompt. Raises ValueError if there is none."""
    name = cfg.distill.given_column or cfg.data.answer_column
    value = prompt.ground_truth if name == cfg.data.answer_column else prompt.extra.get(name)
    if not isinstance(value, str):
        flag = "--distill.given-column" if cfg.distill.given_column else "--data.answer-column"
        raise ValueError(
            f"{flag} {name}: row {prompt.index} of --data.train has {value!r:.60} in this column instead of text; "
            "name the column of the responses, or take --distill.given-per-step 0"
        )
    return value


def with_teacher_prompts(batch: Batch, prompts: dict[int, list[int]]) -> Batch:
    """Return the batch with the student's prompts replaced by the teacher's.

    Raises:
        ValueError: an episode branches, so its paths have different prompts.
    """
    if batch.branches:
        raise ValueError(
            "episodes that branch cannot be combined with the teacher's prompts: leave --distill.teacher-template out"
        )
    refuse_images(batch, "--distill.teacher-template")
    lengths, mask_T = batch.lengths.tolist(), batch.token["mask"]
    starts = prompt_lengths(batch.lengths, mask_T).tolist()
    tokens, masks = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.bool)]
    rows = zip(batch.token["tokens"].split(lengths), mask_T.split(lengths), strict=True)
    for (tokens_L, mask_L), start, prompt in zip(rows, starts, batch.seq["prompt"].tolist(), strict=True):
        lead = torch.tensor(prompts[prompt], dtype=torch.int64)
        tokens.append(torch.cat([lead, tokens_L[start:]]))
        masks.append(torch.cat([torch.zeros(len(lead), dtype=torch.bool), mask_L[start:]]))
    read = torch.tensor([len(x) for x in tokens[1:]], dtype=torch.int64)
    return Batch(read, {"tokens": torch.cat(tokens), "mask": torch.cat(masks)}, dict(batch.seq))
