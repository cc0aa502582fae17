"""float32 products on a CPU: numbers and gradients as in float64, tiles of few sizes, and what is taken."""

import pytest
import torch

from spmdrl_kernels import host
from spmdrl_kernels.blocks import outer_, product_

needs_onednn = pytest.mark.skipif(not host.AVAILABLE, reason="torch was built without oneDNN")


@pytest.fixture(params=[True, False], ids=["halved", "full width"])
def halved(request, monkeypatch) -> bool:
    """A CPU of which MKL uses half, and another one, on which it multiplies float32 matrices."""
    monkeypatch.setattr(host, "HALVED", request.param)
    return request.param


@pytest.mark.parametrize(
    "vendor, family, halved",
    [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 26, False), ("GenuineIntel", 6, False)],
)
def test_kernel_host_knows_the_cpu_of_which_half_is_unused(vendor, family, halved):
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n\nprocessor\t: 1\n"
    assert host._is_halved(text) == halved and not host._is_halved("")
    assert not host._is_halved(text.replace("cpu family", "CPU implementer"))


def make(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(K, N, bias):
    linear = torch.nn.Linear(K, N, bias=bias)
    model = torch.nn.Sequential(linear)
    host.use_host_linear(model)
    assert type(linear) is host.HostLinear and isinstance(linear, torch.nn.Linear)
    reference = torch.nn.Linear(K, N, bias=bias).double()
    reference.load_state_dict({name: x.double() for name, x in linear.state_dict().items()})
    return linear, reference


@needs_onednn
@pytest.mark.parametrize("rows", [64, 333, 1500])
@pytest.mark.parametrize("bias", [True, False])
def test_kernel_host_linear_is_linear(rows, bias, halved):
    linear, reference = layer(128, 520, bias)
    x = make(1, rows, 128).requires_grad_()
    wanted = x.detach().double().requires_grad_()
    assert host.takes(x, linear.weight) == halved
    y, exact = linear(x), reference(wanted)
    # A gradient that is a view with strides 0, as that of a sum, and another one.
    for weight in (torch.ones(()).expand(y.shape), make(*y.shape, seed=1)):
        found = torch.autograd.grad(y, [x, *linear.parameters()], weight, retain_graph=True)
        right = torch.autograd.grad(exact, [wanted, *reference.parameters()], weight.double(), retain_graph=True)
        for a, b in zip((y, *found), (exact, *right), strict=True):
            assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@needs_onednn
def test_kernel_host_tiles_have_few_sizes(monkeypatch):
    """oneDNN keeps 1 MiB for each shape that it compiles: a thousand lengths must not be a thousand shapes."""
    monkeypatch.setattr(host, "HALVED", True)
    shapes, own = set(), torch.ops.mkldnn._linear_pointwise

    class Seen:
        @staticmethod
        def _linear_pointwise(x, weight, *rest):
            shapes.add((tuple(x.shape), tuple(weight.shape)))
            return own(x, weight, *rest)

    monkeypatch.setattr(torch.ops, "mkldnn", Seen)
    weight = make(256, 128)
    for rows in range(200, 2200, 37):
        x, y = make(rows, 128), make(rows, 256, seed=1)
        torch.testing.assert_close(host.linear(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(host.outer(x, y), x.t() @ y, rtol=1e-4, atol=1e-3)
    assert 0 < len(shapes) <= 2 * len(host.TILES)


@needs_onednn
def test_kernel_host_takes_large_float32_alone(monkeypatch):
    monkeypatch.setattr(host, "HALVED", True)
    x, weight = make(64, 128), make(512, 128)
    assert host.takes(x, weight) and not host.takes(x[:63], weight)
    monkeypatch.setattr(host, "WIDENS", False)
    for other in (torch.float64, torch.bfloat16):
        assert not host.takes(x.to(other), weight.to(other)) and not host.takes(x, weight.to(other))
    assert host.host_linear(make(0, 128), weight).shape == (0, 512)


@needs_onednn
@pytest.mark.parametrize("add", [True, False])
def test_kernel_host_in_blocks_of_logits(add, halved):
    """Both sides are views of wider matrices, as blocks of logits are."""
    a, b, wide = make(600, 160)[:, :128], make(300, 128), make(600, 400, seed=2)
    total = wide[:, :300]
    right = a.double() @ b.double().t() + add * total.double()
    product_(total, a, b.t(), add)
    assert (total - right).abs().max() <= 3e-6 * right.abs().max()
    sums = make(128, 300, seed=3)
    right = a.double().t() @ total.double() + add * sums.double()
    outer_(sums, a, total, add)
    assert (sums - right).abs().max() <= 3e-6 * right.abs().max()


@needs_onednn
@pytest.mark.parametrize("rows", [2, 333])
def test_kernel_host_bfloat16_is_multiplied_in_float32_where_the_cpu_cannot(rows, monkeypatch):
    """Rounding occurs once: within half a bfloat16 step of the float64 product of the same numbers, gradients too."""
    monkeypatch.setattr(host, "WIDENS", True)
    linear, reference = layer(128, 520, True)
    linear.bfloat16()
    reference.load_state_dict({name: x.double() for name, x in linear.state_dict().items()})
    x = make(rows, 128).bfloat16().requires_grad_()
    wanted = x.detach().double().requires_grad_()
    assert host.takes(x, linear.weight) and not host.takes(x[:1], linear.weight)
    y, exact = linear(x), reference(wanted)
    gradient = make(*y.shape, seed=1).bfloat16()
    found = torch.autograd.grad(y, [x, linear.weight], gradient)
    right = torch.autograd.grad(exact, [wanted, reference.weight], gradient.double())
    for a, b in zip((y, *found), (exact, *right), strict=True):
        assert a.dtype == torch.bfloat16
        # The rounded number is a sum in float32, which is off by far less.
        assert ((a.double() - b).abs() <= b.abs() * 2**-8 + 1e-4).all()


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_kernel_host_products_of_bfloat16_sum_in_float32(dtype, add, monkeypatch):
    monkeypatch.setattr(host, "WIDENS", True)
    a, b, total = make(40, 64).bfloat16(), make(64, 30, seed=1).bfloat16(), make(40, 30, seed=2).to(dtype)
    exact = a.double() @ b.double() + (total.double() if add else 0.0)
    product_(total, a, b, add)
    step = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert ((total.double() - exact).abs() <= exact.abs() * step + 1e-5).all()
    total = make(64, 30, seed=2).to(dtype)
    left, right = make(40, 64, seed=3).bfloat16(), make(40, 30, seed=4).bfloat16()
    exact = left.double().t() @ right.double() + (total.double() if add else 0.0)
    outer_(total, left, right, add)
    assert ((total.double() - exact).abs() <= exact.abs() * step + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_host_copies_no_weight_for_rows_that_lie_apart(dtype):
    """The HF engine multiplies the last token of each prompt by the head; torch would copy the head for each row."""
    linear, x_BTK = layer(64, 96, False)[0].to(dtype).requires_grad_(False), make(5, 7, 64).to(dtype)
    with torch.inference_mode(), torch.profiler.profile() as seen:
        found = linear(x_BTK[:, -1:])
    assert torch.equal(found, torch.nn.functional.linear(x_BTK[:, -1:].contiguous(), linear.weight))
    assert not {"aten::bmm", "aten::expand"} & {event.key for event in seen.key_averages()}
