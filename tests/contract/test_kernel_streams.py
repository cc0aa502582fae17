"""Row operations on a second stream: their order against products, on the fake GPU with clocks (`fake_order.py`)."""

from typing import Any

import pytest
import torch

from spmdrl_kernels import blocks, chunked_loss, collision_probability, linear_logprob, overlap
from tests.contract.fake_cuda import FakeCuda
from tests.contract.fake_order import Order
from tests.contract.fake_streams import RaceError, Stream

T, D, V = 12, 8, 800
CALLS: dict[str, Any] = {
    "linear_logprob": lambda h, w, t: linear_logprob(h, w, t, backend="torch", chunk_vocab=192),
    "rows and columns": lambda h, w, t: linear_logprob(h, w, t, backend="torch", chunk_vocab=300, chunk_tokens=5),
    "collision_probability": lambda h, w, t: (collision_probability(h, w, backend="torch", chunk_vocab=192),),
    "chunked_loss": lambda h, w, t: chunked_loss(h, w, t, lambda p, e, _: p + e, backend="torch", chunk_tokens=6)[:1],
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setitem(blocks.EXACT_BYTES, "gpu", 2 * 4 * 6 * 256)
    overlap._second_stream.cache_clear()
    yield
    overlap._second_stream.cache_clear()


def results(name: str, device: str) -> list[torch.Tensor]:
    """Returns the call's results, with gradients where it has them."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=draw).bfloat16().to(device).requires_grad_() for n in (T, V))
    found = CALLS[name](hidden, weight, (torch.arange(T) * 7).to(device))
    if not found[0].requires_grad:
        return [*found]
    return [*(x.detach() for x in found), *torch.autograd.grad([x.sum() for x in found], (hidden, weight))]


@pytest.mark.parametrize("name", CALLS)
def test_kernel_row_operations_beside_products_are_ordered(name):
    want = results(name, "cpu")
    with FakeCuda() as gpu, Order(gpu) as order:
        found = results(name, "cuda")
        assert len(order.streams) == 2
        found = [x.cpu() for x in found]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


WAITS: dict[str, tuple[str, Any]] = {
    "of the rows for their product": ("wait_stream", lambda stream, main: stream is not main),
    "of a product for the rows in its buffer": ("wait_event", lambda stream, main: stream is main),
    "of later work for the last rows": ("wait_stream", lambda stream, main: stream is main),
}


@pytest.mark.parametrize("name", ["linear_logprob", "chunked_loss"])
@pytest.mark.parametrize("wait", WAITS)
def test_kernel_row_operations_race_without_one_of_the_waits(name, wait, monkeypatch):
    method, left_out = WAITS[wait]
    with FakeCuda() as gpu, Order(gpu):
        own = getattr(Stream, method)
        skipping = lambda mine, other: None if left_out(mine, gpu.copies.default) else own(mine, other)  # noqa: E731
        monkeypatch.setattr(Stream, method, skipping)
        with pytest.raises(RaceError, match="no event orders them"):
            results(name, "cuda")
