"""linear_logprob in plain torch against softmax over the full [T, V] logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl_kernels import linear_logprob


def make(T, D, V, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=rng, dtype=torch.float64).div(D**0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (T,), generator=rng)
    grads = torch.randn(2, T, generator=rng, dtype=torch.float64)  # non-uniform upstream gradients
    return hidden, weight, targets, grads


def plain(hidden, weight, targets, temperature=1.0, softcap=None):
    """Returns the definition, in fp64."""
    logits = hidden.double() @ weight.double().t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def both(hidden, weight, targets, grads, chunk_tokens=None, **settings):
    """Returns (logp, entropy, dH, dW) of the kernel and of the definition."""
    results = []
    for function, extra in ((linear_logprob, {"chunk_tokens": chunk_tokens}), (plain, {})):
        logp, entropy = function(hidden, weight, targets, **settings, **extra)
        upstream = [g.to(logp.dtype) for g in grads]
        results.append(
            (logp.detach(), entropy.detach(), *torch.autograd.grad((logp, entropy), (hidden, weight), upstream))
        )
    return results


def compare(got, want, rtol, atol):
    for name, a, b in zip(("logp", "entropy", "dhidden", "dweight"), got, want, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"softcap": 3.0}, {"temperature": 1.6, "softcap": 2.0}])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 37])
def test_kernel_fp64_values_and_gradients(settings, chunk_tokens):
    got, want = both(*make(T=37, D=12, V=257), chunk_tokens=chunk_tokens, **settings)
    compare(got, want, rtol=1e-10, atol=1e-10)
    assert all(g.dtype == torch.float64 for g in got)


@pytest.mark.parametrize("V", [1, 2, 255, 1000, 151_936, 151_937])
def test_kernel_fp32_any_vocabulary_size(V):
    inputs = make(T=6, D=8, V=V, dtype=torch.float32)
    got, want = both(*inputs, chunk_tokens=4, temperature=1.3)
    assert all(g.dtype == torch.float32 for g in got)
    hidden, weight, targets, grads = inputs
    log_p = torch.log_softmax(hidden @ weight.t() / 1.3, -1)
    outputs = (log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1))
    (plain_dh,) = torch.autograd.grad(outputs, hidden, [g.float() for g in grads])
    # dH sums V terms in fp32, which alone costs 2e-5 at V=151936 for plain torch too: there, be as good as plain torch.
    slack = max(1e-5, 1.5 * (plain_dh.double() - want[2].double()).abs().max().item())
    torch.testing.assert_close(got[2].double(), want[2].double(), rtol=1e-5, atol=slack)
    for i in (0, 1, 3):
        torch.testing.assert_close(got[i].double(), want[i].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_kernel_half_precision(dtype, tolerance):
    hidden, weight, targets, grads = make(T=33, D=64, V=1003, dtype=dtype)
    got, want = both(hidden, weight, targets, grads, chunk_tokens=8)
    assert [g.dtype for g in got] == [torch.float32, torch.float32, dtype, dtype]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()
    # Logits are not rounded; those of the backward are, and so are the gradients that leave.
    logits = hidden.float() @ weight.float().t()
    logp = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got[0], logp.detach(), rtol=1e-5, atol=1e-5)


def test_kernel_weight_gradient_is_accumulated_in_fp32():
    """Many chunks each add little: a bf16 sum would stop growing."""
    T = 2048
    hidden = torch.ones(T, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = linear_logprob(hidden, weight, torch.zeros(T, dtype=torch.int64), chunk_tokens=1)
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [T / 2, -T / 2]


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_kernel_logits_far_from_zero(shift):
    """Logits are all negative (a running maximum that starts at 0 gives nan), or far above the range of exp."""
    hidden, weight, targets, grads = make(T=5, D=6, V=100)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 1.0, shift
    got, want = both(hidden, weight, targets, grads)
    compare(got, want, rtol=1e-9, atol=1e-7)
    assert got[0].isfinite().all() and (got[0] <= 0).all()


def test_kernel_one_certain_token():
    """Probabilities of exactly 0 in fp32 give entropy 0 and no nan."""
    hidden = torch.eye(3).mul(1e3).requires_grad_()
    weight = torch.eye(3).mul(1e3).requires_grad_()
    logp, entropy = linear_logprob(hidden, weight, torch.tensor([0, 1, 0]))
    assert logp.tolist() == [0, 0, -1e6] and entropy.tolist() == [0, 0, 0]
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "softcap": 1.5}, {"entropy": False}])
def test_kernel_gradcheck(settings):
    hidden, weight, targets, _ = make(T=5, D=3, V=7)

    def f(h, w):
        logp, entropy = linear_logprob(h, w, targets, chunk_tokens=2, **settings)
        return logp if entropy is None else (logp, entropy)

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_kernel_gradients_of_one_output_or_one_input_alone():
    hidden, weight, targets, (g, _) = make(T=11, D=5, V=23)
    for which in (0, 1):
        want = torch.autograd.grad(plain(hidden, weight, targets)[which], (hidden, weight), g)
        got = torch.autograd.grad(linear_logprob(hidden, weight, targets, chunk_tokens=4)[which], (hidden, weight), g)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        (dh,) = torch.autograd.grad(linear_logprob(hidden, weight.detach(), targets)[which], hidden, g)
        (dw,) = torch.autograd.grad(linear_logprob(hidden.detach(), weight, targets)[which], weight, g)
        torch.testing.assert_close((dh, dw), want, rtol=1e-10, atol=1e-10)
    logp, entropy = linear_logprob(hidden, weight, targets, entropy=False)
    assert entropy is None
    torch.testing.assert_close(logp, plain(hidden, weight, targets)[0], rtol=1e-10, atol=1e-10)


def test_kernel_same_under_autocast_and_strided_inputs():
    hidden, weight, targets, grads = make(T=9, D=6, V=31, dtype=torch.float32)
    want = both(hidden, weight, targets, grads)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = both(hidden, weight, targets, grads)[0]
    compare(got, want, rtol=0, atol=0)
    hidden_strided = hidden.detach().t().contiguous().t().requires_grad_()
    weight_strided = weight.detach().t().contiguous().t().requires_grad_()
    got, want = both(hidden_strided, weight_strided, targets, grads)
    compare(got, want, rtol=1e-5, atol=1e-5)


def test_kernel_no_tokens():
    hidden, weight, targets, _ = make(T=0, D=4, V=9)
    logp, entropy = linear_logprob(hidden, weight, targets)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 4) and weight.grad.shape == (9, 4) and not weight.grad.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_kernel_holds_logits_of_one_chunk_only(softcap):
    T, D, V, chunk = 64, 4, 500, 8
    hidden, weight, targets, (g, e) = make(T, D, V, dtype=torch.bfloat16)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            largest = max([largest, *sizes])
            return out

    saved = []
    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        outputs = linear_logprob(hidden, weight, targets, softcap=softcap, chunk_tokens=chunk)
        torch.autograd.grad(outputs, (hidden, weight), (g.float(), e.float()))
    assert largest == chunk * V
    assert sorted(saved) == sorted([T * D, V * D, T, 2 * T, T])  # hidden, weight, targets, normalisers, entropy


def test_kernel_says_what_is_wrong():
    h, w, t = torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([0, 4, 2])
    linear_logprob(h, w, t)
    bad = [
        ((h, w[:, :3], t), {}, "hidden"),
        ((h, w, t[:2]), {}, "one target per row"),
        ((h[None], w, t), {}, r"\[T, D\]"),
        ((h, w, torch.tensor([0, 5, 1])), {}, r"\[0, 5\)"),
        ((h, w, torch.tensor([0, -100, 1])), {}, "-100"),
        ((h, w, t.int()), {}, "int64"),
        ((h.long(), w.long(), t), {}, "float dtype"),
        ((h, w.bfloat16(), t), {}, "cast one"),
        ((h, w, t, 0.0), {}, "temperature"),
        ((h, w, t, float("nan")), {}, "temperature"),
        ((h, w, t), {"softcap": -1.0}, "softcap"),
        ((h, w, t), {"chunk_tokens": 0}, "chunk_tokens"),
    ]
    for args, kwargs, message in bad:
        with pytest.raises(ValueError, match=message):
            linear_logprob(*args, **kwargs)
