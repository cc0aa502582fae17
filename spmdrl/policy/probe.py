"""Measures how far each form of running packed batches (`heads.Form`) deviates from plain transformers.

Three short sequences are run through the model as one packed batch, and one by one through plain transformers. The
comparison covers the hidden states of all tokens, a gradient, the outputs of the head, and if the model reads images,
states behind an image (`probe_images.py`). In 16-bit dtypes, rounding can hide small errors, so two more tests check
for leaks between sequences: whether the gradient of a sequence reaches tokens of another sequence, and whether its
states change when the other sequences change. `self_check.py` uses the results.

Shapes: T tokens in the three sequences, D hidden size.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.fields import ConfigError
from spmdrl.data.tree import plan_tree
from spmdrl.health.causes import of_the_machine
from spmdrl.policy.attention.packed import own_attention, with_attention
from spmdrl.policy.forward_plan import ForwardPlan
from spmdrl.policy.heads import Form
from spmdrl.policy.liger import without_liger
from spmdrl.policy.probe_images import image_states
from spmdrl.spmd.exchange import all_reduce

log = logging.getLogger("spmdrl")

LENGTHS = (5, 9, 14)
PREFIX = 4
"""Length of the prefix that the second and the third sequence share."""
FORWARD = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Maximum relative difference between hidden states and those of plain transformers. The float64 limit is this loose
because some model families compute parts of float64 models in float32. In 16-bit dtypes the median over tokens is
compared, because rounding changes the expert choice of some tokens, and the limit is tightened if two of transformers'
attention implementations differ by less (`Sequences.most`).
"""
BACKWARD = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Maximum relative difference between gradients with respect to embeddings."""
LEAK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}
"""Limit on two numbers that would be 0 without rounding: the relative change in a token's state when other sequences
change, and the fraction of a gradient that reaches other sequences."""
ROUTED = 0.3
"""Limit on the relative change in a token's state when other sequences change, for MoE models in 16-bit dtypes."""
NOT_FINITE = "numbers that are not finite: its weights hold such numbers or are too large for --model.dtype"


@dataclass
class Found:
    """The result of testing one form of a model: the worst difference relative to its limit."""

    ratio: float = 0.0
    """The difference divided by its limit. Above 1, the form is considered wrong."""
    reason: str = ""
    """Description of the difference, or of the error that was raised."""
    states: float = 0.0
    """Relative difference between hidden states and those of plain transformers."""

    @property
    def right(self) -> bool:
        """True if every difference is within its limit."""
        return self.ratio <= 1

    def add(self, what: str, value: float, most: float) -> None:
        """Record a difference `value` if it is the worst so far relative to its limit `most`; nan counts as infinite.

        what: description of the difference.
        """
        ratio = value / most if value == value else float("inf")
        if ratio >= self.ratio:
            self.ratio, self.reason = ratio, f"{what} {value:.2g}"


@dataclass
class Sequences:
    """The three test sequences, and the results of plain transformers on each of them."""

    tokens: list[torch.Tensor]
    states: list[torch.Tensor] = field(default_factory=list)
    gradient: torch.Tensor | None = None
    """Gradient of the last sequence's states with respect to its embeddings, [n, D]."""
    noise: float = 0.0
    """Median difference between the states of two attention implementations in transformers, for 16-bit dtypes; 0 for
    other dtypes."""

    def most(self, dtype: torch.dtype) -> float:
        """Return the limit on differences between hidden states, which allows for rounding errors."""
        return min(FORWARD[dtype], max(LEAK[dtype], 3 * self.noise)) if self.noise else FORWARD[dtype]


def ordinary_tokens(hf_config: Any) -> list[int]:
    """Return all token ids of the vocabulary except those that the config lists as special tokens."""
    config = hf_config.get_text_config()
    rows = config.vocab_size
    special: set[int] = set()
    for each in (hf_config, config):
        for name, value in vars(each).items():
            if name.endswith(("token_id", "token_index")):
                special |= {x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)}
    ordinary = [i for i in range(rows) if i not in special]
    return ordinary if len(ordinary) > 2 else list(range(rows))


def sequences(hf_config: Any, device: torch.device, turn: int = 0) -> list[torch.Tensor]:
    """Return the three random sequences, the same on every rank. turn: a different value changes every token."""
    ordinary = torch.tensor(ordinary_tokens(hf_config))
    drawn = torch.randint(len(ordinary), (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    first, second, third = ordinary[(drawn + turn) % len(ordinary)].split(LENGTHS)
    return [x.to(device) for x in (first, second, torch.cat([second[:PREFIX], third[PREFIX:]]))]


class _Embedded:
    """Context manager that captures the embeddings of the first forward pass, to differentiate with respect to them."""

    def __init__(self, hf: Any):
        self.module, self.embeddings = hf.get_input_embeddings(), None

    def __enter__(self) -> "_Embedded":
        self.hook = self.module.register_forward_hook(self._capture)
        return self

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()

    def _capture(self, module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        if self.embeddings is None:
            self.embeddings = out.detach().requires_grad_()
        return self.embeddings

    def gradient(self, number: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a scalar with respect to the captured embeddings, [S, D]."""
        assert self.embeddings is not None
        return torch.autograd.grad(number, self.embeddings)[0].flatten(0, -2)


def plain(policy: Any) -> tuple[Sequences, Found]:
    """Run each sequence through plain transformers, and compare our head with the HF head. Collective.

    A model with Liger kernels is run both with and without them, and the results are compared.

    Returns the results for each sequence (with Liger kernels, if the model uses them) and the outcome of the
    comparisons. If the model code raises an error, `Found.reason` describes it.
    """
    hf, dtype, found = policy.model.hf, policy.compute, Found()
    expected = Sequences(sequences(policy.hf_config, policy.world.device))
    try:
        # Use eager attention as the baseline, because the other implementations lack features of some model families,
        # such as softcapping.
        with with_attention(hf, "eager"):
            with without_liger(hf) as replaced:
                exact = _alone(policy, expected.tokens)
            expected.states, expected.gradient = _alone(policy, expected.tokens) if replaced else exact
            with torch.no_grad():
                off = policy.model.off(expected.tokens[-1])
        if dtype.itemsize == 2:
            with with_attention(hf, own_attention(hf)), torch.no_grad():
                expected.noise = difference(policy.model.plain(expected.tokens[-1])[0], expected.states[-1], dtype)
        if not all(bool(x.isfinite().all()) for x in exact[0]):
            return expected, Found(float("inf"), NOT_FINITE)
        if replaced:
            _compare_liger(expected, exact, dtype, found)
            if not found.right:
                return expected, found
        if not all(bool(x.isfinite().all()) for x in (*expected.states, off)):
            return expected, Found(float("inf"), NOT_FINITE)
        heads = float(off.median() if dtype.itemsize == 2 else off.max())
        found.add("the head's numbers differ by", heads, FORWARD[dtype])
        second, third = (states[:PREFIX] for states in expected.states[1:])
        found.add("later tokens change the states of earlier ones by", difference(third, second, dtype), FORWARD[dtype])
    except Exception as error:
        found = _failed(error)
    finally:
        policy.reshard()
    return expected, found


def _alone(policy: Any, tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the hidden states of each sequence, run on its own, and the gradient for `Sequences`."""
    *most, last = tokens
    with torch.no_grad():
        states = [policy.model.plain(ids)[0] for ids in most]
    with _Embedded(policy.model.hf) as embedded:
        states.append(policy.model.plain(last)[0])
        gradient = embedded.gradient(_read(states[-1]))
    return [x.detach() for x in states], gradient


def _compare_liger(
    liger: Sequences, exact: tuple[list[torch.Tensor], torch.Tensor], dtype: torch.dtype, found: Found
) -> None:
    """Compare single-sequence results with Liger kernels to those with transformers' own layers (`exact`)."""
    assert liger.gradient is not None
    name = "Liger's layers (--policy.liger off leaves them out)"
    states, gradient = (torch.cat(liger.states), torch.cat(exact[0])), (liger.gradient, exact[1])
    found.add(f"{name} change states by", difference(*states, dtype), FORWARD[dtype])
    found.add(f"{name} change a gradient by", difference(*gradient, dtype), BACKWARD[dtype])


def _failed(error: Exception) -> Found:
    """Return a `Found` for an error in the model code, which every rank raises; re-raise hardware and system errors."""
    if of_the_machine(error):
        raise error
    message = " ".join(str(error).split())[:200]
    # ValueErrors from our attention are complete sentences; other errors need an introduction.
    text = message if isinstance(error, ValueError) else f"its code fails with {type(error).__name__}: {message}"
    log.info("self-check: %s", text)
    return Found(float("inf"), text)


def probe(policy: Any, form: Form, expected: Sequences) -> Found:
    """Compare one form of a model on the packed sequences with plain transformers. Collective.

    expected: the results of plain transformers. If the model code raises an error, `Found.reason` describes it.
    """
    before, found = policy.form, Found()
    policy.model.form = form
    try:
        _compare(policy, form, expected, found)
        if policy.model.vision is not None and found.right:
            off = difference(*image_states(policy, ordinary_tokens(policy.hf_config)), policy.compute)
            found.add("states of sequences with images differ by", off, FORWARD[policy.compute])
    except ConfigError:  # The kernel in the settings does not support this model.
        raise
    except Exception as error:
        found = _failed(error)
    finally:
        policy.model.form = before
        policy.reshard()
    return found


def _compare(policy: Any, form: Form, expected: Sequences, found: Found) -> None:
    dtype, pack = policy.compute, torch.cat(expected.tokens)
    device, lengths = pack.device, torch.tensor(LENGTHS)
    ends = lengths.cumsum(0).tolist()
    mask, third = torch.ones(len(pack), dtype=torch.bool), slice(ends[1], ends[2])

    def plan(tokens: torch.Tensor) -> ForwardPlan:
        return policy.model.plan(tokens.cpu(), lengths, mask, before=False)

    if form == "apart":
        with torch.no_grad():
            states = policy.model.states(plan(pack))
        found.states = difference(states, torch.cat(expected.states), dtype)
        found.add("states differ by", found.states, FORWARD[dtype])
        return
    place = torch.arange(len(pack))
    if form == "tree":
        # The second and third sequence are two samples of one prompt, and the loss mask excludes the prompt.
        mask[ends[0] : ends[0] + PREFIX] = mask[ends[1] : ends[1] + PREFIX] = False
        tree = plan_tree(pack.cpu(), lengths, mask)
        assert tree is not None
        place = tree.place
    with _Embedded(policy.model.hf) as embedded:
        states = policy.model.states(plan(pack))
        gradient = embedded.gradient(_read(states[third]))
    states = states.detach()
    computed = mask.to(device)
    found.states = difference(states[computed], torch.cat(expected.states)[computed], dtype)
    found.add("states differ by", found.states, expected.most(dtype))
    if (group := policy.world.sp_group) is not None:
        parts = gradient.new_zeros(group.size(), *gradient.shape)
        parts[group.rank()] = gradient
        gradient = all_reduce(parts, "sum", group).flatten(0, 1)
    mine = place[third].to(device)
    own, others = gradient[mine], gradient.double().index_fill(0, mine, 0)
    assert expected.gradient is not None
    most = expected.most(dtype) * 2 if expected.noise else BACKWARD[dtype]
    found.add("a gradient differs by", difference(own, expected.gradient, dtype), most)
    leak = float(others.norm() / (own.double().norm() + 1e-30))
    found.add("sequences reach each other in a gradient by", leak, LEAK[dtype])
    changes = []
    for turn in (1, 2):
        # Try twice: rounding can change an expert choice in one trial, but a leak shows up in both.
        first, second, _ = sequences(policy.hf_config, device, turn)
        other = torch.cat([first, expected.tokens[1][:PREFIX], second[PREFIX:], expected.tokens[2]])
        with torch.no_grad():
            changed = policy.model.states(plan(other))
        changes.append(_off(changed[third], states[third])[mask[third]])
    routed = dtype.itemsize == 2 and any("expert" in name for name, _ in policy.model.hf.named_modules())
    most = ROUTED if routed else LEAK[dtype]
    found.add("sequences reach each other by", float(torch.stack(changes).amin(0).max()), most)


def _read(states: torch.Tensor) -> torch.Tensor:
    """Return the scalar whose gradient is compared: a weighted sum over the states [n, D] after the shared prefix."""
    states = states[PREFIX:]
    weight = torch.linspace(-1, 1, states.numel(), dtype=torch.float64, device=states.device).view_as(states)
    return (states * torch.cos(17 * weight).to(states.dtype)).sum()


def _off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the row-wise distance between a and b, [n], relative to the mean row norm of b. a, b: [n, D]."""
    a, b = a.double(), b.double()
    return (a - b).norm(dim=-1) / (b.norm(dim=-1).mean() + 1e-30)


def difference(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the maximum (median for 16-bit dtypes) relative difference between the rows of a and b, both [n, D]."""
    off = _off(a, b)
    return float(off.median() if dtype.itemsize == 2 and bool(off.isfinite().all()) else off.max())
