"""Describes the parallel layout of a Megatron policy, and checks it against the ranks and the model."""

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's parallel axes. The data-parallel size is the number of ranks divided by tp * cp * pp."""

    tp: int = 1
    """Tensor-parallel size: ranks that shard attention heads, feed-forward columns and the vocabulary."""
    cp: int = 1
    """Context-parallel size: ranks that split the tokens of each sequence (the `sp` axis of the mesh)."""
    pp: int = 1
    """Pipeline-parallel size: ranks that split the layers."""
    virtual_stages: int = 1
    """Number of model chunks on each pipeline rank; above 1, the interleaved schedule is used."""
    ep: int = 1
    """Expert-parallel size: ranks that split the experts, chosen from the tp, cp and data-parallel ranks."""
    etp: int = 1
    """Expert-tensor-parallel size: ranks that shard the columns of each expert."""
    sequence_parallel: bool = True
    """True to split tokens over tp in the parts of a layer that tp does not shard. It has no effect if tp is 1."""
    last_stage_layers: int = 0
    """Number of layers on the last stage, or 0 to split layers evenly over all stages without an explicit number."""
    first_stage_layers: int = 0
    """Number of layers on the first stage, or 0 to split layers evenly over all stages without an explicit number."""

    @property
    def sp(self) -> bool:
        """True if sequence parallelism is enabled and tp > 1."""
        return self.sequence_parallel and self.tp > 1


def check_ranks(layout: Layout, ranks: int) -> None:
    """Raise ValueError unless the axes fit the number of ranks; the message names the flag and valid values."""
    dense, experts = layout.tp * layout.cp * layout.pp, layout.etp * layout.ep * layout.pp
    if ranks % dense:
        raise ValueError(
            f"--parallel.tp {layout.tp} x --parallel.cp {layout.cp} x --parallel.pp {layout.pp} = {dense} does not "
            f"divide {ranks} ranks"
        )
    if ranks % experts:
        fits = [n for n in divisors(ranks // layout.pp) if not (ranks // layout.pp) % (n * layout.etp)]
        advice = f"--parallel.ep may be {some(fits)}" if fits else "no --parallel.ep fits this --parallel.etp"
        raise ValueError(
            f"--parallel.ep {layout.ep} x --parallel.etp {layout.etp} x --parallel.pp {layout.pp} = {experts} does not "
            f"divide {ranks} ranks; {advice}"
        )
    if layout.virtual_stages > 1 and layout.pp == 1:
        raise ValueError(f"--parallel.virtual-stages {layout.virtual_stages} needs --parallel.pp of at least 2")
    for flag, count in (("first", layout.first_stage_layers), ("last", layout.last_stage_layers)):
        if count and layout.pp == 1:
            raise ValueError(f"--parallel.{flag}-stage-layers {count} needs --parallel.pp of at least 2")


def check_model(layout: Layout, settings: dict) -> None:
    """Raise ValueError unless the layout is valid for a model; the message names the flag and valid values.

    settings: keyword arguments of the model's TransformerConfig (`families.py`).
    """
    experts = settings.get("num_moe_experts") or 0
    mla = settings.get("multi_latent_attention", False)
    heads = settings["num_attention_heads"]
    tp = [("attention heads", heads)]
    if not mla:
        tp.append(("key-value heads", settings.get("num_query_groups") or heads))
    if not experts or 0 in as_list(settings.get("moe_layer_freq", 1)):
        tp.append(("feed-forward columns", settings["ffn_hidden_size"]))
    if settings.get("moe_shared_expert_intermediate_size"):
        tp.append(("columns of the shared experts", settings["moe_shared_expert_intermediate_size"]))
    for what, count in tp:
        divides("--parallel.tp", layout.tp, what, count)
    sizes = stages(layout, settings["num_layers"])
    if any(count % layout.virtual_stages for count in sizes):
        raise ValueError(
            f"--parallel.virtual-stages {layout.virtual_stages}: pipeline ranks hold "
            f"{' and '.join(map(str, sorted(set(sizes))))} of the model's layers; --parallel.virtual-stages may be "
            f"{some(divisors(gcd(*sizes)))}"
        )
    if experts:
        divides("--parallel.ep", layout.ep, "experts", experts)
        divides("--parallel.etp", layout.etp, "columns of an expert", settings["moe_ffn_hidden_size"])
    elif layout.ep > 1 or layout.etp > 1:
        raise ValueError(
            f"--parallel.ep {layout.ep}, --parallel.etp {layout.etp}: the model has no experts; leave both at 1"
        )
    if layout.tp > 1 and not layout.sequence_parallel and (experts or mla):
        # Without sequence parallelism, Megatron rejects experts, and its latent attention gradients are wrong.
        raise ValueError(
            f"--parallel.tp {layout.tp}: a mixture of experts, or latent attention, needs sequence parallelism too; "
            "leave out --parallel.no-sequence-parallel"
        )


def stages(layout: Layout, layers: int) -> list[int]:
    """Return the number of layers on each pipeline stage.

    Raises:
        ValueError: the layers cannot be split; the message names the flag and valid values.
    """
    first, last, parts = layout.first_stage_layers, layout.last_stage_layers, layout.virtual_stages
    if not first and not last:
        if layers % layout.pp:
            would = _end_stage(layout, layers, 0)
            uneven = f"this with --parallel.last-stage-layers {would[0]}" if would else ""
            even = [n for n in divisors(layers) if layers // n % parts == 0 and (n > 1 or parts == 1)]
            what = _nothing("--parallel.pp", layout, divisors(layers))
            if even:
                what = "--parallel.pp may be " + some(even) + (f", or {uneven}" if would else "")
            elif would:
                what = f"use {uneven}"
            raise ValueError(f"--parallel.pp {layout.pp}: the model has {layers} layers; {what}")
        return [layers // layout.pp] * layout.pp
    # If the settings give the layers of both end stages, suggest numbers for the last stage.
    flag, mine, given = ("last", last, first) if last else ("first", first, 0)
    others = layout.pp - 1 - bool(given)
    if mine not in _end_stage(layout, layers, given, parts=1):
        among = f"with --parallel.first-stage-layers {given}, " if given else ""
        # If there are two stages and the settings give the layers of both, there are no other stages (`others` is 0).
        place = f"the other stages ({others} of --parallel.pp {layout.pp})"
        problem = f"the rest of {layers} layers cannot be divided equally over {place}"
        name, sizes = f"--parallel.{flag}-stage-layers", _end_stage(layout, layers, given)
        fits = f"{name} may be {some(sizes)}"
        raise ValueError(
            f"{name} {mine}: {among}"
            + (problem if others or not given else f"the two stages do not add up to {layers} layers")
            + f"; {fits if sizes else _nothing(name, layout, _end_stage(layout, layers, given, parts=1), given)}"
        )
    each = (layers - first - last) // max(others, 1)
    return [first or each, *[each] * (layout.pp - 2), last or each]


def _end_stage(layout: Layout, layers: int, given: int, parts: int = 0) -> list[int]:
    """Return the valid layer counts for the first or last stage. The counts closest to an even split come first.

    A layer count is valid if the remaining layers split evenly over the other stages. given: configured layer count of
    the stage at the opposite end, or 0 if not set. parts: number of virtual stages, which must divide all layer counts;
    0 uses the layout's number.
    """
    parts, others, rest = parts or layout.virtual_stages, layout.pp - 1 - bool(given), layers - given
    if given % parts:
        return []
    if others < 1:
        return [rest] if given and others == 0 and rest > 0 and rest % parts == 0 else []
    sizes = [n for n in range(parts, rest - others + 1, parts) if (rest - n) % (others * parts) == 0]
    return sorted(sizes, key=lambda n: abs(n - layers / layout.pp))


def _nothing(flag: str, layout: Layout, plain: list[int], given: int = 0) -> str:
    """Return an error message for a flag without valid values. plain: values that are valid without virtual stages."""
    if layout.virtual_stages > 1 and plain:
        without = f"without it, {flag} may be {some(plain)}"
        return f"no {flag} fits --parallel.virtual-stages {layout.virtual_stages}; {without}"
    if given:
        return f"no {flag} fits --parallel.first-stage-layers {given}: change that number"
    return f"no {flag} fits --parallel.pp {layout.pp}: lower that number"


def divides(flag: str, size: int, what: str, count: int) -> None:
    """Raise ValueError unless size divides count; the message names valid values. what: name of the counted things."""
    if count % size:
        raise ValueError(f"{flag} {size}: the model has {count} {what}; {flag} may be {some(divisors(count))}")


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def some(values: list[int]) -> str:
    """Return the first few values as text for a message."""
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


def as_list(value: int | list[int]) -> list[int]:
    """Return a list unchanged, and wrap a single value in a list."""
    return value if isinstance(value, list) else [value]
