"""How good the policy is on a prompt set: the round that asks, and the numbers made of its scores."""

import math
from collections.abc import Callable

import torch

from spmdrl.config.schema import Config
from spmdrl.data.batch import balance, from_trajectories
from spmdrl.data.prompts import Prompt
from spmdrl.data.trajectory import Trajectory
from spmdrl.policy.models import Models
from spmdrl.rewards.base import Grader
from spmdrl.rl.collect import Round, collect, whole
from spmdrl.rl.score import outcome_scores
from spmdrl.rollout.engine import Engine
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.mesh import World
from spmdrl.tracking.metrics import Timer

EVALUATION = 0x45564C
"""Key of evaluation draws: the same at every step, so that two evaluations are comparable."""


def is_evaluated(cfg: Config) -> bool:
    """Tells whether the run evaluates at all."""
    return bool(cfg.eval.every and cfg.data.eval)


def evaluation_round(
    cfg: Config, prompts: list[Prompt], version: int, name: str, may_end: Callable[[], bool] | None = None
) -> Round:
    """The round that evaluates: every prompt, in order. may_end: as in `Round`."""
    return Round(
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
        may_end=may_end,
    )


def evaluate_round(
    round_: Round, engine: Engine, grader: Grader, tokenizer, world: World
) -> tuple[dict[str, float], list[Trajectory]]:
    """`eval/accuracy` (share of samples with score >= 1), `eval/score`, and pass@k; and this rank's samples.

    Collective over samplers.

    Raises:
        AbandonedError: on every rank that samples.
    """
    done = whole(collect(round_, engine, grader, tokenizer, world, Timer()), world).trajectories
    # A sample without a score (--filter.bad-sample skip) is not right.
    scores = [[t.position, 0.0 if math.isnan(t.reward) else t.reward] for t in done]
    scores_n2 = torch.tensor(scores, dtype=torch.float64).reshape(-1, 2)
    rows = torch.cat(all_gather_rows(scores_n2, world.rollout_group))
    right = (rows[:, 1] >= 1.0).double()
    prompts, samples = len(round_.prompts), round_.samples
    per_prompt = torch.zeros(prompts, dtype=torch.float64).index_add_(0, rows[:, 0].long(), right)
    out = {"eval/accuracy": right.mean().item(), "eval/score": rows[:, 1].mean().item()}
    k = 2
    while k <= samples:
        out[f"eval/pass@{k}"] = sum(pass_at_k(samples, int(c), k) for c in per_prompt.tolist()) / prompts
        k *= 2
    return out, done


def model_score(samples: list[Trajectory], models: Models, world: World) -> float:
    """Mean score that the reward model gives the samples of all ranks. Collective."""
    batch = from_trajectories(samples)
    batch.seq |= {"update": torch.zeros_like(batch.lengths), "work": batch.lengths}
    batch = balance(batch, world)
    score_B = outcome_scores(batch, models.reward_model) if models.reward_model else torch.zeros(0)
    # Ranks that share a position hold the same sequences, each of them as many.
    total, count = all_reduce(
        torch.tensor([float(score_B.sum()), len(score_B)]).double(), "sum", world.host_group
    ).tolist()
    return total / max(1.0, count)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples (https://arxiv.org/abs/2107.03374)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
