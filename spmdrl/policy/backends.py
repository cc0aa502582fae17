"""The implementations of the Policy contract by `--policy.backend` name."""

from typing import Any

from spmdrl.config.schema import PolicyConfig


def backend(name: str) -> Any:
    """Return `FsdpPolicy` or `MegatronPolicy`; both are built with the same arguments."""
    if name == "megatron":
        from spmdrl.policy.megatron.policy import MegatronPolicy

        return MegatronPolicy
    from spmdrl.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy


def shares_prompts(cfg: PolicyConfig) -> bool:
    """Return True if the policy runs a prompt once for all samples that share it; the same on every rank."""
    return cfg.share_prompts and backend(cfg.backend).can_share
