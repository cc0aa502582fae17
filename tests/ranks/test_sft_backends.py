"""SFT of adapters and by Megatron: the gradient is the formula's, and FSDP's, on every layout."""

import json
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from spmdrl.config.schema import ParallelConfig
from spmdrl.data.distribute import balance
from spmdrl.hub.resolve import resolve
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.mesh import world_from_group
from tests.ranks.harness import run_ranks
from tests.ranks.megatron_cases import LIMIT, drop_groups
from tests.ranks.test_lora import halves, shake
from tests.ranks.test_sft import DOUBLE, opened, plain_loss, rows

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
LORA = {"rank": 3, "alpha": 12}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """The rows of test_sft.py."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(48)))
    return str(path)


def gradient_of_adapters(world, folder: str, data: str, more: dict) -> tuple[dict, dict, dict]:
    """Returns adapters away from their start, their gradient in the first step, and what the step says of itself."""
    run = opened(world, folder, data, DOUBLE | {"lora": LORA} | more)
    shake(run.policy)
    batch = balance(run.rows(0), world)
    shared = run.objective.prepare(batch, 0)
    stats = run.policy.gradient(run.policy.microbatches(batch), run.objective, shared)
    run.close()
    told = stats.reduce(lambda x, op: world.data_peers.sum(x) if op == "sum" else x)
    assert all(p.grad is None for n, p in run.policy.named_weights() if "lora_" not in n)
    return halves(run.policy)[1], halves(run.policy, lambda p: p if p.grad is None else p.grad)[1], told


@needs_peft
def test_parity_and_layout_of_the_gradient_of_adapters(data, tmp_path):
    """W + alpha / rank B A in plain transformers: with G the gradient of W, B's is G A^T, and A's is B^T G."""
    from transformers import AutoModelForCausalLM

    ((adapters, want, told),) = run_ranks(gradient_of_adapters, 1, str(tmp_path / "one"), data, {})
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).eval()
    scale, found = LORA["alpha"] / LORA["rank"], 0
    pairs = {name: name.replace("lora_A", "lora_B") for name in adapters if "lora_A" in name}
    plain = {name: model.get_parameter(name.replace(".lora_A", "").removeprefix("hf.")) for name in pairs}
    with torch.no_grad():
        for a, b in pairs.items():
            plain[a] += scale * adapters[b] @ adapters[a]
    loss, accuracy = plain_loss(model)
    loss.backward()
    assert told["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert told["accuracy/mean"] == pytest.approx(accuracy, rel=1e-12)
    for a, b in pairs.items():
        grad = plain[a].grad
        torch.testing.assert_close(want[a], scale * adapters[b].T @ grad, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(want[b], scale * grad @ adapters[a].T, rtol=1e-7, atol=1e-10)
        found += bool(want[a].any() and want[b].any())
    assert found == len(pairs) >= 14
    for number, more in enumerate(({}, {"parallel": {"sp": 2}})):
        for _, got, _ in run_ranks(gradient_of_adapters, 2, str(tmp_path / str(number)), data, more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# ── Megatron ─────────────────────────────────────────────────────────────────

LAYOUTS = {
    1: {"one": {}},
    2: {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "first_stage_layers": 1}, "cp2": {"cp": 2}},
}
# Adam divides by what may be rounding, unless epsilon is above it.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}


def join_shards(trainer) -> None:
    """Gathers the gradient, of which the ranks of one data group hold a shard each once it is summed. Collective."""
    for buffer in trainer._buffers():
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(dist.get_world_size(group)))
            dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)


def gradients_by(world, root: str, data: str, kind: str, layouts: dict) -> dict:
    """Returns layout -> (gradient of the first step on rank 0, its metrics, metrics of the step after it)."""
    from spmdrl.weights.reshard import Piece
    from spmdrl.weights.safetensors import on_first

    out = {}
    for name, axes in layouts.items():
        drop_groups()
        limit = timedelta(seconds=LIMIT)
        here = world_from_group(ParallelConfig(**axes), 1, torch.device("cpu"), world.rank, limit)
        if kind == "megatron":
            from spmdrl.policy.megatron.layout import Layout
            from spmdrl.policy.megatron.model import initialize

            initialize(Layout(**axes))
        more = {"policy": {"backend": kind}, "parallel": axes, "optimizer": OPTIMIZER}
        run = opened(here, f"{root}/{kind} {world.size} {name}", data, more)
        policy, reduced = run.policy, partial(all_reduce, group=here.data_group)
        first, second = (balance(run.rows(step), here) for step in (0, 1))
        stats = policy.gradient(policy.microbatches(first), run.objective, run.objective.prepare(first, 0))
        if kind == "megatron":
            from spmdrl.policy.megatron.convert import slots

            join_shards(policy.trainer)
            held = slots(policy.trainer.models, lambda p: p.main_grad)
            pieces = [Piece(h.name, h.shape, h.box, h.view) for h in held]
            gradient = {k: x.clone() for some in on_first(pieces, here, torch.float32) for k, x in some.items()}
        else:
            gradient = {n: p.grad.full_tensor().detach().clone() for n, p in policy.named_weights()}
        policy.zero_grad()
        policy.update(first, run.objective)
        after = policy.update(second, run.objective).reduce(reduced, here.device)
        run.close()
        out[name] = gradient, stats.reduce(reduced, here.device), after
    return out


@pytest.fixture(scope="module")
def by_megatron(data, tmp_path_factory):
    """Returns number of ranks -> results of all ranks, and the kind for FSDP's on one rank; made on request."""
    root = str(tmp_path_factory.mktemp("megatron"))

    @cache
    def of(ranks: int, kind: str = "megatron") -> list[dict]:
        return run_ranks(gradients_by, ranks, root, data, kind, LAYOUTS[ranks], limit=300)

    return of


@needs_megatron
@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n, on in LAYOUTS.items() for name in on])
def test_parity_with_fsdp_of_sft_by_megatron(ranks, name, by_megatron):
    """To the bounds of test_megatron_policy.py; the loss of the step after shows the update."""
    want, told, after = by_megatron(1, "fsdp")[0]["one"]
    results = [rank[name] for rank in by_megatron(ranks)]
    got, largest = results[0][0], max(x.abs().max().item() for x in want.values())
    assert got.keys() == want.keys()
    worst = max((got[n] - want[n]).abs().max().item() for n in want)
    print(name, f"gradient {worst:.1e} of {largest:.1e}", results[0][1]["loss"] - told["loss"])
    assert worst <= 1e-5 and largest > 1e-2
    for _, mine, then in results:
        for metric in ("loss", "nll/mean", "accuracy/mean"):
            assert abs(mine[metric] - told[metric]) <= 1e-5 * abs(told[metric]), metric
        for metric in ("loss", "grad_norm", "accuracy/mean"):
            assert abs(then[metric] - after[metric]) <= 1e-5 * abs(after[metric]), metric
    assert abs(after["loss"] - told["loss"]) > 1e-3
