"""Rules for the settings of a method together: advantage, loss, correction, filters, critic."""

from typing import TYPE_CHECKING, Any

from spmdrl.config.fields import flag, get
from spmdrl.config.learning import resampling
from spmdrl.config.named import name_problems
from spmdrl.config.schema import Config

if TYPE_CHECKING:
    from spmdrl.algos.estimators import Advantage
    from spmdrl.algos.losses import Loss


def method_problems(config: Config) -> list[str]:
    """One line for each setting to change."""
    # Late: the rows stand with the functions, which need torch, and `--help` must not.
    from spmdrl.algos.aggregate import AGGREGATIONS
    from spmdrl.algos.estimators import ADVANTAGES, own_advantage
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES, own_loss

    algo = config.algo
    loss = LOSSES.get(algo.loss) or own_loss(_not_run)
    advantage = ADVANTAGES.get(algo.advantage) or own_advantage(_not_run)
    problems = _step_problems(config, advantage) + _loss_problems(config, loss)
    problems += _overlooked_problems(config, advantage) + _range_problems(config)
    problems += _advantage_problems(config, advantage) + _old_logp_problems(config, loss, advantage)
    problems += _reward_problems(config, loss, advantage)
    problems += name_problems("algo.advantage", algo.advantage, ADVANTAGES, file_allowed=True)
    problems += name_problems("algo.loss", algo.loss, LOSSES, file_allowed=True)
    problems += name_problems("algo.aggregation", algo.aggregation, AGGREGATIONS, file_allowed=False)
    problems += name_problems("filter.keep", config.filter.keep, FILTERS, file_allowed=True)
    return problems


def _not_run(*_: Any) -> Any:
    """Stand in for a user's own function, whose file is not run here."""


def _step_problems(config: Config, advantage: "Advantage") -> list[str]:
    """Groups, updates and sampling of a step."""
    algo, rollout, problems = config.algo, config.rollout, []
    if advantage.compares and rollout.samples_per_prompt < 2:
        problems.append(
            f"--rollout.samples-per-prompt {rollout.samples_per_prompt}: must be at least 2, "
            f"as {algo.advantage} compares the samples of a prompt"
        )
    if algo.updates_per_step >= 1 and rollout.prompts_per_step % algo.updates_per_step:
        near = [n for n in range(1, rollout.prompts_per_step + 1) if rollout.prompts_per_step % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - algo.updates_per_step))[:3])
        problems.append(
            f"--algo.updates-per-step {algo.updates_per_step}: must divide prompts_per_step {rollout.prompts_per_step} "
            f"(each update takes an equal share), such as {', '.join(map(str, near))}"
        )
    if rollout.top_p < 1:
        problems.append(
            f"--rollout.top-p {rollout.top_p}: engines give logp within the nucleus, the trainer over the whole "
            "vocabulary, so ratios would be off; take 1 (--eval.top-p is for evaluation)"
        )
    return problems


def _loss_problems(config: Config, loss: "Loss") -> list[str]:
    """KL, aggregation of the loss, lambda, and models that the method needs or does not take."""
    algo, problems = config.algo, []
    if algo.kl_coef and config.reference.enabled == "off":
        problems.append(
            f"--reference.enabled off: KL needs the reference while --algo.kl-coef is {algo.kl_coef}; "
            "take auto, or kl-coef 0"
        )
    if algo.kl_target is not None and not algo.kl_coef:
        problems.append(
            f"--algo.kl-target {algo.kl_target}: steers the KL coefficient, so --algo.kl-coef must start above 0"
        )
    if algo.preset == "distill" and not config.reference.path:
        problems.append("--reference.path '': distill learns from a teacher; name its model")
    if loss.scope == "one per sequence" and algo.aggregation not in ("", loss.aggregation):
        problems.append(
            f"--algo.aggregation {algo.aggregation}: {algo.loss} has one loss for a sequence and takes their mean; "
            "leave it empty" + (", or take gspo_token" if algo.loss == "gspo" else "")
        )
    if algo.length_adaptive is not None and algo.lam is not None:
        problems.append(f"--algo.lam {algo.lam}: --algo.length-adaptive sets lambda by length; give one of the two")
    if config.safety.cost_model and algo.advantage == "prime":
        problems.append("--safety.cost-model: prime has no cost; choose another --algo.advantage")
    return problems


def _advantage_problems(config: Config, advantage: "Advantage") -> list[str]:
    """Settings beside an advantage estimator that it does not take."""
    algo, problems = config.algo, []
    cost = config.safety.cost or config.safety.cost_model
    if cost and not {"parts", "process", "baseline"}.isdisjoint(advantage.fields):
        problems.append(
            f"--algo.advantage {algo.advantage}: looks at more than the reward, so a cost (--safety.cost, "
            "--safety.cost-model) has no advantage of its own; take gae, grpo or rloo"
        )
    if "baseline" in advantage.fields:
        at_rest = type(config.shaping)(mask_cut=config.shaping.mask_cut)
        problems += [
            f"{flag(f'shaping.{name}')} {value}: {algo.advantage}'s greedy baseline is not shaped; leave it out, "
            "or take another --algo.advantage"
            for name, value in vars(config.shaping).items()
            if value != getattr(at_rest, name)
        ]
    if "values" in advantage.fields and 0 < config.run.steps <= config.critic.warmup_steps:
        problems.append(
            f"--critic.warmup-steps {config.critic.warmup_steps}: the policy learns nothing in a run of "
            f"--run.steps {config.run.steps}; lower it"
        )
    return problems


def _old_logp_problems(config: Config, loss: "Loss", advantage: "Advantage") -> list[str]:
    """Settings that need old_logp from the policy, or from the engine."""
    algo, problems = config.algo, []
    correction, old_logp = config.correction, algo.old_logp
    if config.filter.replay_steps and old_logp == "auto":
        old_logp = "rollout"
    if "collision" in advantage.fields and old_logp == "rollout":
        problems.append(
            f"--algo.advantage {algo.advantage}: needs a pass of the policy before the update; leave out "
            "--filter.replay-steps and --algo.old-logp rollout"
        )
    if correction.kind not in ("none", "auto") and old_logp == "rollout" and loss.has_ratio:
        problems.append(
            f"--correction.kind {correction.kind}: with --algo.old-logp rollout the ratio of {algo.loss} is the "
            "correction already; take none, or old-logp policy"
        )
    if config.filter.replay_steps and old_logp == "policy":
        problems.append(
            f"--filter.replay-steps {config.filter.replay_steps}: what is replayed was sampled by older weights, whose "
            "logp the engine reported: take --algo.old-logp rollout or auto"
        )
    return problems


def _reward_problems(config: Config, loss: "Loss", advantage: "Advantage") -> list[str]:
    """Reward model, filters and replay."""
    algo, problems = config.algo, []
    if config.reward.model and "baseline" in advantage.fields:
        problems.append(
            f"--reward.model {config.reward.model}: {algo.advantage}'s greedy baseline has no score of a model in it"
        )
    try:
        resampling(config.filter.resample)
    except ValueError as e:
        problems.append(str(e))
    copied = [name for name in ("resample", "replay_steps") if getattr(config.filter, name) not in ("none", 0)]
    if copied and advantage.compares:
        name = f"filter.{copied[0]}"
        problems.append(
            f"{flag(name)} {get(config, name)}: a sample that is drawn twice would stand in the baseline of its copy, "
            f"as {algo.advantage} compares the samples of a prompt; take an advantage that does not, such as gae "
            "(--algo.preset pf_ppo)"
        )
    if config.reward.model and (config.filter.resample != "none" or config.filter.keep):
        which = "filter.resample" if config.filter.resample != "none" else "filter.keep"
        problems.append(
            f"{flag(which)} {get(config, which)}: looks at rewards before --reward.model adds its score; take one"
        )
    if config.filter.replay_steps and loss.select:
        problems.append(f"--filter.replay-steps {config.filter.replay_steps}: not with --algo.loss {algo.loss}")
    if config.filter.keep == "accuracy_range" and config.filter.low > config.filter.high:
        problems.append(f"--filter.low {config.filter.low}: must not be above --filter.high {config.filter.high}")
    return problems


def _overlooked_problems(config: Config, advantage: "Advantage") -> list[str]:
    """Settings that would overlook what another one adds to the reward or to the update."""
    algo, problems = config.algo, []
    named = [spec.partition("=")[0] for spec in algo.part_weights]
    if "parts" in advantage.fields and named and "score" not in named:
        rest = type(config.shaping)(mask_cut=config.shaping.mask_cut)
        enters = "KL (--algo.kl-in reward)" if algo.kl_coef and algo.kl_in == "reward" else ""
        enters = "shaping (--shaping.*)" if config.shaping != rest else enters
        if enters:
            problems.append(
                f"--algo.part-weights {' '.join(algo.part_weights)}: leaves out the part score, by which {enters} "
                "would enter; name score=1 too, or leave that out"
            )
    for name in ("policy.moe_aux_loss", "policy.moe_bias_rate"):
        if algo.skip_zero_advantage and get(config, name):
            problems.append(
                f"--algo.skip-zero-advantage: {flag(name)} {get(config, name)} looks at the tokens of every sequence, "
                "those without advantage too; give one of the two"
            )
    return problems


def _range_problems(config: Config) -> list[str]:
    """Bounds that are given in pairs."""
    correction, algo, problems = config.correction, config.algo, []
    pairs = {
        ("shaping.clip_low", "shaping.clip_high"): (config.shaping.clip_low, config.shaping.clip_high),
        ("correction.low", "correction.high"): (correction.low, correction.high),
        ("correction.reject_low", "correction.reject_high"): (correction.reject_low, correction.reject_high),
        ("algo.cov_low", "algo.cov_high"): (algo.cov_low, algo.cov_high),
    }
    for (low_name, high_name), (low, high) in pairs.items():
        if low is not None and high is not None and low > high:
            problems.append(f"{flag(low_name)} {low}: must not be above {flag(high_name)} {high}")
    if correction.kind.startswith("tis") and correction.low is not None:
        problems.append(f"--correction.low {correction.low}: {correction.kind} truncates from above only; take icepop")
    if correction.kind == "auto" and (correction.low is not None or correction.high is not None):
        bound = "low" if correction.low is not None else "high"
        problems.append(f"--correction.{bound} {getattr(correction, bound)}: name the --correction.kind that it bounds")
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if algo.kl_target is not None and algo.kl_horizon < samples / 5:
        problems.append(
            f"--algo.kl-horizon {algo.kl_horizon}: must be at least a fifth of the {samples} samples of a step"
        )
    return problems
