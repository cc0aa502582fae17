"""linear_logprob beyond one temperature and all rows: masks, padding, blocks, invariance, backends, memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob, token_logprob
from tests.unit.test_kernel_reference import compare, make, plain

ROOT = Path(__file__).resolve().parents[2]


def gradients(outputs, inputs, grads):
    return torch.autograd.grad(outputs, inputs, [g.to(outputs[0].dtype) for g in grads])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kernel_temperature_of_each_token(softcap):
    hidden, weight, targets, grads = make(T=13, D=6, V=41)
    heat = torch.rand(13, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.4
    got = linear_logprob(hidden, weight, targets, heat, softcap=softcap, chunk_tokens=5, chunk_vocab=16)
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / heat[:, None], -1)
    want = (log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    pairs = [[*x, *gradients(x, (hidden, weight), grads)] for x in (got, want)]
    compare(*pairs, rtol=1e-10, atol=1e-10)
    collision = collision_probability(hidden.detach(), weight.detach(), heat, softcap=softcap, chunk_vocab=7)
    torch.testing.assert_close(collision, log_p.exp().square().sum(-1).detach(), rtol=1e-10, atol=1e-10)
    # One number for all gives the same, as a number or a tensor.
    one = linear_logprob(hidden, weight, targets, torch.tensor(0.7))[0]
    torch.testing.assert_close(one, linear_logprob(hidden, weight, targets, 0.7)[0])


def test_kernel_masked_rows_never_reach_a_matmul(monkeypatch):
    hidden, weight, targets, grads = make(T=40, D=6, V=31)
    mask = torch.arange(40) % 4 == 1
    with torch.no_grad():
        hidden[~mask] = float("nan")
    rows = 0
    matmul = torch.mm

    def counted(a, b, **options):
        nonlocal rows
        rows += len(a)
        return matmul(a, b, **options)

    monkeypatch.setattr(torch, "mm", counted)
    got = linear_logprob(hidden, weight, targets.masked_fill(~mask, -100), mask=mask)
    assert rows == 10
    dh, dw = gradients(got, (hidden, weight), grads)
    monkeypatch.undo()
    kept = hidden.detach()[mask].requires_grad_()
    want = plain(kept, weight, targets[mask])
    want_dh, want_dw = gradients(want, (kept, weight), grads[:, mask])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[mask], b, rtol=1e-10, atol=1e-10)
        assert not a[~mask].any()
    torch.testing.assert_close((dh[mask], dw), (want_dh, want_dw), rtol=1e-10, atol=1e-10)
    assert not dh[~mask].any()
    nothing = linear_logprob(hidden, weight, targets, mask=torch.zeros(40, dtype=torch.bool))
    assert not nothing[0].any() and not gradients(nothing, (hidden, weight), grads)[1].any()


def test_kernel_padded_vocabulary():
    hidden, weight, targets, grads = make(T=9, D=6, V=40)
    targets = targets % 33
    with torch.no_grad():
        weight[33:] = float("nan")
    got = linear_logprob(hidden, weight, targets, valid_vocab=33, chunk_vocab=10)
    dh, dw = gradients(got, (hidden, weight), grads)
    real = weight.detach()[:33].requires_grad_()
    want = plain(hidden, real, targets)
    want_dh, want_dw = gradients(want, (hidden, real), grads)
    compare([*got, dh, dw[:33]], [*want, want_dh, want_dw], rtol=1e-10, atol=1e-10)
    assert not dw[33:].any()
    with pytest.raises(ValueError, match=r"\[0, 33\), got values from 2 to 33"):
        linear_logprob(hidden, weight, targets.index_fill(0, torch.tensor([2]), 33), valid_vocab=33)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    T=st.integers(0, 70),
    D=st.integers(1, 20),
    V=st.integers(1, 400),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    temperature=st.floats(0.2, 5),
    softcap=st.sampled_from([None, 1.5]),
    rows=st.none() | st.integers(9, 80),
    columns=st.none() | st.integers(40, 400),
    invariant=st.booleans(),
)
def test_kernel_any_shape(T, D, V, dtype, temperature, softcap, rows, columns, invariant):
    hidden, weight, targets, grads = make(T, D, V, dtype=dtype, seed=T)
    got = linear_logprob(
        hidden,
        weight,
        targets,
        temperature,
        softcap=softcap,
        chunk_tokens=rows,
        chunk_vocab=columns,
        batch_invariant=invariant,
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = plain(*wide, targets, temperature, softcap)
    limit = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for a, b in zip(
        [*got, *gradients(got, (hidden, weight), grads)], [*want, *gradients(want, wide, grads)], strict=True
    ):
        assert a.isfinite().all() and (a.double() - b).norm() <= limit * max(1.0, b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_batch_invariant_to_the_bit(dtype):
    T, D, V = 150, 40, 1003
    hidden, weight, targets, grads = make(T, D, V, dtype=dtype)
    heat = torch.rand(T, generator=torch.Generator().manual_seed(2)) + 0.5

    def run(at):
        rows = hidden.detach()[at].requires_grad_()
        outputs = linear_logprob(rows, weight.detach(), targets[at], heat[at], batch_invariant=True)
        return *outputs, *gradients(outputs, (rows,), grads[:, at])

    whole = run(torch.arange(T))
    for at in (torch.tensor([7]), torch.arange(60, 64), torch.arange(1, T, 2), torch.arange(T).flip(0)):
        for a, b in zip(run(at), whole, strict=True):
            assert torch.equal(a, b[at])


def test_kernel_blocks_leave_the_result_alone():
    """All choices agree but for rounding, and so do the gradients, one block of rows or many."""
    hidden, weight, targets, grads = make(T=50, D=8, V=300, dtype=torch.float32)
    results = []
    for rows, columns in ((None, None), (50, 300), (7, 300), (50, 11), (16, 64), (1000, 1000)):
        outputs = linear_logprob(hidden, weight, targets, chunk_tokens=rows, chunk_vocab=columns)
        results.append([*outputs, *gradients(outputs, (hidden, weight), grads)])
    for got in results[1:]:
        compare(got, results[0], rtol=1e-5, atol=1e-5)


def test_kernel_backend_is_chosen_by_argument_and_environment(monkeypatch):
    hidden, weight, targets, _ = make(T=3, D=4, V=5)
    with pytest.raises(ValueError, match="backend must be one of triton, torch, liger"):
        linear_logprob(hidden, weight, targets, backend="cuda")
    monkeypatch.setenv("SPMDRL_KERNELS", "fast")
    with pytest.raises(ValueError, match="SPMDRL_KERNELS must be one of"):
        linear_logprob(hidden, weight, targets)
    linear_logprob(hidden, weight, targets, backend="torch")
    monkeypatch.setenv("SPMDRL_KERNELS", "torch")
    linear_logprob(hidden, weight, targets)
    with pytest.raises(ValueError, match="liger.* does not support entropy=True"):
        linear_logprob(hidden, weight, targets, backend="liger")


def test_kernel_says_what_is_wrong_with_what_stands_beside_the_rows():
    h, w, t = torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([0, 4, 2])
    bad = [
        ({"temperature": torch.ones(2)}, r"floats \[T\] \(3 here\)"),
        ({"temperature": torch.ones(3, dtype=torch.int64)}, "int64"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "from 0.0 to 1.0"),
        ({"temperature": torch.tensor([1.0, float("inf"), 1.0])}, "positive and finite"),
        ({"temperature": torch.tensor([1.0, float("nan"), 1.0])}, "positive and finite"),
        ({"temperature": torch.ones(3, requires_grad=True)}, "detach"),
        ({"mask": torch.ones(3)}, "mask must be bool"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask must be bool \[T\]"),
        ({"valid_vocab": 0}, r"valid_vocab must lie in \[1, 5\]"),
        ({"valid_vocab": 6}, "valid_vocab"),
        ({"chunk_vocab": 0}, "chunk_vocab"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            linear_logprob(h, w, t, **options)


PEAK = """
import resource, torch
from spmdrl_kernels import chunked_loss, linear_logprob
T, D, V = 256, 4, 151_936
hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
targets = torch.randint(V, (T,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logp, entropy = linear_logprob(hidden, weight, targets)
(logp.sum() + entropy.sum()).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
chunked_loss(hidden, weight, targets, lambda logp, entropy, _: logp + entropy, chunk_tokens=64)[0].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_kernel_peak_memory_is_that_of_the_workspace():
    """The process's peak is in MiB, 2.3 of it gradient: all logits would be 148, a block is 2, 64 whole rows are 37."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
    linear, chunked = map(int, done.stdout.split())
    assert linear <= 50 and chunked <= 90, (linear, chunked)


def test_kernel_temperature_so_small_that_its_inverse_overflows_is_refused():
    hidden, weight, targets, _ = make(T=3, D=4, V=5, dtype=torch.float32)
    for heat in (1e-40, torch.tensor(1e-40)):
        with pytest.raises(ValueError, match="1 / temperature"):
            linear_logprob(hidden, weight, targets, heat)


def test_kernel_liger_is_refused_where_it_has_nothing(monkeypatch):
    hidden, weight, targets, _ = make(T=3, D=4, V=5, dtype=torch.float32)
    with pytest.raises(ValueError, match="does not support chunk_tokens, batch_invariant"):
        linear_logprob(hidden, weight, targets, entropy=False, chunk_tokens=2, batch_invariant=True, backend="liger")
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 5\)"):
        linear_logprob(hidden, weight, targets - 100, entropy=False, backend="liger")
    for call in (
        lambda: chunked_loss(hidden, weight, targets, lambda logp, _, x: -logp, backend="liger"),
        lambda: token_logprob(hidden @ weight.t(), targets, backend="liger"),
        lambda: collision_probability(hidden, weight, backend="liger"),
    ):
        with pytest.raises(ValueError, match="backend liger is for linear_logprob only"):
            call()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_kernel_top_tells_whether_no_token_is_likelier(softcap):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=draw, dtype=torch.float64) for n in (60, 40))
    logits = hidden @ weight.t()
    targets = torch.where(torch.arange(60) % 3 == 0, logits.argmax(1), torch.randint(40, (60,), generator=draw))
    want = (logits.argmax(1) == targets).double()
    assert 0 < want.sum() < 60
    logp, top = linear_logprob(hidden.requires_grad_(), weight, targets, 0.7, top=True, softcap=softcap, chunk_vocab=16)
    assert torch.equal(top, want) and not top.requires_grad and logp.requires_grad
    loss, told = chunked_loss(
        hidden,
        weight,
        targets,
        lambda logp, entropy, x: -logp,
        temperature=0.7,
        entropy=False,
        top=True,
        softcap=softcap,
    )
    assert torch.equal(told["top"], want) and "entropy" not in told
    (mine,) = torch.autograd.grad(loss, hidden)
    (other,) = torch.autograd.grad(-logp.sum(), hidden)
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("size", [16.0, 60.0])
def test_kernel_gradient_of_likely_tokens_keeps_its_digits(size, entropy):
    """The gradient of a token that is nearly certain is 1 - p, here 5e-4 to 2e-2: to 4e-7 whatever the logits' size.

    torch has 2e-7 here. With p from a logsumexp, which is rounded at the size of the logits, 1 - p is wrong by
    1e-6 with logits of 16 and 4e-6 with logits of 60.
    """
    draw = torch.Generator().manual_seed(3)
    rows, vocab = 64, 48
    logits = torch.randn(rows, vocab, dtype=torch.float64, generator=draw) + size - 9
    targets = torch.randint(vocab, (rows,), generator=draw)
    logits.scatter_(1, targets[:, None], size)
    # Numbers that float32 holds exactly, as logits and as products with the identity.
    logits = logits.float().double()
    exact = torch.autograd.functional.vjp(
        lambda x: x.log_softmax(-1).gather(1, targets[:, None])[:, 0], logits, torch.ones(rows, dtype=torch.float64)
    )[1]
    likely = exact.gather(1, targets[:, None])
    assert likely.min() > 5e-4 and likely.max() < 2e-2
    found = []
    leaf = logits.float().requires_grad_()
    found.append(torch.autograd.grad(token_logprob(leaf, targets, entropy=entropy)[0].sum(), leaf)[0])
    weight = torch.eye(vocab)
    found.append(torch.autograd.grad(linear_logprob(leaf, weight, targets, entropy=entropy)[0].sum(), leaf)[0])
    loss, _ = chunked_loss(leaf, weight, targets, lambda logp, _, x: logp, entropy=entropy)
    found.append(torch.autograd.grad(loss, leaf)[0])
    for gradient in found:
        assert (gradient.double() - exact).abs().max() < 4e-7
