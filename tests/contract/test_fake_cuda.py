"""The fake GPU refuses the same as a GPU; and GPU branches that no whole run takes are run on it.

Whole runs are in tests/ranks/test_fake_gpu.py. What all of it proves and does not, `fake_cuda.py` says.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.algos import compute_advantages, compute_loss
from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.losses import LOSSES
from spmdrl.config.divergence import DivergenceConfig
from spmdrl.data.batch import Batch
from spmdrl.engines.hf.sample import sample
from spmdrl.policy.contract import OutputHead
from spmdrl.policy.forward_plan import for_losses
from spmdrl.policy.objectives.distillation import DistillObjective, TargetReader
from spmdrl.session.meter import Meter
from spmdrl.spmd import storage
from spmdrl.spmd.checksum import digest, weighted_sum
from spmdrl.spmd.copies import on_host, to_device
from spmdrl.spmd.generators import generator_states, set_generator_states
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.storage import Parked, storage_bytes
from spmdrl_kernels import chunked_loss, linear_logprob, raise_deferred
from tests.contract.fake_cuda import FakeCuda, MixedDevicesError, NondeterministicError
from tests.contract.fake_labels import CUDA, place
from tests.contract.fake_streams import RaceError


@pytest.fixture
def gpu():
    with FakeCuda() as gpu:
        yield gpu


# ── the tool ─────────────────────────────────────────────────────────────────

MIXTURES: dict[str, Any] = {
    "a sum": lambda x, y: x + torch.ones(3),
    "a list": lambda x, y: torch.cat([x, torch.ones(3)]),
    "scalars in a list": lambda x, y: torch.stack([x.sum(), torch.tensor(1.0)]),
    "an index from the device": lambda x, y: torch.ones(3)[y],
    "rows by a tensor of the host": lambda x, y: x.index_select(0, torch.arange(2)),
    "a mask": lambda x, y: torch.where(torch.ones(3, dtype=torch.bool), x, 0.0),
    "a scatter": lambda x, y: x.scatter_add(0, torch.arange(3), x),
    "repeats": lambda x, y: x.repeat_interleave(torch.tensor([1, 2, 1])),
    "a gradient": lambda x, y: torch.autograd.grad(x.requires_grad_().exp(), x, torch.ones(3)),
    "inside a backward": lambda x, y: Careless.apply(x.requires_grad_()).sum().backward(),
    "numpy": lambda x, y: x.numpy(),
}


class Careless(torch.autograd.Function):
    """x, with a backward that forgets the device."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * torch.ones(3)


@pytest.mark.parametrize("name", MIXTURES)
def test_contract_of_the_fake_gpu_it_refuses_mixtures(gpu, name):
    x, y = torch.ones(3, device="cuda"), torch.tensor([0, 2], device=CUDA)
    with pytest.raises((MixedDevicesError, TypeError), match="same device|device type tensor"):
        MIXTURES[name](x, y)


def test_contract_of_the_fake_gpu_it_computes_and_labels(gpu):
    x = torch.arange(6.0, device="cuda").view(2, 3).requires_grad_()
    layer = torch.nn.Linear(3, 4).to("cuda")
    y = (
        torch.nn.functional.one_hot(layer(x).argmax(-1), 4)
        + layer(x) * torch.tensor(2.0)
        + x[torch.tensor([1, 0])].sum()
    )
    assert y.device == CUDA and y.is_cuda and not y.is_cpu and y.untyped_storage().device == CUDA
    y.cpu().mul(torch.ones(4)).sum().backward()
    plain = x.detach().cpu().requires_grad_()
    layer.cpu()(plain).mul(2).sum().backward()
    assert x.grad is not None and plain.grad is not None and x.grad.device == CUDA
    assert torch.equal(x.grad.cpu(), plain.grad + 8)
    assert x.to(CUDA) is x and x.double().device == torch.empty_like(x).device == x.new_zeros(2).device == CUDA
    assert torch.zeros(2).device == torch.device("cpu") and torch.zeros(2, device="meta").device.type == "meta"


def test_contract_of_the_fake_gpu_copies_are_not_done_before_a_wait(gpu):
    x, pinned = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    with pytest.raises(RaceError, match="before the copy"):
        pinned.sum()
    torch.cuda.synchronize()
    assert pinned.sum() == 4
    pinned.copy_(x, non_blocking=True)
    x.untyped_storage().resize_(0)
    with pytest.raises(RaceError, match="given back"):
        torch.cuda.synchronize()
    y = torch.empty(4, device="cuda")
    y.copy_(pinned, non_blocking=True)
    pinned.data.numpy()[0] = 7
    with pytest.raises(RaceError, match="changed"):
        torch.cuda.synchronize()


def copied():
    """Returns a tensor of the device, and pinned memory to which it is being copied."""
    x, pinned = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    return x, pinned.copy_(x, non_blocking=True)


def test_contract_of_the_fake_gpu_streams_and_events_end_what_was_given_before_them(gpu):
    (_, first), event, side = copied(), torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    _, second = copied()
    event.synchronize()
    assert first.sum() == 4
    with pytest.raises(RaceError, match="before the copy"):
        second.sum()
    side.synchronize()
    with pytest.raises(RaceError, match="before the copy"):
        second.sum()
    side.wait_stream(torch.cuda.current_stream(CUDA))
    with torch.cuda.stream(side):
        x, third = copied()
    torch.cuda.current_stream().synchronize()
    assert second.sum() == 4
    with pytest.raises(RaceError, match="another stream"):
        x.copy_(third, non_blocking=True)
    torch.cuda.default_stream().wait_event(side.record_event())
    torch.cuda.current_stream().synchronize()
    assert third.sum() == 4 and not gpu.copies.waiting


def test_contract_of_the_fake_gpu_copies_of_one_stream_are_in_order(gpu):
    """A buffer may be given to the next copy of its stream; each copies the content of its turn."""
    x, pinned = copied()
    x.add_(1)
    y = torch.empty(4, device="cuda").copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert y.sum() == 4 and pinned.sum() == 8
    x.copy_(pinned, non_blocking=True)
    pinned.zero_()
    with pytest.raises(RaceError, match="changed"):
        pinned.copy_(y, non_blocking=True)


REFUSED: dict[str, Any] = {
    "sums in a row": lambda x, i: x.cumsum(0),
    "sums in a row, of integers as floats": lambda x, i: i.cumsum(0, dtype=torch.float64),
    "put": lambda x, i: x.put_(i, x.clone()),
    "a histogram": lambda x, i: x.histc(3),
    "weighted counts": lambda x, i: torch.bincount(i, x),
    "a median's place": lambda x, i: x.median(0),
    "a product of what falls together": lambda x, i: x.scatter_reduce(0, i, x, "prod"),
}
TAKEN: dict[str, Any] = {
    "sums of integers in a row": lambda x, i: i.cumsum(0),
    "counts": lambda x, i: torch.bincount(i),
    "a scatter": lambda x, i: x.scatter_add(0, i, x),
    "a sum of what falls together": lambda x, i: x.scatter_reduce(0, i, x, "sum"),
    "a tensor of the host": lambda x, i: x.cpu().cumsum(0),
}


@pytest.mark.parametrize("name", REFUSED | TAKEN)
def test_contract_of_the_fake_gpu_it_refuses_chance_where_the_program_wants_none(gpu, name):
    x, i = torch.ones(3, device="cuda"), torch.tensor([0, 2, 2], device="cuda")
    (REFUSED | TAKEN)[name](x.clone(), i)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NondeterministicError, match="deterministic") if name in REFUSED else nullcontext():
            (REFUSED | TAKEN)[name](x, i)
    finally:
        torch.use_deterministic_algorithms(False)


# ── memory ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", ["host", "disk", "gone"])
def test_parity_of_parked_tensors_on_a_fake_gpu(gpu, monkeypatch, at):
    monkeypatch.setattr(storage, "PIECE", 1 << 12)
    base = torch.randn(4, 700, device="cuda")  # more than two pieces
    want, row, elsewhere = base.cpu(), base[2], torch.ones(3)
    parked = Parked([base, row, elsewhere], at, CUDA)
    assert parked.bytes == want.nbytes and not storage_bytes([base, elsewhere], "cuda")
    assert storage_bytes([elsewhere], "cpu") == 12 and "empty_cache" in gpu.calls
    parked.bring_back()
    assert base.device == CUDA and storage_bytes([base, row], "cuda") == want.nbytes and not gpu.copies.waiting
    if at != "gone":
        assert torch.equal(base.cpu(), want) and torch.equal(row.cpu(), want[2])


def test_parity_of_parked_tensors_fails_without_a_wait(gpu, monkeypatch):
    wait = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    Parked([torch.ones(8, device="cuda")], "host", CUDA)
    with pytest.raises(RaceError):
        wait()


def test_parity_of_the_meter_on_a_fake_gpu(gpu, monkeypatch):
    """Memory in use is the system's count less what torch keeps unused, plus the growth of torch's own count."""
    meter = Meter(CUDA)
    assert meter.lap() == (18 << 30, 19 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (75 << 30, 80 << 30))
    now, peak = meter.lap()
    assert (now, peak) == (3 << 30, 19 << 30) and gpu.calls.count("reset_peak_memory_stats") == 3


def test_parity_of_digests_on_a_fake_gpu(gpu):
    x = torch.randn(5000)
    assert digest(x.to("cuda")).device == CUDA
    assert int(digest(x.to("cuda"))) == int(weighted_sum(x)) != int(digest(x))


def test_parity_of_random_states_on_a_fake_gpu(gpu):
    states = generator_states(CUDA)
    first = torch.rand(3)
    set_generator_states(states, CUDA)
    assert "cuda" in states and torch.equal(first, torch.rand(3)) and "set_rng_state" in gpu.calls


@pytest.mark.parametrize("deterministic", [False, True])
def test_parity_of_sampling_on_a_fake_gpu(deterministic):
    """The tokens are the same; under `--run.deterministic` sums of integers replace those that torch refuses."""
    logits = torch.randn(5, 40, generator=seeded(), dtype=torch.float64)

    def draw(device: str):
        made = dict(seeds=torch.arange(5), temperature=torch.tensor([0.0, 1, 1, 0.7, 2]).double())
        group: Any = SimpleNamespace(**{k: v.to(device) for k, v in made.items()})
        group.top_p = torch.tensor([1.0, 1, 0.5, 0.9, 0.8], device=device).double()
        return sample(logits.to(device), group, torch.arange(5, device=device))

    torch.use_deterministic_algorithms(deterministic)
    try:
        want = draw("cpu")
        with FakeCuda():
            same(want, draw("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)


# ── numbers ──────────────────────────────────────────────────────────────────


def same(on_host: Any, on_gpu: Any) -> None:
    """Compares values to rounding, types and shapes exactly; the second one is on the GPU."""
    for a, b in zip(on_host, on_gpu, strict=True):
        assert place(b) == "cuda" and (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b.cpu(), atol=1e-6, rtol=1e-5)


NEEDS = {
    "remax": lambda to: {"baseline": to(torch.linspace(0, 1, 6))},
    "optimal_token_baseline": lambda to: {
        "logp": to(-torch.rand(6, 5, generator=seeded())),
        "collision": to(torch.rand(6, 5, generator=seeded())),
    },
    "prime": lambda to: {"process": to(torch.rand(6, 5, generator=seeded()))},
    "grpo_process": lambda to: {
        "process": to(torch.rand(6, 5, generator=seeded())),
        "ends": to((torch.rand(6, 5, generator=seeded()) < 0.5).float()),
    },
    **dict.fromkeys(("gae", "turn_gae"), lambda to: {"values": to(torch.rand(6, 5, generator=seeded()))}),
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def advantages(name: str, device: str):
    rewards, mask = torch.tensor([0.0, 1.0, 0.5, 0.0, 0.5, 0.5]), torch.rand(6, 5, generator=seeded()) < 0.8
    mask[:, 0] = True
    group = torch.tensor([0, 0, 0, 1, 1, 1])

    def to(x: torch.Tensor) -> torch.Tensor:
        return x.to(device)

    more = NEEDS[name](to) if name in NEEDS else {}
    return compute_advantages(name, rewards=to(rewards), mask=to(mask), group=to(group), **more)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_parity_of_advantages_on_a_fake_gpu(name):
    want = advantages(name, "cpu")
    with FakeCuda():
        same(want, advantages(name, "cuda"))


def loss(name: str, device: str, dtype: torch.dtype):
    logp, old, given = (torch.rand(6, 5, generator=seeded()) * k for k in (-1.0, -1.1, 0.7))
    mask = (torch.rand(6, 5, generator=seeded()) < 0.8).to(device)
    logp = logp.to(device, dtype).requires_grad_()
    found = compute_loss(name, logp=logp, old_logp=old.to(device, dtype), advantages=given.to(device), mask=mask)
    found.backward()
    return found.detach(), logp.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_parity_of_losses_on_a_fake_gpu(name, dtype):
    want = loss(name, "cpu", dtype)
    with FakeCuda():
        same(want, loss(name, "cuda", dtype))


def test_waits_of_a_loss_with_one_teacher(gpu):
    """The teacher's columns and the loss of the rows need no number from the device."""
    lengths, rows = torch.tensor([3, 4]), torch.tensor([1, 2, 4, 5, 6])
    token = {"tokens": torch.arange(7), "mask": torch.ones(7, dtype=torch.bool), "t/states": torch.ones(7, 4)}
    batch = Batch(lengths, token, {"position": lengths, "sample": lengths, "t/share": torch.ones(2).double()})
    weight = torch.randn(9, 4, device="cuda", generator=seeded())
    reader, peers = TargetReader(0, 9, torch.float32), Peers(None, CUDA)
    objective = DistillObjective(DivergenceConfig(), reader, {"t": OutputHead(weight, 1.0, None)}, 1.0, peers)
    shared = objective.prepare(batch, 0)
    states = torch.randn(5, 4, device="cuda", generator=seeded()).requires_grad_()
    rows = rows.to("cuda")
    gpu.waits.clear()
    loss, _ = objective.token_loss(for_losses(batch, CUDA), shared)(states, OutputHead(weight, 1.0, None), rows)
    loss.backward()
    assert not gpu.waits and states.grad.norm() > 0


def definition(hidden, weight, targets):
    """Returns log p of the targets and entropy, in float64."""
    log_p = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype, slack", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
def test_parity_of_the_kernels_host_code_on_a_fake_gpu(gpu, dtype, slack):
    """The plan for GPUs has larger blocks, and products of narrow matrices go straight into float32."""
    hidden = torch.randn(40, 16, device="cuda", dtype=dtype, generator=seeded()).requires_grad_()
    weight = torch.randn(300, 16, device="cuda", dtype=dtype, generator=seeded()).requires_grad_()
    targets = torch.arange(40, device="cuda") * 7
    want = definition(hidden, weight, targets)
    grads = torch.autograd.grad(want[0].sum() + 0.1 * want[1].sum(), (hidden, weight))
    found = linear_logprob(hidden, weight, targets, backend="torch", chunk_tokens=16, chunk_vocab=256)
    total, _ = chunked_loss(hidden, weight, targets, lambda p, e, _: p + 0.1 * e, backend="torch")
    for loss in (found[0].sum() + 0.1 * found[1].sum(), total):
        own = torch.autograd.grad(loss, (hidden, weight))
        for a, b in zip(own, grads, strict=True):
            assert place(a) == "cuda" and a.dtype == dtype
            assert (a.double() - b.double()).norm() <= slack * b.double().norm()
    for a, b in zip(found, want, strict=True):
        assert a.dtype == torch.float32 and (a - b).abs().max() <= 1e-4  # not rounded to bfloat16 on the way


def head_inputs(**changes):
    """Returns keyword arguments of `linear_logprob` on the fake GPU."""
    shapes = {"hidden_TD": (6, 4), "weight_VD": (9, 4)}
    given = {name: torch.randn(shape, device="cuda", generator=seeded()) for name, shape in shapes.items()}
    return given | {"targets_T": torch.arange(6, device="cuda"), "backend": "torch"} | changes


LATE: dict[str, Any] = {
    "targets must lie in .0, 9., got values from 0 to 12": lambda: linear_logprob(
        **head_inputs(targets_T=torch.tensor([0, 12, 3, 4, 5, 6], device="cuda"))
    ),
    "1 / temperature too: values from 0.0 to 1.0": lambda: linear_logprob(
        **head_inputs(temperature=torch.tensor([1.0, 0, 1, 1, 1, 1], device="cuda"))
    ),
    "depends on other tokens": lambda: chunked_loss(**head_inputs(), loss_fn=lambda p, e, _: p - p.mean()),
}


@pytest.mark.parametrize("message", LATE)
def test_kernel_checks_of_values_on_a_gpu_do_not_wait(gpu, message, monkeypatch):
    """Neither the call nor a later one waits; one after the numbers have arrived raises the error, which names them."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)
    early = LATE[message]()
    assert not message.startswith("targets") or early[0].cpu().isnan().tolist() == [False, True, *[False] * 4]
    linear_logprob(**head_inputs())
    assert len(gpu.copies.waiting) >= 2
    with pytest.raises(ValueError, match=message):
        raise_deferred()
    raise_deferred()
    monkeypatch.undo()
    LATE[message]()
    with pytest.raises(ValueError, match=message):
        linear_logprob(**head_inputs())


WAITS: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "numbers": lambda x: torch.tensor([1.0], device="cuda"),
    "pageable memory": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "a copy": lambda x: x.copy_(torch.ones(3)),
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "the last event": lambda x: (event := torch.cuda.Event()).record() or event.synchronize(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NO_WAITS: dict[str, Any] = {
    "pinned memory": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "to_device": lambda x: to_device((torch.ones(3), [torch.arange(2)]), CUDA),
    "a fill": lambda x: torch.full((2,), 3.0, device="cuda"),
    "an index": lambda x: x[torch.arange(2, device="cuda")],
    "one number under a mask": lambda x: x.__setitem__(x > 0, 1.0),
    "repeats of known size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "an earlier event": lambda x: (event := torch.cuda.Event()).record() or x.add(1) is None or event.synchronize(),
}


@pytest.mark.parametrize("name", [*WAITS, *NO_WAITS])
def test_contract_of_the_fake_gpu_it_counts_waits_of_the_host(gpu, name):
    x = torch.ones(3, device="cuda")
    gpu.waits.clear()
    (WAITS | NO_WAITS)[name](x)
    assert [place for _, place in gpu.waits] == ["contract/test_fake_cuda.py:<lambda>"] * (name in WAITS)


def test_copies_to_the_host_wait_while_the_device_has_work(gpu):
    """Each copy is read after the next was begun, and only the last wait leaves the device without work."""
    given = [torch.full((2,), float(i), device="cuda") for i in range(4)]
    gpu.waits.clear()
    seen = list(on_host((x * 2, x + 1) for x in given))
    assert [[a[0].item(), b[0].item(), place(a)] for a, b in seen] == [[2.0 * i, i + 1.0, "cpu"] for i in range(4)]
    assert gpu.waits == [("synchronize", "spmd/copies.py:_arrived")]


def test_copies_to_the_host_fail_without_a_wait(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    ((copy,),) = on_host([(torch.ones(2, device="cuda"),)])
    with pytest.raises(RaceError):
        copy.add(1)
    with pytest.raises(RaceError):
        copy.tolist()
