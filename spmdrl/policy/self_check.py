"""Checks that a model computes correct results on this machine, before training or sampling starts.

`probe.py` compares each form of running packed batches with plain transformers. The model then uses the fastest correct
form: `tree` (shared tokens are computed once), `packed`, or `apart` (one sequence per forward pass), which is exact but
slower. If no form is correct, the check raises an error.
"""

from collections.abc import Callable
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.policy.attention.packed import own_attention
from spmdrl.policy.heads import Form
from spmdrl.policy.probe import FORWARD, NOT_FINITE, Found, Sequences, difference, plain, probe, sequences
from spmdrl.spmd.exchange import all_reduce


def worst_over_ranks(policy: Any, found: Found) -> Found:
    """Return a `Found` with the maximum ratio and the maximum state difference over all ranks. Collective."""
    numbers = torch.tensor([found.ratio, found.states], dtype=torch.float64)
    ratio, states = all_reduce(numbers, "max", policy.world.role_group).tolist()
    return Found(ratio, found.reason or "on another rank", states)


def choose_form(policy: Any, role: str, name: str, say: Callable[[str], None]) -> None:
    """Check a model and switch it to the fastest `Form` that gives correct results. Collective.

    role: role of the model in the job, for messages. name: the model-path flag and its value, for messages. say:
    callback that prints the result.

    Raises:
        ValueError: no form is both correct and allowed by the settings; the message names the flag to change.
    """
    family, kind, sp = policy.hf_config.model_type, policy.cfg.model.dtype, policy.world.sp_size
    if not policy.cfg.model.self_check:
        say(f"no self-check of the {role}: --model.no-self-check")
        return
    heading = f"self-check of the {role} ({name}, {family}, {kind})"
    if not hasattr(policy, "run_as"):
        say(f"{heading}: packed: numbers differ by {check_backend(policy, name):.1g} at most")
        return
    expected, alone = plain(policy)
    alone = worst_over_ranks(policy, alone)
    if alone.reason == NOT_FINITE:
        raise ValueError(f"{name}: {family} gives {NOT_FINITE} {kind}")
    if not alone.right:
        raise ValueError(f"{name}: {family} computes wrong numbers here: {alone.reason}; use another model family")
    # Forms to try, fastest first.
    forms: list[Form] = [] if policy.form == "apart" else ["tree", "packed"] if policy.share else ["packed"]
    tried = {form: worst_over_ranks(policy, probe(policy, form, expected)) for form in forms}
    right = [form for form, found in tried.items() if found.right]
    if not right:
        packed = tried["packed"].reason if tried else "the family computes attention by itself"
        run_apart(policy, f"{name}: {family}", expected, packed)
        say(f"{heading}: packed, {packed}: runs one sequence a forward, slower")
        return
    policy.run_as(right[0])
    named = ", ".join(right[::-1]) + (f", sp {sp}" if sp > 1 else "")
    most = max(tried[form].states for form in right)
    wrong = [f"; {form}, {found.reason}: prompts are not shared" for form, found in tried.items() if not found.right]
    say(f"{heading}: {named}: states differ by {most:.1g} at most" + "".join(wrong))


def run_apart(policy: Any, name: str, expected: Sequences, packed: str) -> None:
    """Switch a model to one sequence per forward pass, with the fastest correct attention in transformers. Collective.

    name: prefix of messages. expected: the results of plain transformers. packed: why packed sequences are wrong.

    Raises:
        ValueError: this form is wrong too, or a setting requires packed sequences.
    """
    if (sp := policy.world.sp_size) > 1:
        raise ValueError(
            f"--parallel.sp {sp}: {name} computes wrong numbers with divided sequences: {packed}; set --parallel.sp 1"
        )
    if policy.routers:
        raise ValueError(
            f"--rollout.routing-replay: {name} runs one sequence a forward, which does not support this flag, because "
            f"packed sequences give wrong results: {packed}; leave out the flag"
        )
    for attention in dict.fromkeys((own_attention(policy.model.hf), "eager")):
        policy.run_as("apart", attention)
        found = worst_over_ranks(policy, probe(policy, "apart", expected))
        if found.right:
            return
    raise ValueError(
        f"{name} computes wrong numbers here: {found.reason}; in packs, {packed}; use another model family"
    )


def check_backend(policy: Any, name: str) -> float:
    """Compare packed sequences with single sequences, on a backend without an HF model. Collective.

    Returns the relative difference (`probe.difference`) between the head's outputs in the two cases.

    Raises:
        ValueError: the difference is too large to be explained by rounding.
    """
    config, dtype = policy.hf_config, policy.compute
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
    found = worst_over_ranks(policy, found)
    if not found.right:
        raise ValueError(
            f"{name}: {config.model_type} computes wrong numbers under --policy.backend "
            f"{policy.cfg.policy.backend}: {found.reason}; use --policy.backend fsdp"
        )
    return found.states
