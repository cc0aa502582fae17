"""Every config's phases on a GPU that is a number of bytes: from the engine's start on, nobody takes more than it has.

The order is the run's own (`sleeping_engine`, `Memory`), the rule by which vLLM starts is its own `request_memory`. The
sizes are sums over the real models. Fakes stand for models, engine and device. Fragments, activations of the trainer
and graphs are not in it, but a fifth of the device is left for them. The host's memory is summed for a node of 8 GPUs.
"""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.load import from_command_line
from spmdrl.config.schema import Config
from spmdrl.engines.engine import kv_bytes_per_token
from spmdrl.policy.megatron.host_adamw import HostAdamW
from spmdrl.policy.models import Models
from spmdrl.session import device_table as phases
from spmdrl.session import engine as starts
from spmdrl.session.session import Session
from spmdrl.tracking.metrics import Timer
from tests.unit.test_configs_megatron import MODELS, RUNS, Layout, held, layout_of

pytest.importorskip("vllm", reason="vLLM is not installed")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPU = torch.device("cuda", 0)
OUTSIDE = 2e9
"""CUDA's context and NCCL's buffers, which take memory from the start: an assumption."""
PROFILED = 3e9
"""Activations that vLLM finds by its dummy run and keeps room for: an assumption."""
QWEN, SMOLLM2 = 0.494e9, 0.135e9
SMALL = {
    "gsm8k_grpo.yaml": (QWEN, 1),
    "gsm8k_grpo_lora.yaml": (QWEN, 1),
    "gsm8k_grpo_split.yaml": (QWEN, 4),
    "smollm2_addition.yaml": (SMOLLM2, 1),
    "smollm2_addition_2digit.yaml": (SMOLLM2, 1),
}
"""Configs under FSDP -> parameters, and the fewest ranks that train, on GPUs of 40 GB."""
SPLIT = "gsm8k_grpo_split.yaml"
NODE = 1.5e12
"""Host memory of a node of 8 GPUs, as deepseek_671b.yaml quotes it from verl."""


class Device:
    """Bytes by owner."""

    def __init__(self, total: float):
        self.total, self.held, self.peak = total, {"outside": OUTSIDE}, 0.0

    @property
    def free(self) -> float:
        return self.total - sum(self.held.values())

    def take(self, owner: str, size: float) -> None:
        self.held[owner] = self.held.get(owner, 0) + size
        self.peak = max(self.peak, sum(self.held.values()))
        if self.free < 0:
            raise torch.OutOfMemoryError(f"Tried to allocate {size / 2**30:.2f} GiB for {owner}: {self.held}")

    def drop(self, owner: str) -> None:
        self.held.pop(owner, None)


class Model:
    """A policy that holds the bytes of the config; AdamW takes none where the host holds it."""

    version = 0

    def __init__(self, name: str, sizes: dict[str, float], device: Device):
        self.name, self.sizes, self.device = name, sizes, device
        self.onload()

    def bytes_by_owner(self) -> dict[str, int]:
        return {kind: int(self.device.held.get(f"{self.name} {kind}", 0)) for kind in self.sizes}

    def offload(self, place: str, parameters: bool = True) -> None:
        for kind in self.sizes:
            if parameters or kind != "parameters":
                self.device.drop(f"{self.name} {kind}")

    def onload(self) -> None:
        for kind, size in self.sizes.items():
            if f"{self.name} {kind}" not in self.device.held:
                self.device.take(f"{self.name} {kind}", size)


class Engine:
    """vLLM as its GPU worker starts, sleeps and wakes (`vllm/v1/worker/gpu_worker.py`, vLLM 0.32)."""

    capacity, version = 1, None

    def __init__(self, cfg: Config, device: Device, weights: float):
        from vllm.v1.worker.utils import request_memory

        self.device, self.weights = device, weights
        snapshot = SimpleNamespace(total_memory=device.total, free_memory=device.free, device_=GPU)
        share = SimpleNamespace(gpu_memory_utilization=cfg.rollout.gpu_memory_utilization)
        granted = request_memory(snapshot, share)  # type: ignore[arg-type]
        device.take("engine weights", weights)
        self.cache = granted - weights - PROFILED
        device.take("KV cache", self.cache)

    def bytes_by_owner(self) -> dict[str, int]:
        return {name: int(self.device.held.get(name, 0)) for name in ("engine weights", "KV cache")}

    def sleep(self, level: int) -> None:
        self.device.drop("KV cache")
        self.device.drop("engine weights")
        self.version = None if level == 2 else self.version

    def wake(self, what: str) -> None:
        owner, size = ("KV cache", self.cache) if what == "kv_cache" else ("engine weights", self.weights)
        if owner not in self.device.held:
            self.device.take(owner, size)

    def push(self, version: int) -> SimpleNamespace:
        assert "engine weights" in self.device.held, "weights are pushed into memory that is not there"
        self.device.take("bucket", 2 * (512 << 20))
        self.device.drop("bucket")
        self.version = version
        return SimpleNamespace(bytes=0, deep=True)


def sizes(name: str) -> tuple[Config, float, list[dict[str, dict[str, float]]], float]:
    """Config, bytes of a GPU, bytes that the models of each kind of rank hold by kind, bytes of an engine's weights.

    Kinds of ranks are the stages of a pipeline, or one; a rank that only samples has no models.
    """
    path = CONFIGS / name
    cfg = from_command_line(["--config", str(path)]).config
    if name in SMALL:
        # FSDP holds float32 weights and gradients and AdamW's two moments; the reference 16 bits.
        whole, shards = SMALL[name]
        mine = whole / shards
        trained = mine * (0.03 if cfg.lora.rank else 1)
        policy = {"parameters": 4 * mine, "gradients": 4 * trained, "optimizer": 8 * trained}
        frozen = {"reference": {"parameters": 2 * mine}} if cfg.algo.kl_coef and not cfg.lora.rank else {}
        kinds: list[dict[str, dict[str, float]]] = [{"policy": policy} | frozen]
        return cfg, 40e9, kinds + [{}] * (cfg.parallel.placement == "split"), 2 * whole
    (size,) = map(float, re.findall(r"GPUs of (\d+) GB", path.read_text()))
    model, gpus = RUNS[name]
    layout, ranks = layout_of(cfg), []
    data = gpus // (layout.tp * layout.cp * layout.pp), gpus // (layout.etp * layout.ep * layout.pp)
    for shared, experts in held(MODELS[model], layout):
        own = 0.0 if cfg.policy.host_optimizer else 12 * (shared / data[0] + experts / data[1])
        mine = shared + experts
        ranks.append({"policy": {"parameters": 2 * mine, "gradients": 4 * mine, "optimizer": own}})
    return cfg, size * 1e9, ranks, 2 * sum(held(MODELS[model], Layout())[0]) / cfg.rollout.tp


class Replay:
    """A run of one rank from the start of its engine, with fakes in place of everything on the device."""

    def __init__(self, monkeypatch, cfg: Config, device: Device, models: dict, weights: float, beside: bool = False):
        """beside: True if the engine is built while models are resident."""
        self.device = device
        made = {name: Model(name, kinds, device) for name, kinds in models.items()}
        self.models = Models(made.get("policy"))  # type: ignore[arg-type]
        if "reference" in made:
            self.models.reference = made["reference"]  # type: ignore[assignment]
        world = SimpleNamespace(device=GPU, host_group=None, roles=SimpleNamespace(trainers=(0,)))
        monkeypatch.setattr(starts, "build_engine", lambda cfg, world, stop: Engine(cfg, device, weights))
        if beside:
            monkeypatch.setattr(starts, "room_for_engine", lambda models, cfg: nullcontext())
        session = Session(cfg, world, Timer())  # type: ignore[arg-type]
        samples = cfg.parallel.placement == "colocated" or not made
        self.engine = starts.sleeping_engine(session, self.models, set()) if samples else None
        monkeypatch.setattr(phases, "gather_names", lambda names, group: sorted(set(names)))
        monkeypatch.setattr(phases, "Meter", lambda device: SimpleNamespace(lap=lambda: (0, 0)))
        monkeypatch.setattr(phases, "give_back", lambda device, size: None)
        # This stands for the other side's part of a version, so that every step has a push.
        monkeypatch.setattr(phases, "all_reduce", lambda held, how, group: torch.ones_like(held))
        monkeypatch.setattr(phases, "Transfer", lambda *args: SimpleNamespace(push=self._push))
        self.memory = phases.Memory(cfg, self.models, self.engine, Timer(), world)  # type: ignore[arg-type]

    def _push(self, version: int) -> SimpleNamespace:
        if self.engine:
            return self.engine.push(version)
        self.device.take("bucket", 2 * (512 << 20))
        self.device.drop("bucket")
        return SimpleNamespace(bytes=0, deep=True)

    def step(self) -> tuple[dict, dict]:
        """Runs one step; returns the bytes on the device while it samples, and while it trains."""
        with self.memory.rollout_phase():
            sampling = dict(self.device.held)
        with self.memory.training_phase():
            training = dict(self.device.held)
        if self.models.policy:
            self.models.policy.version += 1  # type: ignore[misc]
        return sampling, training


def test_no_config_is_left_out():
    assert {*RUNS, *SMALL} == {path.name for path in CONFIGS.glob("*.yaml")}
    split = {name for name in (*RUNS, *SMALL) if sizes(name)[0].parallel.placement == "split"}
    assert split == {SPLIT}


@pytest.mark.parametrize("name", [name for name in (*RUNS, *SMALL) if name != SPLIT])
def test_every_phase_of_a_config_fits_its_gpu(monkeypatch, name):
    cfg, size, ranks, weights = sizes(name)
    for models in ranks:
        device = Device(size)
        run = Replay(monkeypatch, cfg, device, models, weights)
        # The engine gave its memory back before the models returned.
        assert "engine weights" not in device.held and "policy parameters" in device.held
        for _ in range(2):
            sampling, training = run.step()
            assert {"engine weights", "KV cache"} <= set(sampling)
            assert ("policy parameters" in sampling) == (cfg.policy.offload == "none")
            assert {"KV cache", "engine weights"}.isdisjoint(training)
            assert sum(training.values()) <= 0.8 * size
        assert device.peak <= size
        print(f"{name}: peak {device.peak / 1e9:.1f} of {size / 1e9:.0f} GB, KV cache {run.engine.cache / 1e9:.1f} GB")


def test_ranks_that_only_train_and_ranks_that_only_sample_fit_theirs(monkeypatch):
    cfg, size, (trains, samples), weights = sizes(SPLIT)
    assert 8 - cfg.parallel.rollout_ranks == SMALL[SPLIT][1]
    for models, own in (
        (trains, {"policy parameters", "policy gradients", "policy optimizer", "reference parameters"}),
        (samples, {"engine weights", "KV cache"}),
    ):
        device = Device(size)
        run = Replay(monkeypatch, cfg, device, models, weights)
        for _ in range(2):
            # Nothing moves: both phases hold the same.
            assert [set(held) for held in run.step()] == [own | {"outside"}] * 2
        assert device.peak <= (0.8 if models else 1) * size
        print(f"{SPLIT}: peak {device.peak / 1e9:.1f} of {size / 1e9:.0f} GB, {'trains' if models else 'samples'}")


# ── the host ─────────────────────────────────────────────────────────────────


def bytes_on_host() -> float:
    """Bytes of one parameter in the real AdamW on the host: float32 weight and two moments."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    adamw = HostAdamW([{"params": [parameter]}], lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    adamw.fill()
    return sum(x.nbytes for x in adamw.state[parameter].values() if x.numel() > 1) / 1000


@pytest.mark.parametrize("name", RUNS)
def test_host_memory_of_a_node_is_what_the_comment_says_and_fits_it(name):
    """While engines sample, the host holds AdamW and the weights of 8 ranks; gradients on the device are freed."""
    cfg, _, ranks, _ = sizes(name)
    model, gpus = RUNS[name]
    layout = layout_of(cfg)
    data = gpus // (layout.tp * layout.cp * layout.pp), gpus // (layout.etp * layout.ep * layout.pp)
    found = []
    for (shared, experts), rank in zip(held(MODELS[model], layout), ranks, strict=True):
        own = shared / data[0] + experts / data[1]
        parked = [size for kind, size in rank["policy"].items() if kind != "gradients"]
        found.append(cfg.policy.host_optimizer * bytes_on_host() * own + (cfg.policy.offload == "host") * sum(parked))
    text = " ".join((CONFIGS / name).read_text().replace("\n#", " ").split())
    (told,) = map(float, re.findall(r"([\d.]+) TB a node in all", text))
    assert told == pytest.approx(8 * max(found) / 1e12, abs=0.05)
    # A tenth is left for the workers of rewards, buckets, checkpoints and the system.
    assert 8 * max(found) < 0.9 * NODE
    deepseek = (CONFIGS / "deepseek_671b.yaml").read_text()
    assert f"{NODE / 1e12:g} TB of a node" in deepseek


# ── the engine ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", RUNS)
def test_kv_cache_that_is_left_holds_sequences_of_the_longest_length(monkeypatch, name):
    cfg, size, ranks, weights = sizes(name)
    engine = Replay(monkeypatch, cfg, Device(size), ranks[0], weights).engine
    token = kv_bytes_per_token(MODELS[RUNS[name][0]], cfg.model.dtype, cfg.rollout.tp)
    assert engine.cache >= 16 * (cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens) * token


def test_engine_that_is_built_beside_the_trainer_is_refused_by_vllm(monkeypatch):
    cfg, size, ranks, weights = sizes("qwen3_30b_a3b.yaml")
    with pytest.raises(ValueError, match="is less than desired GPU memory utilization"):
        Replay(monkeypatch, cfg, Device(size), ranks[0], weights, beside=True)


def test_replay_sees_an_order_that_does_not_fit(monkeypatch):
    """The policy is on the device while the KV cache comes back."""
    cfg, size, ranks, weights = sizes("qwen3_30b_a3b.yaml")
    run = Replay(monkeypatch, cfg, Device(size), ranks[0], weights)
    monkeypatch.setattr(phases.Memory, "_offload", lambda self, name, model, parameters: None)
    with pytest.raises(phases.NoRoomError, match="no room for"):
        run.step()
        run.step()
