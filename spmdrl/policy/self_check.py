"""Checks, before anything is learnt or sampled, that a model gives right numbers here: it is right or refused.

`probe.py` holds each form in which a model can run packs against plain transformers. A model runs in the fastest form
that is right: with shared tokens once (a tree), packed, or one sequence a forward, which is exact and slower. One that
is wrong there too is refused.
"""

from collections.abc import Callable
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.hub.build import DTYPES
from spmdrl.policy.attention.own import own_attention
from spmdrl.policy.heads import Form
from spmdrl.policy.probe import FORWARD, NOT_FINITE, Found, Sequences, difference, plain, probe, sequences
from spmdrl.spmd.exchange import all_reduce


def agreed(policy: Any, found: Found) -> Found:
    """Return what the rank with the largest difference found. Collective."""
    numbers = torch.tensor([found.ratio, found.states], dtype=torch.float64)
    ratio, states = all_reduce(numbers, "max", policy.world.role_group).tolist()
    return Found(ratio, found.reason or "on another rank", states)


def settle(policy: Any, role: str, name: str, say: Callable[[str], None]) -> None:
    """Check one model and have it run in the fastest form that is right. Collective.

    role: the model's part in the job. name: the setting that names it, and its value. say: takes the line that tells
    what was found.

    Raises:
        ValueError: the model is right in no form, or not as the settings ask for it; the message names the flag.
    """
    family, kind, sp = policy.hf_config.model_type, policy.cfg.model.dtype, policy.world.sp_size
    if not policy.cfg.model.self_check:
        say(f"no self-check of the {role}: --model.no-self-check")
        return
    heading = f"self-check of the {role} ({name}, {family}, {kind})"
    if not hasattr(policy, "run_as"):
        say(f"{heading}: packed: numbers differ by {settle_backend(policy, name):.1g} at most")
        return
    told, alone = plain(policy)
    alone = agreed(policy, alone)
    if alone.reason == NOT_FINITE:
        raise ValueError(f"{name}: {family} gives {NOT_FINITE} {kind}")
    if not alone.right:
        raise ValueError(f"{name}: {family} is not right here: {alone.reason}; take a model of another family")
    tried = {form: agreed(policy, probe(policy, form, told)) for form in forms_of(policy)}
    right = [form for form, found in tried.items() if found.right]
    if not right:
        packed = tried["packed"].reason if tried else "the family computes attention by itself"
        run_apart(policy, f"{name}: {family}", told, packed)
        say(f"{heading}: packed, {packed}: runs one sequence a forward, slower")
        return
    policy.run_as(right[0])
    shown = ", ".join(right[::-1]) + (f", sp {sp}" if sp > 1 else "")
    most = max(tried[form].states for form in right)
    wrong = [f"; {form}, {found.reason}: prompts are not shared" for form, found in tried.items() if not found.right]
    say(f"{heading}: {shown}: states differ by {most:.1g} at most" + "".join(wrong))


def run_apart(policy: Any, name: str, told: Sequences, packed: str) -> None:
    """Have a model run one sequence a forward, by the fastest of transformers' attentions that is right. Collective.

    name: begins messages. packed: the reason why its packed sequences are wrong.

    Raises:
        ValueError: it is wrong so, too, or settings need packed sequences.
    """
    if (sp := policy.world.sp_size) > 1:
        raise ValueError(f"--parallel.sp {sp}: {name} is wrong over divided tokens: {packed}; set --parallel.sp 1")
    if policy.routers:
        raise ValueError(
            f"--rollout.routing-replay: {name} runs one sequence a forward, where experts cannot be prescribed: packed "
            f"ones are wrong, {packed}; leave it off"
        )
    for attention in dict.fromkeys((own_attention(policy.model.hf), "eager")):
        policy.run_as("apart", attention)
        found = agreed(policy, probe(policy, "apart", told))
        if found.right:
            return
    raise ValueError(f"{name} is not right here: {found.reason}, and packed, {packed}; take a model of another family")


def forms_of(policy: Any) -> list[Form]:
    """List the forms to try on a model, fastest first."""
    if policy.form == "apart":
        return []
    return ["tree", "packed"] if policy.share else ["packed"]


def settle_backend(policy: Any, name: str) -> float:
    """Compare the numbers of packed sequences with those of each alone, by a backend that has no HF model. Collective.

    Returns their largest difference.

    Raises:
        ValueError: it is more than rounding.
    """
    config, dtype = policy.hf_config, DTYPES[policy.cfg.model.dtype]
    tokens = sequences(config, torch.device("cpu"))

    def numbers(pack: list[torch.Tensor]) -> torch.Tensor:
        lengths = torch.tensor([len(x) for x in pack])
        token = {"tokens": torch.cat(pack), "mask": torch.ones(int(lengths.sum()), dtype=torch.bool)}
        token["mask"][lengths.cumsum(0) - lengths] = False
        out = policy.logprobs(Batch(lengths, token, {}), 1.0)[0]
        return out.reshape(len(out), -1)

    apart, together = torch.cat([numbers([x]) for x in tokens]), numbers(tokens)
    found = Found(states=difference(together, apart, dtype))
    found.add("packed sequences give numbers that differ by", found.states, FORWARD[dtype])
    found = agreed(policy, found)
    if not found.right:
        raise ValueError(
            f"{name}: {config.model_type} is not right under --policy.backend {policy.cfg.policy.backend}: "
            f"{found.reason}; take --policy.backend fsdp"
        )
    return found.states
