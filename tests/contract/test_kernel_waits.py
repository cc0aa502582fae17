"""The kernels' functions never make the host wait for a GPU, forward or backward, by the fake one's count."""

from collections.abc import Callable

import pytest
import torch

from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob, raise_deferred, token_logprob
from spmdrl_kernels.aligned import Matched, SpanTeacher, aligned_loss
from spmdrl_kernels.distill import distillation_loss, top_logprobs
from spmdrl_kernels.divergence import StatesTeacher, TopTeacher
from tests.contract.fake_cuda import FakeCuda

T, D, V, U = 12, 8, 90, 70
CHUNKS = {"chunk_tokens": 5}


class Given:
    """Inputs on the fake GPU."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.h, self.w, self.theirs = (torch.randn(n, D, generator=draw).bfloat16().cuda() for n in (T, V, U))
        self.heat, self.shift = (torch.rand(2, T, generator=draw) + 0.5).cuda()
        self.t = torch.arange(T).cuda()
        self.matched = Matched(torch.arange(9).cuda(), torch.arange(20, 29).cuda(), 0.5)
        self.h.requires_grad_(), self.w.requires_grad_()


def distilled(x: Given) -> tuple:
    ids, logp, rest = top_logprobs(x.h.detach(), x.w.detach(), 4, **CHUNKS)
    teachers = [(StatesTeacher(x.h.detach(), x.w.detach()), x.shift), (TopTeacher(ids, logp, rest), x.shift)]
    return distillation_loss(x.h, x.w, teachers, 0.5, 1.5, **CHUNKS)


CALLS: dict[str, Callable[[Given], tuple]] = {
    "linear_logprob": lambda x: linear_logprob(x.h, x.w, x.t, x.heat, softcap=3.0, backend="torch"),
    "batch_invariant": lambda x: linear_logprob(x.h, x.w, x.t, 0.7, batch_invariant=True, backend="torch"),
    "collision_probability": lambda x: (collision_probability(x.h, x.w, x.heat, backend="torch"),),
    "token_logprob": lambda x: token_logprob(x.h @ x.w.t(), x.t, x.heat, backend="torch"),
    "chunked_loss": lambda x: chunked_loss(
        x.h, x.w, x.t, lambda p, e, given: p * given["a"] + e, {"a": x.heat}, 0.7, **CHUNKS, backend="torch"
    ),
    "distillation_loss": distilled,
    "aligned_loss": lambda x: aligned_loss(
        x.h, x.w, x.shift, SpanTeacher(x.h.detach(), x.theirs, x.shift), x.shift, x.matched, 1.5, **CHUNKS
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernel_functions_do_not_wait_for_the_device(name):
    with FakeCuda() as gpu:
        given = Given()
        if name == "aligned_loss":
            # The first call counts the tokens that are not in both vocabularies.
            given.matched.others(V, U)
        before = len(gpu.waits)
        outputs = [x for x in CALLS[name](given) if isinstance(x, torch.Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, (given.h, given.w), [torch.ones_like(x) for x in outputs])
        assert gpu.waits[before:] == []
        raise_deferred()
