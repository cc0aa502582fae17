"""Computes the inputs of a step's update: shaped rewards, old and reference logp, and critic values."""

import math

import torch

from spmdrl.algos.kl import kl_estimate
from spmdrl.algos.shaping import (
    NORMAL_EPS,
    RunningMoments,
    clip_reward,
    length_penalty_group,
    length_penalty_linear,
    normalize_reward,
    overlong_punishment,
    reward_moments,
)
from spmdrl.algos.value import implicit_rewards
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import gather_rows
from spmdrl.policy.contract import Policy
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.algorithm import MOMENTS, Algorithm, add_mismatch, mean
from spmdrl.rl.reading import AtLast, finite
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


def score(batch: Batch, models: Models, algo: Algorithm, cfg: Config, peers: Peers) -> Metrics:
    """Add all columns that the update needs to a batch, except advantages. Collective over the ranks that train.

    peers: the data positions, over which rewards are normalized.

    Raises:
        ValueError: a model output is not finite; the message names model, prompt and sample.
    """
    metrics, token, temperature = Metrics(), batch.token, cfg.rollout.temperature
    if models.reward_model:
        metrics.merge(add_model_scores(batch, models, algo, cfg.reward.model_coef))
    if "cost" in algo.needs:
        batch.seq["cost"] = costs(batch, models, cfg.safety.cost)
        cost_E = batch.seq["cost"][batch.firsts]
        metrics.add("safety/cost", cost_E.mean() if len(batch) else 0.0, len(cost_E))
        metrics.add("safety/multiplier", algo.state["multiplier"])
    mask_T, seq_T = token["mask"], batch.episode_index
    if algo.old_logp == "policy":
        second = "entropy" if algo.entropy_before else "collision"
        token["old_logp"], other_T = models.policy.logprobs(batch, temperature, second)
        if second == "collision":
            token["collision"] = other_T
        else:
            metrics.add("entropy/mean", mean(other_T, mask_T), mask_T.sum())
        finite(batch, token["old_logp"], "the policy")
        fresh_T = algo.fresh_mask(batch, models.policy.version)
        add_mismatch(metrics, token["old_logp"], token["rollout_logp"], mask_T, seq_T, fresh_T)
    elif algo.needs & {"reference", "logp", "collision"} or algo.select is not None:
        token["old_logp"] = token["rollout_logp"]
    if "reference" in algo.needs:
        assert models.reference is not None, "the run builds what `needs` names"
        token["ref_logp"], _ = models.reference.logprobs(batch, temperature)
        finite(batch, token["ref_logp"], "the reference")
        if cfg.algo.kl_in == "reward":
            kl_T = kl_estimate(cfg.algo.kl_estimator, token["old_logp"], token["ref_logp"], mask_T)
            metrics.add("kl/mean", mean(kl_T, mask_T), mask_T.sum())
    for name in ("critic", "cost_critic"):
        model: Policy | None = getattr(models, name)
        if model is not None:
            column = "values" if name == "critic" else "cost_values"
            token[column] = finite(batch, model.values(batch), f"the {name}")
    if "process" in algo.needs:
        assert models.process is not None and models.process_reference is not None
        logp_T = finite(batch, models.process.logprobs(batch, temperature)[0], "the process reward model")
        token["process_ref_logp"], _ = models.process_reference.logprobs(batch, temperature)
        token["process"] = implicit_rewards(logp_T, token["process_ref_logp"], mask_T, cfg.process_reward.beta)
        metrics.add("reward/process", mean(token["process"], mask_T), mask_T.sum())
    batch.seq["shaped"] = shape(batch, cfg, algo.state, peers)
    shaped_E = batch.seq["shaped"][batch.firsts]
    metrics.add("reward/shaped", shaped_E.mean() if len(batch) else 0.0, len(shaped_E))
    return metrics


def serve(batch: Batch, models: Models, algo: Algorithm, temperature: float) -> None:
    """Run the frozen models on a rank that does not train, in the order in which `score` runs them on other ranks.

    Collective with the ranks that run `score`. batch: an empty batch with the same columns as on the other ranks.
    """
    for judge in (models.reward_model, models.cost_model):
        if judge:
            judge.values(batch)
    for name, model in (("reference", models.reference), ("process", models.process_reference)):
        if name in algo.needs:
            assert model is not None, "the run builds what `needs` names"
            model.logprobs(batch, temperature)


def add_model_scores(batch: Batch, models: Models, algo: Algorithm, coef: float) -> Metrics:
    """Add reward-model scores to a batch. Collective over the reward model's ranks.

    The response score is added to the reward, label scores become reward parts, and step scores become token columns.
    An episode that branches gets the scores of its last path.

    coef: weight of the score in the reward.

    Raises:
        ValueError: a label has the name of a reward part.
    """
    assert models.reward_model is not None, "the run builds the models that the settings name"
    metrics, first_E = Metrics(), batch.firsts
    n = len(first_E)
    scores = (models.reading or AtLast(steps="scored steps" in algo.needs)).read(batch, models.reward_model)
    scores.response_B = batch.of_last(scores.response_B)
    scores.labels = {name: batch.of_last(score_B) for name, score_B in scores.labels.items()}
    scores.steps_B = None if scores.steps_B is None else batch.of_last(scores.steps_B)
    batch.seq["reward"] = batch.seq["reward"] + coef * scores.response_B
    numbers = {"reward/model": scores.response_B} | {f"reward/model/{k}": v for k, v in scores.labels.items()}
    if scores.steps_B is not None:
        numbers["reward/model/steps"] = batch.seq["steps"] = scores.steps_B
    if models.reading is not None:
        batch.seq["model"] = scores.response_B
    for name, score_B in numbers.items():
        metrics.add(name, score_B[first_E].mean() if n else 0.0, n)
    for name, score_B in scores.labels.items():
        if f"part/{name}" in batch.seq:
            raise ValueError(
                f"--reward.model: its label {name!r} is also the name of a part of --reward.function: rename one "
                "(names of labels are in id2label of the model's config.json)"
            )
        batch.seq[f"part/{name}"] = score_B
    if scores.process_T is not None and scores.ends_T is not None:
        batch.token["process"], batch.token["ends"] = scores.process_T, scores.ends_T
    return metrics


def costs(batch: Batch, models: Models, part: str) -> torch.Tensor:
    """Return the costs [B]: the cost model's score plus the reward part `part`. Collective if there is a cost model."""
    cost_B = torch.zeros(len(batch), dtype=torch.float64)
    if models.cost_model:
        cost_B += batch.of_last((models.cost_reading or AtLast()).read(batch, models.cost_model).response_B)
    if part:
        cost_B += batch.seq[f"part/{part}"]
    return cost_B


def shape(batch: Batch, cfg: Config, state: dict[str, float], peers: Peers) -> torch.Tensor:
    """Return the shaped episode reward for each sequence [B], for computing advantages. Collective.

    Per-turn rewards, if the batch has them, are scaled by the same factors and stored in `token["turn_shaped"]`. Bounds
    and length terms apply to the complete episode.

    state: `Algorithm.state`, whose running reward moments are updated in place.
    """
    shaping, longest, first_E, unit = cfg.shaping, cfg.rollout.max_new_tokens, batch.firsts, cfg.shaping.reward_coef
    # From here on, B counts episodes; the last line expands the rewards to one reward per path.
    reward_B, length_B = batch.seq["reward"][first_E], batch.sampled_per_episode
    # Length terms include the environment's answers, because these count towards the episode's token limit.
    counted_B = batch.generated_per_episode
    bounds = ((shaping.clip_low, -1), (shaping.clip_high, 1))
    if shaping.clip_low is not None or shaping.clip_high is not None:
        low, high = (bound if bound is not None else wide * math.inf for bound, wide in bounds)
        reward_B = clip_reward(reward_B, low, high)
    if shaping.normalize != "none":
        running = shaping.normalize == "running"
        moments = RunningMoments(*(state[name] for name in MOMENTS)) if running else RunningMoments()
        moments.update(*peers.sum(reward_moments(reward_B)).tolist())
        if running:
            state |= dict(zip(MOMENTS, (moments.count, moments.mean, moments.m2), strict=True))
        reward_B, unit = normalize_reward(reward_B, moments), unit / (moments.std + NORMAL_EPS)
    reward_B = shaping.reward_coef * reward_B
    if "turn_reward" in batch.token:
        batch.token["turn_shaped"] = unit * batch.token["turn_reward"].double()
    if shaping.overlong_buffer:
        reward_B = reward_B + overlong_punishment(counted_B, longest, shaping.overlong_buffer, shaping.overlong_factor)
    if shaping.length_penalty == "linear":
        reward_B = reward_B + length_penalty_linear(counted_B, longest, shaping.length_coef)
    elif shaping.length_penalty == "group":
        # The samples of a group may be spread over several ranks, so gather the rows of all ranks.
        given = (batch.seq["reward"][first_E], batch.seq["position"][first_E].double())
        rows, mine = gather_rows(batch, first_E, torch.stack([length_B.double(), *given], 1), peers)
        reward_B = (
            reward_B + shaping.length_coef * length_penalty_group(rows[:, 0], rows[:, 1] > 0, rows[:, 2].long())[mine]
        )
    return reward_B[batch.episode]
