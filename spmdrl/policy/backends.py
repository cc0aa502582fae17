"""The implementations of the Policy contract, by their `--policy.backend` name."""

from typing import Any


def backend(name: str) -> Any:
    """Return `FsdpPolicy` or `MegatronPolicy`; both are built with the same arguments."""
    if name == "megatron":
        from spmdrl.policy.megatron.policy import MegatronPolicy

        return MegatronPolicy
    from spmdrl.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy
