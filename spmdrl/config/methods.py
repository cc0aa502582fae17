"""Rules for how the settings of a method fit together: advantage, loss, correction, filters and critic."""

from typing import TYPE_CHECKING, Any

from spmdrl.config.fields import Problems, flag, get
from spmdrl.config.learning import resampling
from spmdrl.config.named import name_problems
from spmdrl.config.schema import Config

if TYPE_CHECKING:
    from spmdrl.algos.estimators import Advantage
    from spmdrl.algos.losses import Loss


def method_problems(config: Config) -> list[str]:
    """Return a line for each method setting that is invalid or conflicts with another one."""
    # Lazy imports: these modules need torch, but `--help` must work without it.
    from spmdrl.algos.aggregate import AGGREGATIONS
    from spmdrl.algos.estimators import ADVANTAGES, own_advantage
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES, own_loss

    algo, problems = config.algo, Problems(config)
    loss = LOSSES.get(algo.loss) or own_loss(_not_run)
    advantage = ADVANTAGES.get(algo.advantage) or own_advantage(_not_run)
    _check_step(problems, advantage)
    _check_loss(problems, loss)
    _check_overlooked(problems, advantage)
    _check_ranges(problems)
    _check_advantage(problems, advantage)
    _check_old_logp(problems, loss, advantage)
    _check_rewards(problems, loss, advantage)
    problems += name_problems("algo.advantage", algo.advantage, ADVANTAGES, file_allowed=True)
    problems += name_problems("algo.loss", algo.loss, LOSSES, file_allowed=True)
    problems += name_problems("algo.aggregation", algo.aggregation, AGGREGATIONS, file_allowed=False)
    problems += name_problems("filter.keep", config.filter.keep, FILTERS, file_allowed=True)
    return problems


def _not_run(*_: Any) -> Any:
    """Stand in for a user's function, since user files are not imported while settings are checked."""


def _check_step(problems: Problems, advantage: "Advantage") -> None:
    """Check the group size, the number of updates and the sampling in a step."""
    config: Config = problems.config
    algo, rollout = config.algo, config.rollout
    if advantage.compares and rollout.samples_per_prompt < 2:
        advice = f"must be at least 2, as {algo.advantage} compares the samples of a prompt"
        problems.add("rollout.samples_per_prompt", advice)
    if algo.updates_per_step >= 1 and rollout.prompts_per_step % algo.updates_per_step:
        near = [n for n in range(1, rollout.prompts_per_step + 1) if rollout.prompts_per_step % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - algo.updates_per_step))[:3])
        problems.add(
            "algo.updates_per_step",
            f"must divide prompts_per_step {rollout.prompts_per_step} (each update takes an equal share), such as "
            f"{', '.join(map(str, near))}",
        )
    if rollout.top_p < 1:
        problems.add(
            "rollout.top_p",
            "engines compute logp over the nucleus, the trainer over all tokens, so ratios would be wrong; take "
            "1 (--eval.top-p is for evaluation)",
        )


def _check_loss(problems: Problems, loss: "Loss") -> None:
    """Check the KL, the loss aggregation, lambda, and the models that the method needs or does not support."""
    config: Config = problems.config
    algo = config.algo
    if algo.kl_coef and config.reference.enabled == "off":
        advice = f"KL needs the reference while --algo.kl-coef is {algo.kl_coef}; take auto, or kl-coef 0"
        problems.add("reference.enabled", advice)
    if algo.kl_target is not None and not algo.kl_coef:
        problems.add("algo.kl_target", "steers the KL coefficient, so --algo.kl-coef must start above 0")
    if algo.preset == "distill" and not config.reference.path:
        problems.add("reference.path", "distill learns from a teacher; name its model")
    if loss.scope == "one per sequence" and algo.aggregation not in ("", loss.aggregation):
        other = ", or take gspo_token" if algo.loss == "gspo" else ""
        advice = f"{algo.loss} has one loss for each sequence and averages them; leave it empty{other}"
        problems.add("algo.aggregation", advice)
    if algo.length_adaptive is not None and algo.lam is not None:
        problems.add("algo.lam", "--algo.length-adaptive sets lambda by length; give one of the two")
    if config.safety.cost_model and algo.advantage == "prime":
        problems.append("--safety.cost-model: prime does not support a cost; choose another --algo.advantage")


def _check_advantage(problems: Problems, advantage: "Advantage") -> None:
    """Check for settings that the advantage estimator does not support."""
    config: Config = problems.config
    name = config.algo.advantage
    cost = config.safety.cost or config.safety.cost_model
    if cost and not {"parts", "process", "baseline"}.isdisjoint(advantage.fields):
        problems.add(
            "algo.advantage",
            "reads more than the reward, so no separate advantage of a cost (--safety.cost, --safety.cost-model) is "
            "computed; take gae, grpo or rloo",
        )
    for setting in _shaped(config) if "baseline" in advantage.fields else ():
        advice = f"does not apply to {name}'s greedy baseline; leave it out, or take another --algo.advantage"
        problems.add(setting, advice)
    if "values" in advantage.fields and 0 < config.run.steps <= config.critic.warmup_steps:
        advice = f"the policy would never train in a run of --run.steps {config.run.steps}; lower it"
        problems.add("critic.warmup_steps", advice)


def _shaped(config: Config) -> list[str]:
    """Return the `shaping` settings that change rewards in this run."""
    rest = type(config.shaping)(mask_cut=config.shaping.mask_cut)
    return [f"shaping.{name}" for name, value in vars(config.shaping).items() if value != getattr(rest, name)]


def _check_old_logp(problems: Problems, loss: "Loss", advantage: "Advantage") -> None:
    """Check settings that need old_logp from a specific source, the policy or the engine."""
    config: Config = problems.config
    algo, replay = config.algo, config.filter.replay_steps
    old_logp = "rollout" if replay and algo.old_logp == "auto" else algo.old_logp
    if "collision" in advantage.fields and old_logp == "rollout":
        problems.add(
            "algo.advantage",
            "needs a pass of the policy before the update; leave out --filter.replay-steps and --algo.old-logp rollout",
        )
    if config.correction.kind not in ("none", "auto") and old_logp == "rollout" and loss.has_ratio:
        problems.add(
            "correction.kind",
            f"with --algo.old-logp rollout the ratio of {algo.loss} already is the correction; take none, or old-logp "
            "policy",
        )
    if replay and old_logp == "policy":
        problems.add(
            "filter.replay_steps",
            "replayed samples come from older weights, whose logp only the engine reported: take --algo.old-logp "
            "rollout or auto",
        )


def _check_rewards(problems: Problems, loss: "Loss", advantage: "Advantage") -> None:
    """Check the reward model, filters, and replay of earlier steps."""
    config: Config = problems.config
    algo, chosen = config.algo, config.filter
    if config.reward.model and "baseline" in advantage.fields:
        advice = f"{algo.advantage}'s greedy baseline does not include a model's score; leave one of the two out"
        problems.add("reward.model", advice)
    try:
        resampling(chosen.resample)
    except ValueError as e:
        problems.append(str(e))
    copied = [name for name in ("resample", "replay_steps") if getattr(chosen, name) not in ("none", 0)]
    if copied and advantage.compares:
        problems.add(
            f"filter.{copied[0]}",
            f"a sample that is drawn twice would be in the baseline of its copy, as {algo.advantage} compares the "
            "samples of a prompt; take an advantage that does not, such as gae (--algo.preset pf_ppo)",
        )
    if config.reward.model and (chosen.resample != "none" or chosen.keep):
        which = "filter.resample" if chosen.resample != "none" else "filter.keep"
        problems.add(which, "reads rewards before --reward.model adds its score; leave one of the two out")
    if chosen.replay_steps and loss.select:
        problems.add("filter.replay_steps", f"does not work with --algo.loss {algo.loss}; take 0")
    if chosen.keep == "accuracy_range" and chosen.low > chosen.high:
        problems.add("filter.low", f"must not be above --filter.high {chosen.high}")


def _check_overlooked(problems: Problems, advantage: "Advantage") -> None:
    """Check for settings that would ignore a term that another setting adds to the reward or the update."""
    config: Config = problems.config
    algo = config.algo
    named = [spec.partition("=")[0] for spec in algo.part_weights]
    if "parts" in advantage.fields and named and "score" not in named:
        enters = "KL (--algo.kl-in reward)" if algo.kl_coef and algo.kl_in == "reward" else ""
        enters = "shaping (--shaping.*)" if _shaped(config) else enters
        if enters:
            advice = f"leaves out the part score, which includes {enters}; add score=1, or leave that setting out"
            problems.add("algo.part_weights", advice)
    for name in ("policy.moe_aux_loss", "policy.moe_bias_rate"):
        if algo.skip_zero_advantage and (value := get(config, name)):
            problems.append(
                f"--algo.skip-zero-advantage: {flag(name)} {value} depends on the tokens of every sequence, also those "
                "with zero advantage; give one of the two"
            )


def _check_ranges(problems: Problems) -> None:
    """Check that lower bounds do not exceed upper bounds, and that `--correction.kind` uses the bounds that are set."""
    config: Config = problems.config
    correction, algo = config.correction, config.algo
    for low, high in (
        ("shaping.clip_low", "shaping.clip_high"),
        ("correction.low", "correction.high"),
        ("correction.reject_low", "correction.reject_high"),
        ("algo.cov_low", "algo.cov_high"),
    ):
        least, most = get(config, low), get(config, high)
        if least is not None and most is not None and least > most:
            problems.add(low, f"must not be above {flag(high)} {most}")
    if correction.kind.startswith("tis") and correction.low is not None:
        problems.add("correction.low", f"{correction.kind} truncates from above only; take icepop")
    if correction.kind == "auto" and (correction.low is not None or correction.high is not None):
        bound = "low" if correction.low is not None else "high"
        problems.add(f"correction.{bound}", "is a bound of one --correction.kind; name that kind")
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if algo.kl_target is not None and algo.kl_horizon < samples / 5:
        problems.add("algo.kl_horizon", f"must be at least a fifth of the {samples} samples of a step")
