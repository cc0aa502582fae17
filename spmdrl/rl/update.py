"""Updates all trained models on a scored batch, then adapts the loss coefficients."""

from spmdrl.algos.kl import adaptive_coef
from spmdrl.algos.value import dual_step
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import Policy
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.policy.objectives.reinforcement import CriticObjective, PolicyObjective, ProcessObjective
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


def update(batch: Batch, models: Models, algo: Algorithm, cfg: Config, step: int, peers: Peers) -> Metrics:
    """Update all trained models, then refresh the reference if it is due. Collective over the ranks that train.

    With a critic, the policy is not updated during the first `--critic.warmup-steps` steps.

    step: 0-based. peers: the data positions, over which losses and metrics are summed.
    """
    stats, temperature, steps = Metrics(), cfg.rollout.temperature, cfg.algo.updates_per_step
    for name, returns, values in (
        ("critic", "returns", "values"),
        ("cost_critic", "cost_returns", "cost_values"),
    ):
        critic: Policy | None = getattr(models, name)
        if critic is not None:
            objective = CriticObjective(returns, values, cfg.critic.clip, peers)
            stats.merge(critic.update(batch, objective, steps).prefixed(f"{name}/"))
    if models.process is not None:
        objective = ProcessObjective(cfg.process_reward.beta, temperature, peers)
        stats.merge(models.process.update(batch, objective, steps).prefixed("process/"))
    if models.critic is None or step >= cfg.critic.warmup_steps:
        stats.merge(models.policy.update(batch, PolicyObjective(algo, models.policy, temperature, peers), steps))
    if models.reference is not None:
        refresh_reference(models, cfg.reference.refresh_every, step)
    return stats


def refresh_reference(models: Models, every: int, step: int, mix: float = 1.0) -> None:
    """Move the reference towards the policy if an update is due after `step`. Collective over the ranks that train.

    every: interval in steps, or 0 to never update the reference. step: 0-based. mix: weight of the policy in the new
    reference; 1 copies the policy.
    """
    if models.reference is not None and every and (step + 1) % every == 0:
        models.reference.take_over(models.policy, mix)


def adapt_coefficients(algo: Algorithm, cfg: Config, values: dict[str, float], samples: int) -> None:
    """Adapt the KL coefficient (`--algo.kl-target`) and, in runs with costs, the Lagrange multiplier.

    values: metrics reduced over all ranks. samples: number of samples in the step.
    """
    if cfg.algo.kl_target is not None and "kl/mean" in values:
        algo.state["kl_coef"] = adaptive_coef(
            algo.state["kl_coef"], values["kl/mean"], cfg.algo.kl_target, cfg.algo.kl_horizon, samples
        )
    if "cost" in algo.needs:
        safety = cfg.safety
        algo.state["multiplier"] = dual_step(
            algo.state["multiplier"], values["safety/cost"], safety.limit, safety.lr, safety.most
        )
