"""Which device a rank takes, and what is said where it is not the one that was meant."""

import os
import stat
import subprocess
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from spmdrl.rollout.engine import StaleEngineError
from spmdrl.rollout.hf import in_integers
from spmdrl.rollout.needs import once
from spmdrl.rollout.vllm import VLLMEngine
from spmdrl.spmd.mesh import check_alike, pick_device, without_gpu

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """Have torch find some number of GPUs."""

    def set_to(count: int, built: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_to


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_each_rank_takes_its_own_gpu_and_bad_surplus_ranks_are_refused(gpus, kind):
    gpus(2)
    assert [pick_device(kind, i) for i in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError) as error:
        pick_device(kind, 2)
    told = str(error.value)
    assert told.startswith(f"--run.device {kind}: local rank 2 has no GPU of its own, torch finds 2 on this machine")
    assert "--nproc-per-node 2" in told and told.endswith("or give --run.device cpu")
    assert pick_device("cpu", 2) == CPU


def test_no_gpu_is_the_cpu_and_bad_with_a_build_for_gpus_it_says_so(gpus, monkeypatch):
    gpus(0, None)
    assert pick_device("auto", 0) == CPU and without_gpu() == ""
    gpus(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto", 0) == CPU
    assert "is built for GPUs and finds none: CUDA_VISIBLE_DEVICES is ''" in without_gpu()
    with pytest.raises(ValueError, match="local rank 0 has no GPU of its own.*finds none.*--run.device cpu"):
        pick_device("cuda", 0)


def test_bad_mixture_of_devices_ends_before_the_group_is_made(gpus):
    gpus(0)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    found: dict[int, str] = {}

    def rank(number: int, device: torch.device) -> None:
        try:
            check_alike(store, number, device)
            found[number] = "alike"
        except ValueError as error:
            found[number] = str(error)

    threads = [Thread(target=rank, args=pair) for pair in enumerate([CUDA, CUDA, CPU])]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert (found[0], found[1]) == ("alike", "alike")
    assert found[2].startswith(f"rank 2 on {os.uname().nodename} works on cpu and rank 0 on cuda: give every node")
    assert "is built for GPUs and finds none" in found[2]


@pytest.mark.parametrize(
    ("side", "count", "without", "processes", "warns"),
    [("cpu", 0, 2, 2, False), ("gpu", 8, 2, 8, False), ("gpu", 2, 1, 2, False), ("gpu", 0, 1, 1, True)],
)
def test_launchers_count_devices_as_torch_does(tmp_path, side, count, without, processes, warns):
    """With a stand-in for the installation's Python, whose torch finds `count` GPUs, and an nvidia-smi that sees 4."""
    for name in ("launch/devices.sh", "launch/node.sh"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / name).read_text())
        copy.chmod(0o755)
    scripts = {
        ".venv/bin/python": f"#!/bin/sh\necho {count}\n",
        ".venv/bin/torchrun": '#!/bin/sh\necho "torchrun $@ with $OMP_NUM_THREADS threads"\n',
        "bin/nproc": "#!/bin/sh\necho 20\n",
        "bin/nvidia-smi": "#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H200; done\n",
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / ".venv" / ".spmdrl").mkdir()
    (tmp_path / ".venv" / ".spmdrl" / "side").write_text(f"{side}\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    told = subprocess.run(
        ["bash", tmp_path / "launch/devices.sh", str(without)], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0 and told.stdout == f"{processes}\n"
    assert ("this installation is for GPUs and torch finds none" in told.stderr) is warns
    node = subprocess.run(
        ["bash", tmp_path / "launch/node.sh", "-m", "x"], env=environment, capture_output=True, text=True
    )
    assert node.returncode == 0 and f"--nproc-per-node {max(1, count)} " in node.stdout, node.stdout + node.stderr
    assert f" with {20 // max(1, count)} threads" in node.stdout


def test_running_sums_in_integers_are_those_of_floats_and_know_no_order():
    generator = torch.Generator().manual_seed(0)
    p_BV = torch.rand(3, 50_000, generator=generator, dtype=torch.float64).softmax(-1)
    sums = in_integers(p_BV)
    torch.testing.assert_close(sums, p_BV.cumsum(-1), rtol=0, atol=2e-11)
    assert (sums.diff(dim=-1) >= 0).all()
    halves = p_BV.chunk(2, -1)
    # Each half summed alone and joined: the same to the last bit, which sums of floats are not.
    joined = torch.cat([in_integers(halves[0]), in_integers(halves[0])[:, -1:] + in_integers(halves[1])], -1)
    assert torch.equal(sums, joined)
    assert in_integers(p_BV.float()).dtype == torch.float32


def test_parameters_that_alias_others_are_counted_once():
    """As vLLM's latent attention has them: parts of kv_b_proj, transposed, as parameters of their own."""
    weight = torch.arange(48.0).view(12, 4)
    up, value = weight.T.view(4, 2, 6).split([2, 4], -1)
    parts = [torch.nn.Parameter(x, requires_grad=False) for x in (value.transpose(0, 1), up.permute(1, 2, 0))]
    other = torch.arange(5.0)
    found = list(once([*parts, weight, other]))
    assert len(found) == 2 and found[0] is weight and found[1] is other
    rows = torch.zeros(8, 4)
    assert len(list(once([rows[:4], rows[4:]]))) == 2, "parts of one storage that do not overlap"


def test_vllms_sampler_on_a_gpu_is_not_refused_and_the_rest_of_a_deterministic_run_is():
    asked = []

    class Steps:
        def has_unfinished_requests(self) -> bool:
            return True

        def step(self) -> list:
            asked.append((torch.are_deterministic_algorithms_enabled(), _warns()))
            return []

    def _warns() -> bool:
        return torch.is_deterministic_algorithms_warn_only_enabled()

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.engine = Steps()
    try:
        torch.use_deterministic_algorithms(True)
        for engine.on_cpu in (False, True):
            assert engine.poll() == [] and not _warns() and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    engine.on_cpu = False
    engine.poll()
    assert asked == [(True, True), (True, False), (False, False)] and not torch.are_deterministic_algorithms_enabled()


# ── prefixes of old weights ──────────────────────────────────────────────────


class _Blocks:
    """Stands where vLLM does: declines to drop prefixes until it has made `steps` steps."""

    def __init__(self, steps: int):
        self.steps = steps

    def reset_prefix_cache(self) -> bool:
        return self.steps <= 0

    def step(self) -> None:
        self.steps -= 1


def prefix_engine(steps: int, running: int) -> VLLMEngine:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm = engine.engine = _Blocks(steps)  # type: ignore[assignment]
    engine.partial = dict.fromkeys(range(running))  # type: ignore[assignment]
    return engine


def test_stale_prefixes_that_vllm_keeps_are_an_error():
    prefix_engine(0, 0)._forget_prefixes()
    prefix_engine(1, 0)._forget_prefixes()  # a step was under way
    with pytest.raises(StaleEngineError, match="2 requests run and hold its KV cache"):
        prefix_engine(1, 2)._forget_prefixes()
    with pytest.raises(StaleEngineError, match="vLLM keeps prefixes"):
        prefix_engine(5, 0)._forget_prefixes()
