"""The implementations of the Policy contract, by the name that `--policy.backend` has for them."""

from typing import Any


def backend(name: str) -> Any:
    """`FsdpPolicy` or `MegatronPolicy`; they are built with the same arguments."""
    if name == "megatron":
        from spmdrl.policy.megatron.policy import MegatronPolicy

        return MegatronPolicy
    from spmdrl.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy
