"""State of a run that is alike on all ranks, beside the models: coefficients, guards, prompts drawn."""

from typing import Any

from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rl.spikes import Spikes


class RunState:
    """A `session.checkpoints.Kept`."""

    def __init__(self, algo: Algorithm, spikes: Spikes):
        self.algo, self.spikes = algo, spikes
        # Coefficients begin at the values of the settings.
        self.begun_with = dict(algo.state)
        self.draws = 0
        """Prompts drawn for the steps that were learnt from."""

    def state(self) -> dict[str, Any]:
        """See the contract."""
        return {
            "guards": self.spikes.state(),
            "algorithm": self.algo.state,
            "begun_with": self.begun_with,
            "draws": self.draws,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See the contract. A coefficient whose setting was changed (--run.allow-changes) keeps its new value."""
        begun = state.get("begun_with", self.begun_with)
        self.algo.state |= {k: v for k, v in state["algorithm"].items() if begun.get(k) == self.begun_with.get(k)}
        self.spikes.restore(state.get("guards", {}))
        self.draws = state["draws"]
