"""The kernels on a GPU: every test of kernels/tests there (compiled, not interpreted), and shapes that need its memory.

compute-sanitizer, where CUDA's tools are installed:
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pytest -q kernels/tests
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdrl_kernels import chunked_loss, linear_logprob, raise_deferred, token_logprob

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu
GIB = 2**30


def make(T, D, V, dtype=torch.bfloat16):
    torch.manual_seed(T)
    hidden = torch.randn(T, D, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device="cuda") / D**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (T,), device="cuda"), torch.randn(2, T, device="cuda")


def reference(hidden, weight, targets, grads, rows=512):
    """Returns logp, entropy, dhidden and dweight of the definition on the given (rounded) inputs, in fp64 by rows."""
    out, dw = [], torch.zeros(weight.shape, dtype=torch.float64, device="cuda")
    wide = weight.detach().double()
    for h, t, g, e in zip(
        hidden.detach().split(rows), targets.split(rows), *(x.split(rows) for x in grads), strict=True
    ):
        log_p = torch.log_softmax(h.double() @ wide.t(), -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        dz = -p * (g.double()[:, None] + e.double()[:, None] * (log_p + entropy))
        dz.scatter_add_(1, t[:, None], g.double()[:, None])
        out.append((log_p.gather(1, t[:, None])[:, 0], entropy[:, 0], dz @ wide))
        dw += dz.t() @ h.double()
    return *(torch.cat(column) for column in zip(*out, strict=True)), dw


def run_kernel_tests(*before, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": paths} | environment
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "kernels/tests"]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_kernel_triton_tests_compiled():
    run_kernel_tests()


def test_kernel_memory_accesses_under_compute_sanitizer():
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("compute-sanitizer is not installed")
    run_kernel_tests(tool, "--tool", "memcheck", "--error-exitcode", "9", PYTORCH_NO_CUDA_MEMORY_CACHING="1")


@pytest.mark.parametrize("dtype, limit, slack", [(torch.bfloat16, 1e-2, 2e-3), (torch.float32, 1e-4, 1e-5)])
def test_kernel_real_vocabulary(dtype, limit, slack):
    """Measures V = 151936, and compares with the largest error of logp that TARGETS allows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = make(1024, 512, 151_936, dtype)
    logp, entropy = linear_logprob(*inputs[:3])
    grads = torch.autograd.grad((logp, entropy), inputs[:2], list(inputs[3]))
    want = reference(*inputs)
    for a, b in zip((logp, entropy, *grads), want, strict=True):
        assert a.isfinite().all() and (a.double() - b).norm() <= limit * b.norm()
    assert (logp.double() - want[0]).abs().max() <= slack


def test_kernel_more_than_2_to_the_31_logits():
    """T >= 65536 and T * V > 2^31: rows past the 31-bit offset are right, both given as logits and computed."""
    T, D, V = 65_600, 64, 65_536
    hidden, weight, targets, grads = make(T, D, V)
    tail = slice(T - 64, T)
    want = reference(hidden[tail], weight, targets[tail], grads[:, tail])
    outputs = linear_logprob(hidden, weight, targets)
    (dh,) = torch.autograd.grad(outputs, hidden, list(grads))
    with torch.no_grad():
        logits = hidden @ weight.t()
    logits.requires_grad_()
    given = token_logprob(logits, targets, inplace_backward=True)
    for got in (outputs, given):
        for a, b in zip(got, want[:2], strict=True):
            assert (a[tail].double() - b).norm() <= 1e-2 * b.norm()
    assert (dh[tail].double() - want[2]).norm() <= 1e-2 * want[2].norm()
    (dlogits,) = torch.autograd.grad(given, logits, list(grads))
    rows = dlogits[tail].double() @ weight.detach().double()
    assert (rows - want[2]).norm() <= 2e-2 * want[2].norm()


def test_kernel_extra_memory_is_bounded():
    """TARGETS allow 0.6 GiB beyond inputs and gradients, whatever V; a loss in chunks adds its fp32 sum of dW."""
    for V in (32_768, 151_936):
        hidden, weight, targets, grads = make(8192, 1024, V)
        returned = hidden.nbytes + weight.nbytes

        def logprob(h=hidden, w=weight, t=targets, g=grads):
            torch.autograd.grad(linear_logprob(h, w, t), (h, w), list(g))

        def loss(h=hidden, w=weight, t=targets):
            total, _ = chunked_loss(h, w, t, lambda logp, entropy, _: -logp - 0.01 * entropy)
            torch.autograd.grad(total, (h, w))

        for function, extra in ((logprob, 0), (loss, 4 * weight.numel())):
            function()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            assert torch.cuda.max_memory_allocated() - before - returned - extra <= 0.65 * GIB


def test_kernel_batch_invariant_to_the_bit():
    hidden, weight, targets, (g, e) = make(1500, 256, 32_001)

    def run(at):
        rows = hidden.detach()[at].requires_grad_()
        outputs = linear_logprob(rows, weight.detach(), targets[at], 0.8, batch_invariant=True)
        return *outputs, *torch.autograd.grad(outputs, rows, [g[at], e[at]])

    whole = run(torch.arange(1500, device="cuda"))
    for at in (torch.tensor([7]), torch.arange(600, 604), torch.arange(1, 1500, 2)):
        at = at.cuda()
        for a, b in zip(run(at), whole, strict=True):
            assert torch.equal(a, b[at])


def test_kernel_errors_of_values_are_raised_without_a_wait():
    hidden, weight, targets, _ = make(64, 32, 500)
    targets[3] = 500
    torch.cuda.set_sync_debug_mode("error")
    try:
        given, _ = token_logprob(hidden.detach() @ weight.detach().t(), targets % 500)
        logp, _ = linear_logprob(hidden, weight, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 500\), got values from \d+ to 500"):
        raise_deferred()
    assert logp.isnan().nonzero().flatten().tolist() == [3] and given.isfinite().all()
