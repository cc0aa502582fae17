"""The division of a Megatron policy over ranks, and checks that a model can be divided so."""

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's axes; the remaining factor of the number of ranks is data parallelism."""

    tp: int = 1
    """Divides heads, feed-forward columns and the vocabulary."""
    cp: int = 1
    """Divides the tokens of each sequence (the `sp` axis of the mesh)."""
    pp: int = 1
    """Divides the layers."""
    virtual_stages: int = 1
    """Non-adjacent parts of the model that each pipeline rank holds."""
    ep: int = 1
    """Divides the experts, over the ranks of tp, cp and data parallelism."""
    etp: int = 1
    """Divides the columns of each expert."""
    sequence_parallel: bool = True
    """Divide tokens over tp between the tensor-parallel parts of a layer; no effect at tp 1."""
    last_stage_layers: int = 0
    """Layers of the last stage; the other stages share the rest equally. 0: all stages have the same number."""

    @property
    def sp(self) -> bool:
        """True if sequence parallelism is in effect."""
        return self.sequence_parallel and self.tp > 1


def check_ranks(layout: Layout, ranks: int) -> None:
    """Check that the axes fit a number of ranks.

    Raises:
        ValueError: they do not; the message names the flag and values that would fit.
    """
    dense, experts = layout.tp * layout.cp * layout.pp, layout.etp * layout.ep * layout.pp
    if ranks % dense:
        raise ValueError(
            f"--parallel.tp {layout.tp} x --parallel.cp {layout.cp} x --parallel.pp {layout.pp} = {dense} does not "
            f"divide {ranks} ranks"
        )
    if ranks % experts:
        fits = [n for n in divisors(ranks // layout.pp) if not (ranks // layout.pp) % (n * layout.etp)]
        raise ValueError(
            f"--parallel.ep {layout.ep} x --parallel.etp {layout.etp} x --parallel.pp {layout.pp} = {experts} does not "
            f"divide {ranks} ranks; --parallel.ep may be {some(fits) or 'nothing with this --parallel.etp'}"
        )
    if layout.virtual_stages > 1 and layout.pp == 1:
        raise ValueError(f"--parallel.virtual-stages {layout.virtual_stages} needs --parallel.pp of at least 2")
    if layout.last_stage_layers and layout.pp == 1:
        raise ValueError(f"--parallel.last-stage-layers {layout.last_stage_layers} needs --parallel.pp of at least 2")


def check_model(layout: Layout, settings: dict) -> None:
    """Check that the layout can divide a model. settings: keyword arguments of its TransformerConfig (`families.py`).

    Raises:
        ValueError: it cannot; the message names the flag and values that would fit.
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
    held = stages(layout, settings["num_layers"])
    if any(count % layout.virtual_stages for count in held):
        raise ValueError(
            f"--parallel.virtual-stages {layout.virtual_stages}: pipeline ranks hold "
            f"{' and '.join(map(str, sorted(set(held))))} of the model's layers; --parallel.virtual-stages may be "
            f"{some(divisors(gcd(*held)))}"
        )
    if experts:
        divides("--parallel.ep", layout.ep, "experts", experts)
        divides("--parallel.etp", layout.etp, "columns of an expert", settings["moe_ffn_hidden_size"])
    elif layout.ep > 1 or layout.etp > 1:
        raise ValueError(
            f"--parallel.ep {layout.ep}, --parallel.etp {layout.etp}: the model has no experts; leave both at 1"
        )
    if layout.tp > 1 and not layout.sequence_parallel and (experts or mla):
        # Megatron refuses experts here; under latent attention it sums gradients of latents and rotary keys wrongly.
        raise ValueError(
            f"--parallel.tp {layout.tp}: a mixture of experts, or latent attention, needs sequence parallelism too; "
            "leave out --parallel.no-sequence-parallel"
        )


def stages(layout: Layout, layers: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    Raises:
        ValueError: the layers cannot be divided so; the message names the flag and values that would fit.
    """
    last, others = layout.last_stage_layers, layout.pp - 1
    # Sizes of the last stage that leave all others an equal number of layers, nearest to an even share first.
    uneven = [n for n in range(1, layers - others + 1) if others and (layers - n) % others == 0]
    uneven.sort(key=lambda n: abs(n - layers / layout.pp))
    # Keep those that the virtual stages divide too.
    parts = layout.virtual_stages
    would = [n for n in uneven if n % parts == 0 and (layers - n) // others % parts == 0]
    nothing = "nothing" + (f" with --parallel.virtual-stages {parts}" if parts > 1 else " with this --parallel.pp")
    if last and last not in uneven:
        raise ValueError(
            f"--parallel.last-stage-layers {last}: the other {others} of --parallel.pp {layout.pp} cannot divide the "
            f"rest of {layers} layers; --parallel.last-stage-layers may be {some(would) or nothing}"
        )
    if not last and layers % layout.pp:
        more = f", or this with --parallel.last-stage-layers {would[0]}" if would else ""
        even = [n for n in divisors(layers) if layers // n % parts == 0 and (n > 1 or parts == 1)]
        raise ValueError(
            f"--parallel.pp {layout.pp}: the model has {layers} layers; --parallel.pp may be "
            f"{some(even) or nothing}{more}"
        )
    each = (layers - last) // others if last else layers // layout.pp
    return [each] * others + [last or each]


def divides(flag: str, size: int, what: str, count: int) -> None:
    """Raise ValueError, naming the values that would fit, unless size divides count."""
    if count % size:
        raise ValueError(f"{flag} {size}: the model has {count} {what}; {flag} may be {some(divisors(count))}")


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def some(values: list[int]) -> str:
    """Format the first few values for a message."""
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


def as_list(value: int | list[int]) -> list[int]:
    """Return a list unchanged, a single value as a list of one."""
    return value if isinstance(value, list) else [value]
