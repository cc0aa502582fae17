"""All advantage estimators by name, with the inputs that each takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmdrl.algos import advantages, credit, turns
from spmdrl.algos.samples import Result


@dataclass(frozen=True)
class Advantage:
    """One advantage estimator: its function, whose keyword-only parameters are its settings, and its inputs.

    The paper stands in the function's docstring (`rows.paper_of`).
    """

    function: Callable[..., Result]
    needs: tuple[str, ...] = ()
    """Fields of Samples without which it raises."""
    reads: tuple[str, ...] = ()
    """Further fields that it reads where there are any."""
    compares: bool = True
    """It compares the samples of a group. Others do not look at `group`."""
    gradient: Literal["exact", "scaled", "biased"] = "biased"
    """Expectation of its policy gradient: `exact`; `scaled` by 1 - 1/n because the baseline of n samples includes the
    sample itself; or `biased` (docs/credit.md)."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of Samples that it looks at beside rewards and groups."""
        return (*self.needs, *self.reads)


def own_advantage(function: Callable[..., Result]) -> Advantage:
    """The row of a user's own function; its attribute `needs` names the fields of Samples that it cannot do without."""
    return Advantage(function, needs=getattr(function, "needs", ()), compares=False)


ADVANTAGES: dict[str, Advantage] = {
    "gae": Advantage(credit.gae, needs=("values",), compares=False, gradient="exact"),
    "grpo": Advantage(advantages.grpo),
    "dr_grpo": Advantage(advantages.dr_grpo, gradient="scaled"),
    "rloo": Advantage(advantages.rloo, gradient="exact"),
    "reinforce": Advantage(advantages.reinforce, compares=False, gradient="scaled"),
    "remax": Advantage(credit.remax, needs=("baseline",), compares=False, gradient="exact"),
    "reinforce_plus_plus": Advantage(credit.reinforce_plus_plus, compares=False),
    "reinforce_plus_plus_baseline": Advantage(advantages.reinforce_plus_plus_baseline),
    "opo": Advantage(advantages.opo),
    "gpg": Advantage(advantages.gpg),
    "grpo_pass_k": Advantage(advantages.grpo_pass_k),
    "gdpo": Advantage(advantages.gdpo, reads=("parts",)),
    "optimal_token_baseline": Advantage(credit.optimal_token_baseline, needs=("logp", "collision")),
    "gigpo": Advantage(turns.gigpo, reads=("turn", "state", "parent")),
    "win_rate": Advantage(advantages.win_rate),
    "per_token": Advantage(credit.per_token, compares=False, gradient="exact"),
    "prime": Advantage(credit.prime, needs=("process",)),
    "grpo_process": Advantage(credit.grpo_process, needs=("process", "ends")),
    "turn_rloo": Advantage(turns.turn_rloo, reads=("turn", "parent"), gradient="exact"),
    "turn_gae": Advantage(
        turns.turn_gae, needs=("values",), reads=("turn", "parent"), compares=False, gradient="exact"
    ),
}
