"""aligned_loss against plain torch on full logits, and against trl 1.16's own loss of ULD and GOLD."""

import ast
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spmdrl_kernels.aligned import Matched, SpanTeacher, aligned_loss
from spmdrl_kernels.linear import linear_logprob
from tests.unit.test_kernel_distill import alike, definition

BETAS = [0.0, 0.3, 1.0]
SPANS = [([0], [0]), ([1, 2], [1]), ([3], [2, 3, 4]), ([4, 5, 6], [5, 6]), ([7], [7])]
"""Places of the student's and the teacher's tokens in each span."""
S, T, V, U, D, E = 8, 8, 41, 53, 6, 5


def make(seed=0, dtype=torch.float64, scale=1.0):
    """States and heads of both, with gradient for the student's, and the sampled tokens."""
    rng = torch.Generator().manual_seed(seed)
    h, w, states, head = (
        (torch.randn(*shape, generator=rng, dtype=torch.float64) * scale).to(dtype)
        for shape in ((S, D), (V, D), (T, E), (U, E))
    )
    mine, theirs = (torch.randint(size, (n,), generator=rng) for n, size in ((S, V), (T, U)))
    return h.requires_grad_(), w.requires_grad_(), states, head, mine, theirs


def paired(beta: float) -> Matched:
    """12 tokens that both have, under other numbers."""
    rng = torch.Generator().manual_seed(3)
    return Matched(torch.randperm(V, generator=rng)[:12], torch.randperm(U, generator=rng)[:12], beta)


def ours(h, w, states, head, mine, theirs, weight_N, matched, merge="first", divisors=(1.0, 1.0), **more):
    """The kernel's sum, with the spans' other tokens by `linear_logprob`, as the objective puts them together."""
    base = [[span[side][0 if merge == "first" else -1] for span in SPANS] for side in (0, 1)]
    rows = [(n, i, [j for j in span[i] if j != base[i][n]]) for n, span in enumerate(SPANS) for i in (0, 1)]
    other = [[(n, j) for n, i, js in rows if i == side for j in js] for side in (0, 1)]
    numbers = []
    for side, (x, weight, tokens, divisor) in enumerate(
        [(h, w, mine, divisors[0]), (states, head, theirs, divisors[1])]
    ):
        at = torch.tensor([j for _, j in other[side]])
        logp, _ = linear_logprob(x[at], weight, tokens[at], divisor)
        numbers.append((torch.tensor([n for n, _ in other[side]]), logp))
    shifts = [
        torch.zeros(len(SPANS), dtype=torch.float64).index_add(0, n, logp.detach().double()) for n, logp in numbers
    ]
    teacher = SpanTeacher(states[base[1]], head, shifts[1], divisors[1])
    total, slope, distance, entropy = aligned_loss(
        h[base[0]], w, shifts[0], teacher, weight_N, matched, divisors[0], chunk_tokens=2, **more
    )
    span, logp = numbers[0]
    return total + (slope[span] * (logp - logp.detach())).sum(), distance, entropy


def plainly(h, w, states, head, mine, theirs, matched, merge="first", divisors=(1.0, 1.0)):
    """Distances of the spans by their definition, on full probabilities."""
    sides = [
        (torch.softmax(x @ y.t() / d, 1), z)
        for x, y, z, d in ((h, w, mine, divisors[0]), (states, head, theirs, divisors[1]))
    ]
    out = []
    for span in SPANS:
        merged = []
        for (p, tokens), places in zip(sides, span, strict=True):
            base = places[0] if merge == "first" else places[-1]
            row = p[base]
            for place in places:
                if place != base:
                    row = row * p[place, tokens[place]]
            merged.append(row)
        s, t = merged
        direct = share = 0.0
        if matched is not None:
            share = len(matched.student_M) / U
            direct = definition(s[matched.student_M].log(), t[matched.teacher_M].log(), matched.beta)
            s, t = (
                torch.stack([x[i] for i in range(len(x)) if i not in set(taken.tolist())])
                for x, taken in ((s, matched.student_M), (t, matched.teacher_M))
            )
        s, t = (torch.sort(x, descending=True).values for x in (s, t))
        longest = max(len(s), len(t))
        s, t = (torch.cat([x, x.new_zeros(longest - len(x))]) for x in (s, t))
        out.append(share * direct + (1 - share) * (s - t).abs().sum())
    return torch.stack(out)


@pytest.mark.parametrize("merge", ["first", "last"])
@pytest.mark.parametrize("beta", [None, *BETAS])
def test_kernel_aligned_distance_and_gradient_are_those_of_full_probabilities(beta, merge):
    made, divisors = make(), (0.7, 1.3)
    matched = None if beta is None else paired(beta)
    weight_N = torch.rand(len(SPANS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = plainly(*made, matched, merge, divisors)
    gradient = torch.autograd.grad(3 * (want * weight_N).sum(), made[:2])
    total, distance, entropy = ours(*made, weight_N, matched, merge, divisors)
    alike((total, distance), ((want * weight_N).sum(), want))
    alike(torch.autograd.grad(3 * total, made[:2]), gradient)
    base = [span[0][0 if merge == "first" else -1] for span in SPANS]
    logp = torch.log_softmax(made[0] @ made[1].t() / divisors[0], 1)[base]
    alike([entropy], [-(logp.exp() * logp).sum(1)])


def trl_class() -> Any:
    """`ULDLoss` out of the trl wheel, and what it calls; importing its trainer takes half a minute."""
    tree = ast.parse((files("trl") / "experimental/gold/gold_trainer.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    jsd = [x for x in classes["GOLDTrainer"].body if getattr(x, "name", "") == "generalized_jsd_loss"]
    trainer = ast.ClassDef("GOLDTrainer", [], [], jsd, [])
    space = {"torch": torch, "F": F, "nn": torch.nn, "GOLDConfig": object}
    body: list[ast.stmt] = [classes["ULDLoss"], trainer]
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), "gold_trainer.py", "exec"), space)
    return space["ULDLoss"]


def trl_loss(made, merge: str, matched: Matched | None):
    """ULDLoss of trl on the same spans: the state before a token predicts it.

    Its `observed` reads the logits at a token's own place, its `bayesian` those at the place before; both get logits
    that lie where they look, so that each token's own prediction is compared.
    """
    h, w, states, head, mine, theirs = made
    settings = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=1.0,
        uld_teacher_temperature=1.0, uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=True,
        uld_token_merge_strategy={"first": "observed", "last": "bayesian"}[merge],
        uld_use_hybrid_loss=matched is not None, uld_hybrid_matched_weight=None, uld_hybrid_unmatched_weight=None,
        beta=matched.beta if matched else 1.0,
    )  # fmt: skip
    vocab = [{f"own {side} {i}": i for i in range(size)} for side, size in enumerate((V, U))]
    if matched is not None:
        for pair in zip(matched.student_M.tolist(), matched.teacher_M.tolist(), strict=True):
            for side, number in enumerate(pair):
                del vocab[side][f"own {side} {number}"]
                vocab[side][f"both {pair}"] = number
    tokenizers = [SimpleNamespace(get_vocab=lambda v=v: v) for v in vocab]
    loss = trl_class()(settings, *tokenizers)
    given = []
    for side, (x, weight, tokens) in enumerate([(h, w, mine), (states, head, theirs)]):
        logits = x @ weight.t()
        spare = logits.new_zeros(1, logits.shape[1])
        logits = torch.cat([spare, logits] if merge == "first" else [logits, spare])[None]
        ids = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])[None]
        labels = ids.clone()
        labels[0, 0] = -100
        # Spans end at 10, 20, ... and tokens between at other places on either side.
        ends = [
            (n + 1) * 10 - (len(s[side]) - 1 - k) * (3 * side + 1)
            for n, s in enumerate(SPANS)
            for k in range(len(s[side]))
        ]
        offsets = torch.tensor([[0, 0], *([0, end] for end in ends)])[None]
        given.append((logits, labels, ids, offsets))
    (a, b, c, d), (e, f, g, i) = given
    return loss(a, e, b, f, c, g, student_byte_offsets=d, teacher_byte_offsets=i)


@pytest.mark.parametrize("merge", ["first", "last"])
@pytest.mark.parametrize("beta", [None, *BETAS])
def test_parity_trl_uld_and_gold(beta, merge):
    """Values and gradients of trl's own loss, whose mean is over the spans of a response.

    Flat distributions: trl takes 1e-8 for smaller probabilities.
    """
    made, matched = make(seed=4, scale=0.4), None if beta is None else paired(beta)
    want = trl_loss(made, merge, matched)
    total, *_ = ours(*made, torch.full((len(SPANS),), 1 / len(SPANS), dtype=torch.float64), matched, merge)
    assert total.item() == pytest.approx(want.item(), rel=1e-6)
    pairs = zip(torch.autograd.grad(total, made[:2]), torch.autograd.grad(want, made[:2]), strict=True)
    for got, theirs in pairs:
        torch.testing.assert_close(got, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_aligned_in_other_dtypes_with_a_cap_and_no_gradient_from_itself(dtype):
    h, w, *_ = make(dtype=dtype)
    shift = torch.zeros(S)
    weight_T = torch.rand(S, dtype=torch.float64)
    twin = SpanTeacher(h.detach().clone(), w.detach().clone(), shift, 0.7, 20.0)
    total, _, distance, _ = aligned_loss(h, w, shift, twin, weight_T, divisor=0.7, softcap=20.0)
    assert total == 0 and not distance.any() and total.dtype == torch.float64
    assert all(not x.any() for x in torch.autograd.grad(total, (h, w)))
    _, _, states, head, *_ = make(seed=2, dtype=dtype)
    theirs = SpanTeacher(states, head, shift - 0.3, 0.7, 20.0)
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    theirs64 = SpanTeacher(states.double(), head.double(), shift - 0.3, 0.7, 20.0)
    found = aligned_loss(*wide, shift, theirs64, weight_T, divisor=0.7, softcap=20.0)
    got = aligned_loss(h, w, shift, theirs, weight_T, divisor=0.7, softcap=20.0)
    torch.testing.assert_close(got[2].double(), found[2], rtol=1e-5, atol=1e-5)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(torch.autograd.grad(got[0], (h, w)), torch.autograd.grad(found[0], wide), strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() <= limit * b.norm()


def test_kernel_aligned_softcap_and_shift_have_the_gradient_of_differences():
    """Central differences, of the student's states and of its shift."""
    h, w, states, head, *_ = make()
    shift, weight_T = torch.linspace(-1, 0, S, dtype=torch.float64), torch.rand(S, dtype=torch.float64)
    teacher = SpanTeacher(states, head, shift.flip(0), 1.1, 3.0)

    def value(x, moved):
        return aligned_loss(x, w.detach(), moved, teacher, weight_T, paired(0.3), 0.9, softcap=2.0)

    total, slope, *_ = value(h, shift)
    (gradient,) = torch.autograd.grad(total, h)
    for at in range(3):
        step = torch.zeros(S, dtype=torch.float64)
        step[at] = 1e-6
        along = step[:, None] * torch.arange(1.0, D + 1, dtype=torch.float64)
        ends = [value(h.detach() + sign * along, shift)[0] for sign in (1, -1)]
        assert ((ends[0] - ends[1]) / 2e-6).item() == pytest.approx((gradient * along).sum().item() / 1e-6, rel=1e-5)
        ends = [value(h.detach(), shift + sign * step)[0] for sign in (1, -1)]
        assert ((ends[0] - ends[1]) / 2e-6).item() == pytest.approx(slope[at].item(), rel=1e-5)


def test_kernel_aligned_of_no_rows_once_and_what_it_refuses():
    h, w, states, head, *_ = make()
    none, shift = torch.zeros(0), torch.zeros(S)
    total, *numbers = aligned_loss(h[:0], w, none, SpanTeacher(states[:0], head, none), none)
    assert total == 0 and all(x.shape == (0,) for x in numbers)
    gradients = torch.autograd.grad(total, (h, w), allow_unused=True)
    assert not gradients[1].any()
    teacher = SpanTeacher(states, head, shift)
    total, *_ = aligned_loss(h, w, shift, teacher, shift + 1)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="works once"):
        total.backward()
    with pytest.raises(ValueError, match="need 8 rows each"):
        aligned_loss(h, w, shift[:3], teacher, shift)
    with pytest.raises(ValueError, match="divisor must be positive"):
        aligned_loss(h, w, shift, teacher, shift, divisor=0.0)
    with pytest.raises(ValueError, match="softcap must be positive"):
        aligned_loss(h, w, shift, teacher, shift, softcap=-1.0)
    with pytest.raises(ValueError, match="must share one float dtype"):
        aligned_loss(h.float(), w, shift, teacher, shift)
