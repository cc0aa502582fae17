"""Boxes that a loader reads of a tensor: they hold every element it touches, through whatever views it goes."""

import random

import pytest
import torch

from spmdrl.engines.needs import check_filled, touched, unfilled, watched_load


def brute(x: torch.Tensor, whole: torch.Tensor) -> tuple:
    """Returns smallest and largest index in each dimension, of elements whose values are their places."""
    places = torch.unravel_index(x.reshape(-1).view(whole.dtype), whole.shape)
    return tuple((int(p.min()), int(p.max()) + 1) for p in places)


def cut(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Makes one more view."""
    dim = rng.randrange(x.dim())
    n = x.shape[dim]
    a = rng.randrange(n)
    kind = rng.choice(["narrow", "narrow", "step", "select", "transpose", "flatten", "fold", "diagonal", "expand"])
    if kind == "narrow":
        return x.narrow(dim, a, rng.randint(1, n - a))
    if kind == "step":
        return x[(slice(None),) * dim + (slice(a, None, rng.randint(1, 3)),)]
    if kind == "select" and x.dim() > 1:
        return x.select(dim, a)
    if kind == "transpose":
        return x.transpose(dim, rng.randrange(x.dim()))
    if kind == "flatten" and x.is_contiguous():
        return x.view(-1)
    if kind == "fold" and n % 2 == 0:
        return x.unflatten(dim, (2, n // 2))
    if kind == "diagonal" and x.dim() == 2:
        return x.diagonal(rng.choice([0, 1]) if n > 1 and x.shape[1] > 1 else 0)
    if kind == "expand":
        return x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:])
    return x


def test_boxes_hold_every_element_of_any_view():
    rng, smallest, total = random.Random(0), 0, 3000
    for _ in range(total):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        x = whole
        for _ in range(rng.randint(0, 5)):
            x = cut(x, rng)
        want, got = brute(x, whole), touched(x, whole)
        assert all(a <= c < d <= b <= n for (a, b), (c, d), n in zip(got, want, shape, strict=True)), (shape, got, want)
        smallest += got == want
        flat = whole.view(-1)
        a = rng.randrange(len(flat))
        x = flat[a : rng.randint(a + 1, len(flat))]
        # Slices of a flattened tensor, and their bytes, give the smallest box.
        assert touched(x, whole) == touched(x.view(torch.uint8), whole) == brute(x, whole)
    assert smallest > 0.97 * total


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (lambda x: x.view(-1)[3:9], ((0, 3), (0, 4))),
        (lambda x: x.view(-1)[5:7], ((1, 2), (1, 3))),
        (lambda x: x.view(-1)[3:5], ((0, 2), (0, 4))),
        (lambda x: x[1:3, 2:], ((1, 3), (2, 4))),
        (lambda x: x.t()[1:2], ((0, 4), (1, 2))),
        (lambda x: x[:, 1:].diagonal(), ((0, 3), (1, 4))),
        (lambda x: x.view(-1)[6:7].view(torch.uint8), ((1, 2), (2, 3))),
    ],
)
def test_boxes_of_a_loader(view, box):
    def load(named):
        for _, x in named:
            part = view(x)
            torch.zeros(part.shape, dtype=part.dtype).copy_(part)

    assert watched_load(load, [("x", (4, 4), torch.float32)]).boxes == [(0, box)]


@pytest.mark.parametrize(
    ("load", "counted"),
    [
        (lambda held, x: held.copy_(x.t()), False),  # GPT-2's layers lie transposed in its checkpoints
        (lambda held, x: held.copy_(x.unsqueeze(1).transpose(0, 1)[0]), True),
        (lambda held, x: held.narrow(0, 0, 4).copy_(x.narrow(0, 0, 4)), True),
        (lambda held, x: held.copy_(x).exp_(), False),  # the decay of Mamba's states
        (lambda held, x: held.copy_(-held.copy_(x).exp()), False),
        (lambda held, x: held.copy_(x).narrow(0, 6, 2).fill_(0), True),  # the padding of a vocabulary
    ],
)
def test_words_are_counted_only_where_the_model_holds_them_as_they_were_pushed(load, counted):
    """Sums are over words of eight bytes, of which two float32 make one."""
    held = torch.zeros(8, 8)
    needs = watched_load(lambda named: [load(held, x) for _, x in named], [("x", (8, 8), torch.float32)])
    assert needs.counted[:1] == [counted] and bool(needs.uncounted) is not counted


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_parts_that_a_loader_joins_are_needed(join):
    """Falcon's loader sorts the heads of a fused projection so."""
    held = torch.zeros(8, 8)

    def load(named) -> None:
        (_, x), (_, y) = named
        held.copy_(join([x.narrow(0, 2, 4), y.narrow(0, 0, 4)]).reshape(8, 8))

    needs = watched_load(load, [("x", (8, 8), torch.float32), ("y", (4, 8), torch.float32)])
    assert needs.boxes == [(0, ((2, 6), (0, 8))), (1, ((0, 4), (0, 8)))]
    assert not needs.exact and held.untyped_storage().data_ptr() in needs.filled


def test_nothing_is_needed_of_an_empty_part():
    def load(named):
        for _, x in named:
            torch.zeros(0, 4).copy_(x[2:2])

    needs = watched_load(load, [("x", (4, 4), torch.float32)])
    assert needs.boxes == needs.counted == [] and needs.exact


EXPERTS, WIDE, HIDDEN = 4, 6, 8


class Experts(torch.nn.Module):
    """One rank's part of a layer of experts, as engines lay it out: gate and up of an expert end to end."""

    def __init__(self, first: int, count: int):
        super().__init__()
        self.first = first
        self.w13 = torch.nn.Parameter(torch.zeros(count, 2 * WIDE, HIDDEN), requires_grad=False)
        self.router = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN), requires_grad=False)
        self.decay = torch.nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def load(self, named):
        for name, x in named:
            kind = name.rpartition(".")[2]
            if kind == "decay":
                self.decay.data.copy_(-x.exp())
            elif kind in ("router", "bias"):
                getattr(self, kind).data.copy_(x)
            elif 0 <= (place := int(name.split(".")[1]) - self.first) < len(self.w13):
                self.w13.data[place].narrow(0, WIDE * (kind == "up"), WIDE).copy_(x)


def tensors(*without: str) -> list:
    named = {f"experts.{i}.{kind}": (WIDE, HIDDEN) for i in range(EXPERTS) for kind in ("gate", "up")}
    named |= {"router": (EXPERTS, HIDDEN), "decay": (EXPERTS,), "bias": (EXPERTS,)}
    return [(name, shape, torch.float32) for name, shape in named.items() if name.rpartition(".")[2] not in without]


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_experts_of_one_rank_are_needed_and_none_of_the_others(rank):
    given = tensors()
    needs = watched_load(Experts(2 * rank, 2).load, given)
    whole = {given[i][0]: box for i, box in needs.boxes}
    mine = {f"experts.{i}.{kind}" for i in (2 * rank, 2 * rank + 1) for kind in ("gate", "up")}
    assert set(whole) == mine | {"router", "decay", "bias"}
    assert all(whole[name] == ((0, WIDE), (0, HIDDEN)) for name in mine)


@pytest.mark.parametrize(
    ("without", "kinds", "lacking"),
    [
        ((), ["gate", "bias"], []),
        # The model makes buffers for itself of which no checkpoint has the kind.
        (("bias",), ["gate"], []),
        (("bias",), ["gate", "bias"], ["bias"]),
        (("router",), ["gate", "bias"], ["router"]),
        (("gate", "up"), ["gate", "bias"], ["w13"]),
        # What is loaded through a formula arrives all the same.
        (("decay",), ["gate", "bias"], ["decay"]),
    ],
)
def test_stale_weights_that_no_tensor_fills_are_named(without, kinds, lacking):
    model = Experts(0, 2)
    found = unfilled(model, watched_load(model.load, tensors(*without)), kinds)
    assert found == lacking
    assert not any(x.any() for x in model.parameters() if x is not model.decay), "a watched load copies nothing"
    if not lacking:
        check_filled("vllm", found)
        return
    with pytest.raises(ValueError, match=rf"no tensor for 1 of the engine's weights \({lacking[0]}\).* such as hf"):
        check_filled("vllm", found)
