"""The policy and the whole program on a GPU; the same things are tested on a CPU in tests/ranks and tests/e2e."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

from spmdrl.config.schema import OptimizerConfig
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.varlen import KERNELS, attend, installed, lacking, make_runs, needs_of
from spmdrl.policy.fsdp.layers import compile_layers, use_liger
from spmdrl.policy.heads import PackedLM
from spmdrl.policy.optimizer import make_optimizer
from spmdrl.spmd.copies import to_device
from tests.unit.varlen_kernels import stand_in

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


def test_packed_logp_on_gpu_equals_cpu():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 13, 40, 2])
    tokens = torch.randint(3, 40, (int(lengths.sum()),), generator=generator)
    mask = torch.rand(len(tokens), generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    model = PackedLM(build_model(TINY, torch.float32, False, attention.register()), "padded")
    expected = model(model.plan(tokens, lengths, mask), 0.7)
    got = model.cuda()(model.plan(tokens, lengths, mask), 0.7)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("widths", [(64, 64), (20, 12)])
def test_attention_kernel_is_what_its_stand_in_says(kernel, window, widths):
    """Values and gradients in bfloat16 agree, also of sequences with more keys than queries."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((30, 4, widths[0]), (25, 2, widths[0]), (25, 2, widths[1]))
    whole = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    why = lacking(kernel, needs_of(whole[0].cuda(), whole[2], None), installed())
    if why:
        pytest.skip(f"{kernel}: {why}")
    queries, keys = [9, 9, 12], [[(0, 9)], [(0, 9), (9, 4)], [(0, 6), (13, 12)]]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        q, k, v = leaves = [x.to(device, dtype).requires_grad_() for x in whole]
        runs = to_device(make_runs(queries, keys), q.device)
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                stand_in(patch)
            out = attend(kernel, q, k, v, runs, 0.2, window)
        weight = torch.linspace(-1, 2, out.numel(), device=device, dtype=dtype).view_as(out)
        (out * weight).sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        # A key too many or too few makes tenths of difference; 16 bits make hundredths.
        assert (a - b.cpu()).norm() < 0.03 * a.norm()


def test_shared_prompts_in_float32_build_no_mask(monkeypatch):
    prompts = [torch.arange(3, 3 + n) for n in (9, 9, 9, 5, 5)]
    tokens = torch.cat([torch.cat([prompt, torch.arange(20, 22 + i)]) for i, prompt in enumerate(prompts)])
    lengths = torch.tensor([len(prompt) + 2 + i for i, prompt in enumerate(prompts)])
    mask = torch.cat([torch.arange(n) >= len(prompt) for n, prompt in zip(lengths.tolist(), prompts, strict=True)])
    model = PackedLM(build_model(TINY, torch.float32, False, attention.register()), "auto", share=True)
    expected = model(model.plan(tokens, lengths, mask), 0.7)
    monkeypatch.setattr(attention, "_hidden", lambda *_: pytest.fail("a mask"))
    got = model.cuda()(model.plan(tokens, lengths, mask), 0.7)
    (got[0].sum() + got[1].sum()).backward()
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)


@pytest.fixture
def qwen2():
    """Restores what Liger replaces in transformers for the whole process."""
    before = dict(vars(modeling_qwen2))
    yield
    for name, value in before.items():
        setattr(modeling_qwen2, name, value)


@pytest.mark.parametrize("how", ["compiled", "liger"])
@pytest.mark.usefixtures("qwen2")
def test_changed_layers_are_the_same_model(how):
    if how == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    tokens, lengths = torch.arange(3, 40).repeat(2), torch.tensor([37, 37])
    mask = torch.arange(74) % 37 > 0
    found = []
    for changed, dtype in ((False, torch.float64), (False, torch.float32), (True, torch.float32)):
        hf = build_model(TINY, torch.float32, False, attention.register()).to("cuda", dtype)
        if changed and how == "liger":
            use_liger(hf, "on", torch.device("cuda"), dtype)
            assert any("Liger" in type(m).__name__ or "liger" in m.forward.__module__ for m in hf.modules())
        elif changed:
            compile_layers(hf)
        model = PackedLM(hf, "padded")
        logp, entropy = model(model.plan(tokens, lengths, mask), 1.0)
        (logp * torch.linspace(-1, 1, 74, device="cuda") + entropy).sum().backward()
        found.append([logp.detach(), entropy.detach(), *(p.grad for p in model.parameters())])
    for exact, plain, other in zip(*found, strict=True):
        # They round at other places than transformers does, and may be as far from float64 within a factor.
        error, usual = ((x.double() - exact.double()).norm() for x in (other, plain))
        print(f"{tuple(exact.shape)}: {error / exact.norm():.1e}, transformers {usual / exact.norm():.1e}")
        assert error <= 10 * usual + 1e-6 * exact.norm()


def test_norms_and_steps_of_all_parameters_in_one_call_are_those_of_the_host():
    generator, found = torch.Generator().manual_seed(0), []
    shapes = (1,), (7,), (300, 5), (1000, 1000), (70_001,)
    weights, gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    for device in ("cpu", "cuda"):
        parameters = [torch.nn.Parameter(x.to(device, copy=True)) for x in weights]
        optimizer = make_optimizer(parameters, OptimizerConfig(lr=1e-2, weight_decay=0.1))
        for _ in range(3):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.to(device, copy=True)
            norms = torch._foreach_norm([p.grad for p in parameters], 2, dtype=torch.float64)
            torch._foreach_mul_([p.grad for p in parameters], 0.3)
            optimizer.step()
        exact = [gradient.double().norm() for gradient in gradients]
        torch.testing.assert_close([x.cpu() for x in norms], exact, rtol=1e-12, atol=0)
        found.append([p.detach().cpu() for p in parameters])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("extra", [[], ["--policy.offload", "host", "--model.dtype", "bfloat16"]])
def test_demo_runs_on_gpu(tmp_path, extra):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "spmdrl.train",
        "--run.dir",
        str(tmp_path),
        "--run.steps",
        "5",
        "--run.device",
        "cuda",
        "--rollout.engine",
        "hf",
        "--eval.every",
        "0",
        *extra,
    ]
    subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=250)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    limit = 0.1 if "bfloat16" in extra else 1e-3
    assert len(rows) == 5
    assert all(row["logp_diff/mean"] < limit and row["grad_norm"] > 0 for row in rows)
