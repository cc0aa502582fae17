"""Measures how far the forms in which a model runs packs (`heads.Form`) are from plain transformers.

Three short sequences run through the model in a form, and each one alone through plain transformers. The states of all
tokens, a gradient, and the head's numbers are compared. Rounding in 16 bits hides small mistakes from this
comparison, so two further tests are exact: does a sequence's gradient reach tokens of other sequences, and do its
states change when those do? `self_check.py` decides by the results.

T tokens of the three sequences, D the width.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.fields import ConfigError
from spmdrl.data.tree import plan_tree
from spmdrl.health.causes import of_the_machine
from spmdrl.policy.attention.packed import own_attention, with_attention
from spmdrl.policy.heads import Form
from spmdrl.spmd.exchange import all_reduce

log = logging.getLogger("spmdrl")

LENGTHS = (5, 9, 14)
PREFIX = 4
"""Number of first tokens that the second and the third sequence share."""
FORWARD = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of states from plain transformers, relative to their size. In 16 bits the median over tokens
counts, because rounding alone changes the choice of experts for some tokens; and less is allowed where two attentions
of the model itself differ by less (`Sequences.most`). Some families compute parts of float64 models in float32.
"""
BACKWARD = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.1}
"""The same for a gradient with respect to embeddings."""
LEAK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}
"""Largest change of a token's states when other sequences change, and share of the gradient that reaches them."""
ROUTED = 0.3
"""The same for states in 16 bits of models with experts."""
NOT_FINITE = "numbers that are not finite: its weights hold such numbers or are too large for --model.dtype"


@dataclass
class Found:
    """The differences of one form of a model, each as a share of the largest allowed one."""

    ratio: float = 0.0
    """The largest share: above 1 the form is wrong."""
    reason: str = ""
    """The largest difference in words; for a form that raised an error, the error."""
    states: float = 0.0
    """The difference of the states from plain transformers."""

    @property
    def right(self) -> bool:
        """True if no difference is larger than rounding."""
        return self.ratio <= 1

    def add(self, what: str, value: float, most: float) -> None:
        """Record a difference whose bound is `most`; nan counts as too large."""
        ratio = value / most if value == value else float("inf")
        if ratio >= self.ratio:
            self.ratio, self.reason = ratio, f"{what} {value:.2g}"


@dataclass
class Sequences:
    """The three sequences, and the plain model's results for each alone."""

    tokens: list[torch.Tensor]
    states: list[torch.Tensor] = field(default_factory=list)
    gradient: torch.Tensor | None = None
    """Gradient of the last sequence's states with respect to its embeddings [n, D]."""
    noise: float = 0.0
    """In 16 bits, the median difference of states between two attentions of transformers; 0 if only one exists."""

    def most(self, dtype: torch.dtype) -> float:
        """Return the largest difference of states that counts as rounding."""
        return min(FORWARD[dtype], max(LEAK[dtype], 3 * self.noise)) if self.noise else FORWARD[dtype]


def ordinary_tokens(hf_config: Any) -> list[int]:
    """List the tokens of the vocabulary that are not special to the model."""
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
    """Draw the sequences, the same on every rank. turn: another number gives another token in every position."""
    ordinary = torch.tensor(ordinary_tokens(hf_config))
    drawn = torch.randint(len(ordinary), (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    first, second, third = ordinary[(drawn + turn) % len(ordinary)].split(LENGTHS)
    return [x.to(device) for x in (first, second, torch.cat([second[:PREFIX], third[PREFIX:]]))]


class _Embedded:
    """Captures the embeddings of the first forward inside this context, as the leaves of a gradient."""

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
        """Return d number / d embeddings [S, D]."""
        assert self.embeddings is not None
        return torch.autograd.grad(number, self.embeddings)[0].flatten(0, -2)


def plain(policy: Any) -> tuple[Sequences, Found]:
    """Run each sequence alone through plain transformers, and compare our head with the model's own. Collective.

    An error of the model becomes the reason.
    """
    hf, dtype, found = policy.model.hf, policy.compute, Found()
    expected = Sequences(sequences(policy.hf_config, policy.world.device))
    try:
        # Other implementations leave out features of some families, such as a cap on scores.
        with with_attention(hf, "eager"):
            *most, last = expected.tokens
            with torch.no_grad():
                expected.states += [policy.model.plain(ids)[0] for ids in most]
            with _Embedded(hf) as embedded:
                states = policy.model.plain(last)[0]
                expected.gradient = embedded.gradient(_read(states))
            expected.states.append(states.detach())
            with torch.no_grad():
                off = policy.model.off(last)
        if dtype.itemsize == 2:
            with with_attention(hf, own_attention(hf)), torch.no_grad():
                expected.noise = difference(policy.model.plain(last)[0], expected.states[-1], dtype)
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


def _failed(error: Exception) -> Found:
    """Turn an error of the model's code, which is the same on every rank, into a finding; raise other errors again."""
    if of_the_machine(error):
        raise error
    message = " ".join(str(error).split())[:200]
    # The attention's own refusals are whole sentences.
    text = message if isinstance(error, ValueError) else f"its code fails with {type(error).__name__}: {message}"
    log.info("self-check: %s", text)
    return Found(float("inf"), text)


def probe(policy: Any, form: Form, expected: Sequences) -> Found:
    """Run one form of a model on packs of the sequences. Collective.

    expected: the plain model's results. An error of the model becomes the reason.
    """
    before, found = policy.form, Found()
    policy.model.form = form
    try:
        _compare(policy, form, expected, found)
    except ConfigError:  # the settings name a kernel that cannot run this model
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
    if form == "apart":
        with torch.no_grad():
            states = policy.model.states(pack, lengths, mask.to(device))
        found.states = difference(states, torch.cat(expected.states), dtype)
        found.add("states differ by", found.states, FORWARD[dtype])
        return
    place = torch.arange(len(pack))
    if form == "tree":
        # Samples of a prompt share it.
        mask[ends[0] : ends[0] + PREFIX] = mask[ends[1] : ends[1] + PREFIX] = False
        tree = plan_tree(pack.cpu(), lengths, mask)
        assert tree is not None
        place = tree.place
    with _Embedded(policy.model.hf) as embedded:
        states = policy.model.states(pack, lengths, mask.to(device))
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
        # Where rounding chooses an expert, another turn chooses otherwise; a leak shows in both.
        first, second, _ = sequences(policy.hf_config, device, turn)
        other = torch.cat([first, expected.tokens[1][:PREFIX], second[PREFIX:], expected.tokens[2]])
        with torch.no_grad():
            changed = policy.model.states(other, lengths, mask.to(device))
        changes.append(_off(changed[third], states[third])[mask[third]])
    routed = dtype.itemsize == 2 and any("expert" in name for name, _ in policy.model.hf.named_modules())
    most = ROUTED if routed else LEAK[dtype]
    found.add("sequences reach each other by", float(torch.stack(changes).amin(0).max()), most)


def _read(states: torch.Tensor) -> torch.Tensor:
    """Sum a sequence's states [n, D] after the shared tokens with different weights, to take the gradient of."""
    states = states[PREFIX:]
    weight = torch.linspace(-1, 1, states.numel(), dtype=torch.float64, device=states.device).view_as(states)
    return (states * torch.cos(17 * weight).to(states.dtype)).sum()


def _off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row [n, D] as a share of the rows' mean size."""
    a, b = a.double(), b.double()
    return (a - b).norm(dim=-1) / (b.norm(dim=-1).mean() + 1e-30)


def difference(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of rows [n, D] of a form from the plain model's; in 16 bits the median one."""
    off = _off(a, b)
    return float(off.median() if dtype.itemsize == 2 and bool(off.isfinite().all()) else off.max())
