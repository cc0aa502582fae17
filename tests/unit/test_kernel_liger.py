"""backend="liger" gives what Liger gives. In CI the package is absent: `pip install --target DIR liger-kernel`, and
PYTHONPATH=DIR TRITON_INTERPRET=1 (or a GPU) runs this."""

import os

import pytest
import torch

from spmdrl_kernels import linear_logprob
from tests.unit.test_kernel_reference import plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def needs_liger():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("liger needs a GPU or TRITON_INTERPRET=1")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 3.0}, {"mask": True}])
def test_kernel_liger_backend(options):
    if "softcap" in options and DEVICE == "cpu":
        pytest.skip("Liger's own kernel does not take a cap in Triton's interpreter")
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 16, generator=rng), torch.randn(61, 16, generator=rng) / 4
    targets, g = torch.randint(61, (9,), generator=rng), torch.randn(9, generator=rng)
    hidden, weight, targets, g = (x.to(DEVICE) for x in (hidden, weight, targets, g))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    options, keep = dict(options), torch.ones(9, device=DEVICE)
    if "mask" in options:
        options["mask"] = torch.arange(9, device=DEVICE) % 2 == 0
        keep = options["mask"].float()
    logp, entropy = linear_logprob(hidden, weight, targets, entropy=False, backend="liger", **options)
    options.pop("mask", None)
    want = plain(hidden, weight, targets, **options)[0].float() * keep
    assert entropy is None
    results = [[x.detach(), *torch.autograd.grad(x, (hidden, weight), g)] for x in (logp, want)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
