"""Measures the policy on a prompt set: a rollout, and the numbers made of its scores."""

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
"""Key of evaluation draws: the same at every step, so that two evaluations are comparable."""
MEASURED = "eval/measured"
"""Number of samples that an evaluation measured which keeps what is graded."""


class Evaluation:
    """Evaluates the policy while a run trains it, and holds the numbers until they are logged."""

    def __init__(self, cfg: Config, world: World, prompts: PromptSet | None, sampler: Sampler | None, models: Models):
        """prompts: None to never evaluate. sampler: None on a rank that does not sample."""
        self.cfg, self.world, self.prompts, self.sampler, self.models = cfg, world, prompts, sampler, models
        self.numbers: dict[str, float] = {}
        """`eval/...` of the last evaluation, alike on the ranks of a kind, until `take`."""
        self.rows: list[dict] = []
        """Rows of some conversations for samples.jsonl, until they are written; on the first rank."""
        self.to_judge: list[Episode] | None = None
        """Episodes of this rank that the reward model has not seen."""
        self.keeps_graded = False

    def keep_graded(self) -> None:
        """If an evaluation is interrupted, have it return the results until then in place of an error."""
        rank_status.keeps_partial = self.keeps_graded = True

    def is_due(self, step: int, force: bool = False) -> bool:
        """Return True if an evaluation is due before a step, counted from 0.

        force: evaluate once more, whatever the step.
        """
        every = self.cfg.eval.every
        return self.prompts is not None and bool(every) and (step % every == 0 or force)

    def sample(self, name: str, version: int) -> list[Episode]:
        """Evaluate the weights of `version`; return this rank's episodes. Collective over samplers.

        name: unique in the run.

        Raises:
            AbandonedError: on every rank that samples.
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
        """Add the reward model's scores, also to `eval/score`, if an evaluation waits for them. Collective."""
        if self.to_judge is None:
            return
        assert self.prompts is not None
        scores, self.to_judge = model_scores(self.to_judge, self.prompts, self.models, self.world), None
        self.numbers |= scores
        self.numbers["eval/score"] += self.cfg.reward.model_coef * scores["eval/model"]

    def take(self) -> dict[str, float]:
        """Return the numbers, once."""
        numbers, self.numbers = self.numbers, {}
        return numbers

    def summary(self) -> dict[str, Any]:
        """Return what was measured and the numbers, as JSON values; `stopped`: why an evaluation was interrupted."""
        assert self.prompts is not None
        prompts, each = len(self.prompts), self.cfg.eval.samples
        out: dict[str, Any] = {"model": self.cfg.model.path, "data": self.cfg.data.eval}
        out |= {"prompts": prompts, "samples": prompts * each}
        measured = int(self.numbers.pop(MEASURED))
        if measured < out["samples"]:
            # Prompts count with all of their samples or not at all.
            out |= {"prompts": measured // each, "samples": measured, "stopped": exit_reason()}
        return out | {name: plain(value) for name, value in self.numbers.items()}

    def show(self, rows: list[dict]) -> None:
        """Take some conversations, as rows of the first rank that samples. Collective under `split`."""
        self.rows = [row | {"evaluation": True} for row in rows]
        if self.world.roles.split:
            texts = all_gather_text(json.dumps(self.rows), self.world.host_group)
            self.rows = json.loads(texts[self.world.roles.samplers[0]])

    def take_rows(self, step: int) -> list[dict]:
        """Return the rows for samples.jsonl, once; only the first rank has any.

        step: of the evaluation, counted from 1.
        """
        rows, self.rows = self.rows, []
        return [row | {"step": step} for row in rows]


def evaluation_plan(cfg: Config, prompts: list[Prompt], version: int, name: str) -> RolloutPlan:
    """Return the plan of the rollout that evaluates: every prompt, in order."""
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
    """Return the numbers, this rank's episodes, and how many samples all ranks measured. Collective over samplers.

    The numbers are `eval/accuracy` (share of samples that are right), `eval/score`, pass@k, and `eval/turns` with an
    environment.

    Raises:
        AbandonedError: on every rank that samples.
    """
    world, cfg = sampler.world, sampler.cfg
    # Its time is the evaluation's.
    done = sampler.rollout(plan, Timer()).episodes
    # A sample without a score (--filter.bad-sample skip) is not right; one that could not be graded does not count.
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


def model_scores(episodes: list[Episode], prompts: PromptSet, models: Models, world: World) -> dict[str, float]:
    """Return the reward model's mean scores of the episodes of all ranks: `eval/model`, and by label. Collective."""
    batch = from_episodes(episodes)
    batch.seq |= {"update": torch.zeros_like(batch.lengths), "work": batch.lengths}
    batch = balance(batch, world)
    reading = models.reading.of(prompts) if models.reading else AtLast()
    names = ["eval/model", *(f"eval/model/{name}" for name in reading.names)]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    if models.reward_model:
        scores = reading.read(batch, models.reward_model)
        of_each = (scores.response_B, *scores.labels.values(), torch.ones(len(batch)))
        # The last path of an episode that branches holds its final answer.
        sums = torch.stack([x[batch.lasts].sum() for x in of_each])
    # Ranks that share a position hold the same sequences, so all are counted equally often.
    *totals, count = all_reduce(sums.double(), "sum", world.host_group).tolist()
    return {name: total / max(1.0, count) for name, total in zip(names, totals, strict=True)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples is right) from n samples (https://arxiv.org/abs/2107.03374)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
