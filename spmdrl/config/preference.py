"""Settings for preference learning, with their rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from spmdrl.config.declare import NOT_NEGATIVE, POSITIVE, SHARE, UNIT, Job, Rule, hides, section, setting
from spmdrl.config.fields import refuse, shown
from spmdrl.config.schema import OptimizerConfig, is_average
from spmdrl.config.supervised import (
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedRunConfig,
    split_weight,
    streams,
    supervised_problems,
)

if TYPE_CHECKING:
    from spmdrl.algos.preference import PreferenceLoss


@dataclass(frozen=True)
class Published:
    """A published method of preference learning."""

    losses: tuple[str, ...]
    """Losses used by the method, each in the form of `--preference.loss`."""
    paper: str
    """URL of the paper."""


METHODS: dict[str, Published] = {
    "dpo": Published(("sigmoid",), "https://arxiv.org/abs/2305.18290"),
    "ipo": Published(("ipo",), "https://arxiv.org/abs/2310.12036"),
    "simpo": Published(("simpo",), "https://arxiv.org/abs/2405.14734"),
    "cpo": Published(("cpo", "sft"), "https://arxiv.org/abs/2401.08417"),
    "orpo": Published(("sft", "orpo=0.1"), "https://arxiv.org/abs/2403.07691"),
    "rpo": Published(("sigmoid", "sft"), "https://arxiv.org/abs/2404.19733"),
    "mpo": Published(("sigmoid=0.8", "bco_pair=0.2", "sft"), "https://arxiv.org/abs/2411.10442"),
    "apo": Published(("apo_zero",), "https://arxiv.org/abs/2408.06266"),
    "kto": Published(("kto",), "https://arxiv.org/abs/2402.01306"),
    "bco": Published(("bco",), "https://arxiv.org/abs/2404.04656"),
    "sppo": Published(("sppo_hard",), "https://arxiv.org/abs/2405.00675"),
    "raft": Published(("sft",), "https://arxiv.org/abs/2304.06767"),
}


PAIRS = ("builtin:reverse-pairs",)


@hides(Job.PREFERENCE)
@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    """Source of the rows: pairs of responses, or responses labelled as wanted or unwanted."""

    chosen_column: str = setting("chosen", only_with=lambda c: c.reads_pairs)
    """Column with the preferred response, as text or messages. If there is no prompt column, it contains the complete
    dialogue."""
    rejected_column: str = setting("rejected", only_with=lambda c: c.reads_pairs)
    """Column with the rejected response."""
    label_column: str = setting("label", unread_by=(Job.REWARD_MODEL,))
    """Column with a boolean label, true if the row's completion is wanted, for the losses kto and bco."""


@dataclass
class FixedModelConfig:
    """The frozen reference model."""

    path: str = setting("", only_with=lambda c: c.has_reference)
    """The reference model, in any form that `--model.path` accepts. Empty: the starting model."""
    refresh_every: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_reference)
    """Number of steps between updates of the reference from the policy's weights (TR-DPO,
    https://arxiv.org/abs/2404.09656). 0: the reference never changes."""
    mix: float = setting(1.0, SHARE, only_with=lambda c: c.has_reference and c.reference.refresh_every)
    """Weight m of the policy in each update of the reference (`refresh_every`): the new reference is
    m x policy + (1 - m) x reference. With m = 1 it is a copy of the policy."""
    precompute: bool = setting(False, only_with=lambda c: c.has_reference)
    """Compute the reference's log-probabilities for all rows before the first step and store them in the run folder, so
    that the reference is not in memory during training."""


def read_as(name: str) -> Callable[[Any], bool]:
    """Return a function that takes a job's settings and returns True if any of its losses reads the setting `name`."""
    return lambda c: any(name in loss.reads for loss in rows_of(c.preference))


@dataclass
class PreferenceMethod:
    """The loss and its settings."""

    method: Literal["dpo", "ipo", "simpo", "cpo", "orpo", "rpo", "mpo", "kto", "bco", "apo", "sppo"] = "dpo"
    """Published method, which selects the losses; `--preference.loss` replaces them."""
    loss: tuple[str, ...] = ()
    """Losses whose weighted sum is minimised, each as `loss` or `loss=weight`, such as `sigmoid=0.8 bco_pair=0.2
    sft=1`. Empty: the losses of `method`."""
    beta: float = setting(0.1, POSITIVE, only_with=read_as("beta"))
    """Strength of the penalty that keeps the policy close to the reference. For IPO this is tau, and for SimPO and CPO
    the scale of the margin. The default is 2 if simpo is the only loss."""
    label_smoothing: float = setting(
        0.0, Rule(lambda x: 0 <= x < 0.5, "must lie in [0, 0.5)"), only_with=read_as("label_smoothing")
    )
    """Assumed fraction of pairs with swapped preference labels (cDPO). The losses robust and exo_pair need a value
    above 0."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = setting(
        "reverse_kl", only_with=read_as("divergence")
    )
    """Divergence that keeps the policy close to the reference (f-DPO, https://arxiv.org/abs/2309.16240)."""
    alpha: float = setting(0.5, only_with=lambda c: read_as("alpha")(c) and c.preference.divergence == "alpha")
    """Exponent of the `alpha` divergence."""
    tau: float = setting(0.05, POSITIVE, only_with=read_as("tau"))
    """Temperature of the discopop loss."""
    margin: float = setting(0.5, only_with=read_as("margin"))
    """Gamma of the simpo loss: target margin between beta times the mean logp of the chosen and of the rejected
    response. The default is 1 if simpo is the only loss."""
    tail: float = setting(1.0, UNIT, only_with=read_as("tail"))
    """Weight of the logp of the longer response's tokens beyond the shorter response's length (LD-DPO,
    https://arxiv.org/abs/2409.06411)."""
    weighted: bool = setting(False, only_with=read_as("weighted"))
    """Weight each pair by its probability under the policy (WPO, https://arxiv.org/abs/2406.11827)."""
    wanted_weight: float = setting(1.0, NOT_NEGATIVE, unread_by=(Job.ONLINE,), only_with=read_as("wanted_weight"))
    """Weight of wanted responses in the kto and bco losses."""
    unwanted_weight: float = setting(1.0, NOT_NEGATIVE, unread_by=(Job.ONLINE,), only_with=read_as("unwanted_weight"))
    """Weight of unwanted responses in the kto and bco losses."""


@dataclass
class PreferenceConfig(SupervisedConfig):
    """Preference learning for language models. Every rank runs this same program."""

    run: SupervisedRunConfig = section(SupervisedRunConfig, name="preference")
    optimizer: OptimizerConfig = section(OptimizerConfig, lr=1e-6)
    data: PreferenceDataConfig = section(PreferenceDataConfig, train=PAIRS)  # type: ignore[assignment]
    reference: FixedModelConfig = section(FixedModelConfig)
    preference: PreferenceMethod = section(PreferenceMethod)
    reads_pairs: ClassVar[bool] = True

    @property
    def has_reference(self) -> bool:
        """True if any loss uses the reference."""
        return has_reference(self.preference)


def losses_of(method: PreferenceMethod) -> dict[str, float]:
    """Return loss (name in `algos.preference`) -> weight for a method. Raises ValueError if a name or weight is
    invalid.
    """
    # Lazy import, here and below: the module needs torch, but `--help` must work without it.
    from spmdrl.algos.preference import LOSSES, SFT

    found = {}
    for spec in method.loss or METHODS[method.method].losses:
        name, weight = split_weight(spec, "--preference.loss")
        if name not in LOSSES and name != SFT:
            known = ", ".join([*LOSSES, SFT])
            raise ValueError(f"--preference.loss {spec}: unknown loss. Valid: {known}")
        if name in found:
            raise ValueError(f"--preference.loss {spec}: {name} is named twice; give it one weight")
        found[name] = 1.0 if weight is None else weight
    return found


def rows_of(method: PreferenceMethod) -> "list[PreferenceLoss]":
    """Return the `PreferenceLoss` entry of each loss in the method, except `sft`, which has no entry.

    Raises ValueError as `losses_of` does.
    """
    from spmdrl.algos.preference import LOSSES, SFT

    return [LOSSES[name] for name in losses_of(method) if name != SFT]


def has_pairs(method: PreferenceMethod) -> bool:
    """Return True if the losses compare the two responses of a pair, or False if they use labels."""
    return not any(loss.labelled for loss in rows_of(method))


def has_reference(method: PreferenceMethod) -> bool:
    """Return True if any loss uses the reference."""
    return any(loss.has_reference for loss in rows_of(method))


def check_preference(config: PreferenceConfig, world_size: int) -> None:
    """Check all settings together. Raises ConfigError with one line per problem."""
    chosen, data = config.preference, config.data
    try:
        losses = losses_of(chosen)
    except ValueError as e:
        refuse([str(e)])
    problems = supervised_problems(config, world_size, data.max_tokens * (2 if has_pairs(chosen) else 1))
    problems += method_problems(chosen, losses)
    beside = [name for name in losses if takes_other_prompts(name)]
    if beside and data.rows_per_step < 2:
        problems.append(
            f"--data.rows-per-step 1: {beside[0]} compares responses to different rows of the step; take at least 2"
        )
    problems += _precompute_problems(config, beside) if config.reference.precompute else []
    refuse(problems + reference_problems(config))


def reference_problems(config: Any) -> list[str]:
    """Return a line for each setting that is incompatible with updating the reference (`refresh_every`)."""
    reference, problems = config.reference, []
    if is_average(reference) and (config.policy.backend, config.model.dtype) == ("megatron", "bfloat16"):
        problems.append(
            "--reference.mix: megatron keeps the reference in bfloat16, too coarse for a moving average; take fsdp"
        )
    if reference.refresh_every and config.lora.rank:
        problems.append(
            "--reference.refresh-every: the reference has no adapters, so it cannot copy a policy with --lora.rank; "
            "leave one of the two out"
        )
    return problems


def method_problems(chosen: PreferenceMethod, losses: dict[str, float]) -> list[str]:
    """Return a line for each loss or loss setting that conflicts with the others. losses: result of `losses_of`."""
    from spmdrl.algos.preference import LOSSES

    rows, problems = {name: LOSSES[name] for name in losses if name in LOSSES}, []
    if chosen.loss and chosen.method != PreferenceMethod().method:
        problems.append(
            f"--preference.method {chosen.method}: --preference.loss names the losses; leave one of them out"
        )
    labelled = sorted(name for name, row in rows.items() if row.labelled)
    if labelled and len(losses) > 1:
        problems.append(f"--preference.loss {shown(chosen.loss)}: {labelled[0]} cannot be combined with other losses")
    smoothed = sorted(name for name, row in rows.items() if row.needs_smoothing)
    if smoothed and not chosen.label_smoothing:
        problems.append(f"--preference.label-smoothing 0: {smoothed[0]} needs a value above 0, such as 0.1")
    if chosen.weighted and any(row.matched for row in rows.values()):
        problems.append("--preference.weighted: aot compares responses of different pairs; leave one of the two out")
    return problems


def takes_other_prompts(name: str) -> bool:
    """Return True if the loss also uses responses to other prompts in the step."""
    from spmdrl.algos.preference import LOSSES

    return name in LOSSES and LOSSES[name].shift == "other prompts"


def _precompute_problems(config: PreferenceConfig, beside: list[str]) -> list[str]:
    found, name, refreshed = streams(config), (beside or [""])[0], config.reference.refresh_every
    wrong_if = {
        f"a stream's rows are not known before training ({found[0] if found else ''}); leave it out": found,
        f"{name} needs the reference's logp of responses to other rows' prompts; leave it out": beside,
        "the reference moves (--reference.refresh-every); leave one of the two out": refreshed,
    }
    return [f"--reference.precompute: {advice}" for advice, wrong in wrong_if.items() if wrong]
