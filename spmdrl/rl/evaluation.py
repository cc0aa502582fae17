"""Evaluates the policy with a rollout over a prompt set, and computes metrics from the rewards."""

import json
import math
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.data.distribute import balance
from spmdrl.data.episode import Episode
from spmdrl.data.pack import from_episodes
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.data.scores import counts_as_right
from spmdrl.health.failure import exit_reason
from spmdrl.health.preempt import preemption
from spmdrl.health.status import rank_status
from spmdrl.policy.models import Models
from spmdrl.rewards.load import check_ungraded
from spmdrl.rl.reading import AtLast
from spmdrl.rl.rollout_plan import RolloutPlan
from spmdrl.rl.sampler import Sampler, may_end
from spmdrl.spmd.exchange import all_gather_rows, all_gather_text, all_reduce
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer
from spmdrl.tracking.trackers import plain

EVALUATION = 0x45564C
"""Seed constant for evaluations. It is the same at every step, so that evaluations are comparable."""
MEASURED = "eval/measured"
"""Metric name under which an interruptible evaluation stores its number of samples."""


class Evaluation:
    """Evaluates the policy during a run, and keeps the metrics until they are logged."""

    def __init__(
        self,
        cfg: Config,
        world: World,
        prompts: PromptSet | None,
        sampler: Sampler | None,
        models: Models,
        placeholder: int | None = None,
    ):
        """Store the arguments.

        prompts: None if the run never evaluates. sampler: None on a rank that does not sample. placeholder: as in
        `from_episodes`.
        """
        self.cfg, self.world, self.prompts, self.sampler, self.models = cfg, world, prompts, sampler, models
        self.placeholder = placeholder
        self.numbers: dict[str, float] = {}
        """Metrics `eval/...` of the last evaluation, kept until `take` returns them; equal on all ranks of a role."""
        self.rows: list[dict] = []
        """Rows about some conversations, kept on the first rank until they are written to samples.jsonl."""
        self.to_judge: list[Episode] | None = None
        """Episodes of this rank that the reward model still has to score, or None if no evaluation is waiting for
        scores."""
        self.keeps_graded = False

    def keep_graded(self) -> None:
        """Make an interrupted evaluation return its partial results instead of raising an error."""
        rank_status.keeps_partial = self.keeps_graded = True

    def is_due(self, step: int, force: bool = False) -> bool:
        """Return True if an evaluation is due before `step` (0-based).

        force: True after the last step. An evaluation is then due unless `--eval.every` is 0.
        """
        every = self.cfg.eval.every
        return self.prompts is not None and bool(every) and (step % every == 0 or force)

    def sample(self, name: str, version: int) -> list[Episode]:
        """Evaluate weight version `version`, and return this rank's episodes. Collective over the ranks that sample.

        name: name of the evaluation, unique in the run.

        Raises:
            AbandonedError: the evaluation was interrupted, and `keep_graded` was not called. Every rank that samples
                raises it.
        """
        if self.sampler is None:
            return []
        assert self.prompts is not None
        plan = evaluation_plan(self.cfg, self.prompts.prompts, version, name)
        if self.keeps_graded:
            plan.keeps_graded, plan.may_end = True, lambda: preemption.requested
        self.numbers, episodes, measured = evaluate(plan, self.sampler)
        self.numbers |= {MEASURED: float(measured)} if self.keeps_graded else {}
        return episodes

    def judge(self) -> None:
        """Add reward-model scores to the metrics if an evaluation is waiting for them. Collective over all ranks."""
        if self.to_judge is None:
            return
        assert self.prompts is not None
        scores = model_scores(self.to_judge, self.prompts, self.models, self.world, self.placeholder)
        self.to_judge = None
        self.numbers |= scores
        self.numbers["eval/score"] += self.cfg.reward.model_coef * scores["eval/model"]

    def take(self) -> dict[str, float]:
        """Return the metrics and clear them."""
        numbers, self.numbers = self.numbers, {}
        return numbers

    def summary(self) -> dict[str, Any]:
        """Return the model, data, counts and metrics as JSON values.

        If the evaluation was interrupted, `stopped` gives the reason.
        """
        assert self.prompts is not None
        prompts, each = len(self.prompts), self.cfg.eval.samples
        out: dict[str, Any] = {"model": self.cfg.model.path, "data": self.cfg.data.eval}
        out |= {"prompts": prompts, "samples": prompts * each}
        measured = int(self.numbers.pop(MEASURED))
        if measured < out["samples"]:
            # A prompt is counted only if all of its samples are graded.
            out |= {"prompts": measured // each, "samples": measured, "stopped": exit_reason()}
        return out | {name: plain(value) for name, value in self.numbers.items()}

    def show(self, rows: list[dict]) -> None:
        """Keep rows about some conversations of the first sampling rank until `take_rows` returns them.

        Collective over all ranks under split placement.
        """
        self.rows = [row | {"evaluation": True} for row in rows]
        if self.world.roles.split:
            texts = all_gather_text(json.dumps(self.rows), self.world.host_group)
            self.rows = json.loads(texts[self.world.roles.samplers[0]])

    def take_rows(self, step: int) -> list[dict]:
        """Return and clear the rows for samples.jsonl. Only the first rank has rows.

        step: step of the evaluation (1-based).
        """
        rows, self.rows = self.rows, []
        return [row | {"step": step} for row in rows]


def evaluation_plan(cfg: Config, prompts: list[Prompt], version: int, name: str) -> RolloutPlan:
    """Return the rollout plan of an evaluation: all prompts, in order."""
    return RolloutPlan(
        f"eval/{name}",
        prompts,
        cfg.eval.samples,
        (cfg.run.seed, EVALUATION),
        version,
        cfg.rollout.max_new_tokens,
        cfg.eval.temperature,
        cfg.eval.top_p,
        cfg.rollout.assignment,
        bad_sample=cfg.filter.bad_sample,
        in_order=cfg.run.deterministic,
        may_end=may_end,
    )


def evaluate(plan: RolloutPlan, sampler: Sampler) -> tuple[dict[str, float], list[Episode], int]:
    """Return the metrics, this rank's episodes, and the number of completed samples on all ranks.

    The metrics are `eval/accuracy` (fraction of correct samples), `eval/score` (mean reward), `eval/pass@k`, and
    `eval/turns` with an environment. The metrics exclude samples that could not be graded. Collective over the ranks
    that sample.

    Raises:
        AbandonedError: the rollout was interrupted and `plan.keeps_graded` is False. Every sampling rank raises it.
    """
    world, cfg = sampler.world, sampler.cfg
    # The rollout gets its own timer, because its time is reported as evaluation time.
    done = sampler.rollout(plan, Timer()).episodes
    # A sample without a score (--filter.bad-sample skip) counts as wrong. A sample that could not be graded is
    # excluded.
    scores = [
        (e.position, 0.0 if math.isnan(e.reward) else e.reward, e.ungraded, e.turns, counts_as_right(e.reward, e.parts))
        for e in done
    ]
    scores_n5 = torch.tensor(scores, dtype=torch.float64).reshape(-1, 5)
    rows = torch.cat(all_gather_rows(scores_n5, world.rollout_group))
    ungraded = rows[:, 2] > 0
    why = next((e.why for e in done if e.why), "")
    check_ungraded(int(ungraded.sum()), len(rows), cfg.reward, "the evaluation", plan.samples, cfg.env, why)
    measured, rows = len(rows), rows[~ungraded]
    right, position, prompts = rows[:, 4], rows[:, 0].long(), len(plan.prompts)
    right_P = torch.zeros(prompts, dtype=torch.float64).index_add_(0, position, right).tolist()
    graded_P = torch.bincount(position, minlength=prompts).tolist()
    out = {"eval/accuracy": right.mean().item(), "eval/score": rows[:, 1].mean().item()}
    if sampler.environment:
        out["eval/turns"] = rows[:, 3].mean().item()
    k = 2
    while k <= plan.samples:
        known = [pass_at_k(n, int(c), k) for n, c in zip(graded_P, right_P, strict=True) if n >= k]
        out[f"eval/pass@{k}"] = sum(known) / len(known) if known else math.nan
        k *= 2
    return out, done, measured


def model_scores(
    episodes: list[Episode], prompts: PromptSet, models: Models, world: World, placeholder: int | None = None
) -> dict[str, float]:
    """Return the mean reward-model score of the episodes on all ranks. Collective over all ranks.

    The keys are `eval/model` for the overall score and `eval/model/<label>` for each label. placeholder: as in
    `from_episodes`.
    """
    batch = from_episodes(episodes, placeholder=placeholder)
    batch.seq |= {"update": torch.zeros_like(batch.lengths), "work": batch.lengths}
    batch = balance(batch, world)
    reading = models.reading.of(prompts) if models.reading else AtLast()
    names = ["eval/model", *(f"eval/model/{name}" for name in reading.names)]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    if models.reward_model:
        scores = reading.read(batch, models.reward_model)
        of_each = (scores.response_B, *scores.labels.values(), torch.ones(len(batch)))
        # If an episode branches, its final answer is in the last path.
        sums = torch.stack([x[batch.lasts].sum() for x in of_each])
    # Ranks at the same data position hold the same sequences. All sequences are counted the same number of times, so
    # the mean is correct.
    *totals, count = all_reduce(sums.double(), "sum", world.host_group).tolist()
    return {name: total / max(1.0, count) for name, total in zip(names, totals, strict=True)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples.

    pass@k is the probability that at least one of k samples is correct.

    Source: https://arxiv.org/abs/2107.03374.
    """
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
