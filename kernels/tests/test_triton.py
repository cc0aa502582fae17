"""Tests the Triton kernels against fp64 formulas: on a GPU, or without one in Triton's interpreter.

Shapes are small because the interpreter is slow; tests/gpu/test_kernels.py tests large shapes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob, token_logprob
from spmdrl_kernels.reference import TorchRows
from spmdrl_kernels.triton_rows import TritonRows
from spmdrl_kernels.vocabulary import new_state

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OF64 = torch.float64, torch.device(DEVICE)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(*shape, seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).to(DEVICE)


def tokens_of(T, V, seed=0):
    return torch.randint(V, (T,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plain(logits, targets, temperature=1.0, softcap=None, valid=None, excluded=()):
    """Return logp, entropy and collision probability by definition, in fp64."""
    logits = logits.double().index_fill(1, torch.tensor(excluded, dtype=torch.int64, device=DEVICE), -1e30)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[:, None]
    log_p = torch.log_softmax(logits[:, :valid] / temperature, -1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy, p.square().sum(-1)


def close(got, want, limit, what):
    for name, a, b in zip(what.split(), got, want, strict=True):
        a, b = a.double(), b.double()
        assert a.isfinite().all(), f"{name}: {a}"
        distance, size = (a - b).norm(), max(1.0, b.norm())
        assert distance <= limit * size, f"{name}: {distance / size:.2e} > {limit}"


def check_linear(T, D, V, dtype=torch.float64, seed=0, **options):
    hidden, weight = draw(T, D, seed=seed, dtype=dtype), draw(V, D, seed=seed + 1, dtype=dtype)
    hidden, weight, targets = hidden.requires_grad_(), weight.requires_grad_(), tokens_of(T, V, seed)
    heat = {k: options[k] for k in ("temperature", "softcap", "excluded") if k in options}
    upstream = list(draw(2, T, seed=seed + 2))
    got = linear_logprob(hidden, weight, targets, backend="triton", **options)
    got += torch.autograd.grad(got, (hidden, weight), [g.to(got[0].dtype) for g in upstream])
    got += (collision_probability(hidden.detach(), weight.detach(), backend="triton", **heat),)
    *want, collision = plain(hidden.double() @ weight.double().t(), targets, **heat)
    want += torch.autograd.grad(want, (hidden, weight), upstream)
    close([x.detach() for x in got], [*want, collision], LIMIT[dtype], "logp entropy dhidden dweight collision")


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernel_triton_every_dtype(dtype):
    check_linear(7, 16, 131, dtype)
    check_linear(7, 16, 131, dtype, temperature=0.7, softcap=2.5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{"chunk_vocab": 3}, {"chunk_tokens": 4}, {"batch_invariant": True}])
def test_kernel_triton_excluded_tokens(dtype, options):
    # Two blocks of 3 columns have excluded columns only.
    excluded = tuple(x for x in (*range(6, 12), 40, 130) if x not in tokens_of(7, 131))
    check_linear(7, 16, 131, dtype, excluded=excluded, temperature=0.7, **options)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", FLOATS)
def test_kernel_triton_excluded_tokens_in_a_chunked_loss(dtype):
    # Logits that are stored in float16 become -inf.
    hidden, weight, targets = draw(7, 16, dtype=dtype), draw(131, 16, seed=1, dtype=dtype), tokens_of(7, 131)
    hidden, weight, inputs = hidden.requires_grad_(), weight.requires_grad_(), dict(zip("ge", draw(2, 7), strict=True))
    excluded = tuple(x for x in (*range(6, 12), 40, 130) if x not in targets)

    def loss(logp, entropy, x):
        return x["g"] * logp + x["e"] * entropy

    total, told = chunked_loss(
        *(hidden, weight, targets, loss, inputs), top=True, excluded=excluded, chunk_tokens=4, backend="triton"
    )
    logits = hidden.double() @ weight.double().t()
    logp, entropy, _ = plain(logits, targets, excluded=excluded)
    want = logp, entropy, *torch.autograd.grad(loss(logp, entropy, inputs).sum(), (hidden, weight))
    got = told["logp"], told["entropy"], *torch.autograd.grad(total, (hidden, weight))
    close([x.detach() for x in got], [x.detach() for x in want], LIMIT[dtype], "logp entropy dhidden dweight")
    assert not got[3][list(excluded)].any()
    hit = torch.where(torch.arange(7, device=DEVICE) == 2, 40, targets)
    logp, _ = linear_logprob(hidden, weight, hit, excluded=excluded, backend="triton")
    assert logp[2] == -torch.inf
    close([logp[3:].detach()], [want[0][3:].detach()], LIMIT[dtype], "logp")
    assert all(x.isfinite().all() for x in torch.autograd.grad(logp.sum(), (hidden, weight)))


@pytest.mark.parametrize("way, limit", [("linear_logprob", 0.01), ("chunked_loss", 0.1)])
def test_kernel_triton_tokens_that_are_nearly_certain(way, limit):
    """With bf16 logits of about 32, probabilities would be off by 6% if logits and logsumexp were rounded
    differently."""
    T, D, V = 24, 64, 501
    hidden, weight, targets = draw(T, D), draw(V, D, seed=1) / D**0.5, torch.arange(T, device=DEVICE)
    hidden[:, T], weight[:, T] = 5.0, 4.0
    weight[:T, :T] = hidden[:, :T] = 3.25 * torch.eye(T)
    hidden, weight = (x.to(torch.bfloat16).requires_grad_() for x in (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp, entropy, _ = plain(wide[0] @ wide[1].t(), targets)
    assert logp.exp().min() > 0.9 and logp.exp().max() < 0.9999
    inputs = dict(zip("ge", draw(2, T, seed=2), strict=True))

    def loss(logp, entropy, x):
        return x["g"] * logp + x["e"] * entropy

    want = torch.autograd.grad(loss(logp, entropy, inputs).sum(), wide)
    if way == "chunked_loss":
        total, _ = chunked_loss(hidden, weight, targets, loss, inputs, backend="triton")
    else:
        total = loss(*linear_logprob(hidden, weight, targets, backend="triton"), inputs).sum()
    close(torch.autograd.grad(total, (hidden, weight)), want, limit, "dh dw")


def test_kernel_triton_gradcheck():
    hidden, weight, targets = draw(2, 1).requires_grad_(), draw(5, 1, seed=1).requires_grad_(), tokens_of(2, 5)

    def f(h, w):
        return linear_logprob(h, w, targets, 0.8, softcap=2.0, chunk_vocab=3, backend="triton")

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_kernel_triton_temperature_per_token_over_small_blocks():
    check_linear(9, 5, 70, temperature=draw(9, seed=5).abs() + 0.3, softcap=3.0, chunk_tokens=4, chunk_vocab=32)


def test_kernel_triton_vocabulary_151936():
    """The vocabulary is not a multiple of a block, so a kernel without masks would read past the end of a row."""
    check_linear(2, 3, 151_936, torch.float32)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_kernel_triton_all_logits_far_from_zero(shift):
    """With very negative logits, a running maximum that starts at 0 would give nan; with large ones, exp needs a
    maximum."""
    logits, targets = draw(3, 300) + shift, tokens_of(3, 300)
    got = token_logprob(logits, targets, backend="triton")
    close(got, plain(logits, targets)[:2], 1e-9, "logp entropy")


def test_kernel_triton_ruled_out_tokens():
    logits, targets = draw(4, 5000), tokens_of(4, 40)
    # Some blocks contain only -inf.
    logits[:, 50:] = -torch.inf
    logits.requires_grad_()
    upstream = list(draw(2, 4, seed=3))
    want = plain(logits[:, :50], targets)[:2]
    want += torch.autograd.grad(want, logits, upstream)
    got = token_logprob(logits, targets, backend="triton")
    got += torch.autograd.grad(got, logits, upstream)
    close([x.detach() for x in got], [x.detach() for x in want], 1e-10, "logp entropy dlogits")
    assert not got[2][:, 50:].any()


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 2047, 2048, 2049, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_triton_writes_every_element_and_no_other(columns, dtype):
    """Block and state are views into larger tensors of nan; no kernel may write outside the views."""
    rows, poison = 3, float("nan")
    field = torch.full((rows + 2, columns + 32), poison, dtype=dtype, device=DEVICE)
    block = field[1:-1, 16 : 16 + columns]
    logits = draw(rows, columns, seed=columns, dtype=dtype)
    block.copy_(logits)
    targets, (g, e) = tokens_of(rows, columns), draw(2, rows, seed=9).float()
    operations = TritonRows(torch.float32, block.device)
    state = torch.full((6, rows), poison, device=DEVICE)
    operations.add_stats_(block, state[1:5], targets, 0, None, None, "entropy", True)
    assert torch.equal(block, logits) and state[0].isnan().all() and state[5].isnan().all()
    logp, entropy, norm = operations.results(state[1:5], targets, columns, True)
    leaf = logits.double().requires_grad_()
    want = plain(leaf, targets)[:2]
    close((logp, entropy), [x.detach() for x in want], 1e-5, "logp entropy")
    result = operations.logit_gradient(block, targets, 0, None, None, norm, entropy, g, e)
    assert result.data_ptr() == block.data_ptr()
    (dlogits,) = torch.autograd.grad(want, leaf, [g.double(), e.double()])
    close([block], [dlogits], LIMIT[dtype], "dlogits")
    outside = torch.ones_like(field, dtype=torch.bool)
    outside[1:-1, 16 : 16 + columns] = False
    assert field[outside].isnan().all()


def test_kernel_triton_vocabulary_in_parts_with_empty_ones():
    """Adding columns block by block, as blocks and ranks do, gives the same state as adding all columns at once."""
    logits, targets = draw(4, 90), tokens_of(4, 90)
    operations = TritonRows(torch.float64, logits.device)
    for second in ("entropy", "collision"):
        whole, parts, cleared = (new_state(4, 90 * n, torch.float64, logits.device) for n in (1, 1, 0))
        operations.add_stats_(logits, whole, targets, 0, None, 2.0, second, True)
        for start, stop in ((0, 0), (0, 7), (7, 80), (80, 90), (90, 90)):
            operations.add_stats_(logits[:, start:stop], parts, targets, start, None, 2.0, second, start == 0)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
        operations.add_stats_(logits, cleared, targets, 0, None, 2.0, second, False)
        assert torch.equal(cleared, whole)


def test_kernel_triton_results_are_those_of_plain_torch():
    """A target outside of the vocabulary gives nan; 300 rows are more than one program processes."""
    state, targets = draw(4, 300).abs() + 0.5, tokens_of(300, 50)
    targets[:3] = torch.tensor([-1, 50, 10**12])
    for entropy in (True, False):
        got, want = (rows.results(state, targets, 50, entropy) for rows in (TritonRows(*OF64), TorchRows(OF64[0])))
        assert got[0].isnan().nonzero().flatten().tolist() == [0, 1, 2]
        for a, b in zip(got, want, strict=True):
            assert a is b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("inplace", [False, True])
def test_kernel_triton_token_logprob(inplace):
    logits, targets, heat = draw(5, 77).requires_grad_(), tokens_of(5, 70), draw(5, seed=4).abs() + 0.5
    upstream = list(draw(2, 5, seed=3))
    want = plain(logits, targets, heat, 3.0, 70)[:2]
    want += torch.autograd.grad(want, logits, upstream)
    given_logits = logits.detach().clone().requires_grad_()
    node = given_logits.view(5, 77)
    options = {"softcap": 3.0, "valid_vocab": 70, "inplace_backward": inplace, "backend": "triton"}
    got = token_logprob(node, targets, heat, **options)
    got += torch.autograd.grad(got, given_logits, upstream)
    close([x.detach() for x in got], [x.detach() for x in want], 1e-10, "logp entropy dlogits")
    assert (got[2].data_ptr() == node.data_ptr()) == inplace


def test_kernel_triton_chunked_loss():
    hidden, weight, targets = draw(11, 4).requires_grad_(), draw(60, 4, seed=1).requires_grad_(), tokens_of(11, 60)
    advantages = draw(11, seed=2)

    def loss(logp, entropy, inputs):
        return -inputs["a"] * logp.exp() - 0.1 * entropy

    got, columns = chunked_loss(hidden, weight, targets, loss, {"a": advantages}, 0.9, chunk_tokens=4, backend="triton")
    logp, entropy, _ = plain(hidden @ weight.t(), targets, 0.9)
    want = loss(logp, entropy, {"a": advantages}).sum()
    results = [[x.detach(), *torch.autograd.grad(x, (hidden, weight))] for x in (got, want)]
    close(*results, 1e-10, "loss dhidden dweight")
    close([columns["logp"], columns["entropy"]], [logp.detach(), entropy.detach()], 1e-10, "logp entropy")


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 6),
    D=st.integers(1, 9),
    V=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS[:2]),
    temperature=st.floats(0.3, 3),
    softcap=st.sampled_from([None, 1.5]),
    rows=st.integers(3, 9),
    columns=st.integers(100, 300),
)
def test_kernel_triton_any_shape(T, D, V, dtype, temperature, softcap, rows, columns):
    check_linear(T, D, V, dtype, T, temperature=temperature, softcap=softcap, chunk_tokens=rows, chunk_vocab=columns)


@pytest.mark.parametrize("shape, stride", [((6, 40), (0, 1)), ((6, 40), (20, 1)), ((6, 1), (1, 6)), ((6, 40), (1, 6))])
def test_kernel_triton_given_logits_of_any_stride(shape, stride):
    """The gradient must not overwrite rows that share memory or columns that are not adjacent."""
    base = draw(240)
    logits = base.as_strided(shape, stride).requires_grad_()
    targets, upstream = tokens_of(6, shape[1]), list(draw(2, 6, seed=2))
    want = plain(logits, targets)[:2]
    (gradient,) = torch.autograd.grad(want, logits, upstream)
    got = token_logprob(logits, targets, inplace_backward=True, backend="triton")
    close([*got, *torch.autograd.grad(got, logits, upstream)], [*want, gradient], 1e-10, "logp entropy dlogits")
