"""Law 7: what is on the device is written down. Parked bytes return exactly, memory really falls, the table agrees."""

import dataclasses
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch

from spmdrl.engines.hf.engine import HFEngine
from spmdrl.engines.needs import Needs
from spmdrl.health.causes import out_of_memory, requested_bytes
from spmdrl.policy.models import Models
from spmdrl.session.device_table import GIB, Memory, NoRoomError
from spmdrl.session.environ import keep_freed_memory
from spmdrl.session.meter import Meter
from spmdrl.spmd.storage import PIECE, Parked, scratch_folder, storage_bytes
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import (
    build_policy,
    bytes_on_disk,
    config,
    full_weights,
    packed,
    scored_batch,
    small_model,
    synthetic_batch,
    update_once,
)
from tests.ranks.demo import open_demo
from tests.ranks.harness import run_ranks

CPU = torch.device("cpu")
MIB = 1 << 20
BIG = 200 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory):
    """33M parameters: 128 MiB in float32, and 256 of moments."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("big")
    sizes = dict(vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
        )
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    model.save_pretrained(path)
    return str(path)


# ── one storage ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["disk", "host"])
def test_parked_bytes_return_exactly_and_aliases_stay(place):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, PIECE // 8 + 5, generator=generator)  # more than one piece, and no whole number of them
    row, odd = base[1], torch.randint(0, 256, (7,), generator=generator).to(torch.uint8)
    other = torch.randn(1000, generator=generator).bfloat16()
    want = [base.clone(), row.clone(), odd.clone(), other.clone()]
    parked = Parked([base, row, None, odd, other, torch.empty(0)], place, CPU)
    assert parked.bytes == base.nbytes + odd.nbytes + other.nbytes, "an alias is counted once"
    assert storage_bytes([base, row, odd, other], "cpu") == 0 and base.untyped_storage().nbytes() == 0
    assert Parked([base, row], place, CPU).bytes == 0, "what is parked already is passed over"
    parked.bring_back()
    assert all(torch.equal(a, b) for a, b in zip([base, row, odd, other], want, strict=True))
    row += 1
    assert torch.equal(base[1], want[1] + 1), "still one memory"
    parked.bring_back()
    assert torch.equal(base[1], want[1] + 1), "a second call changes nothing"


def test_parked_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    x = torch.ones(1 << 20)
    parked = Parked([x], "disk", CPU)
    assert scratch_folder() == str(tmp_path) and list(tmp_path.iterdir()) == []
    file = parked.tape.file
    assert os.fstat(file.fileno()).st_nlink == 0 and os.fstat(file.fileno()).st_size == x.nbytes
    parked.bring_back()
    assert parked.tape is None and x.sum() == 1 << 20
    tempfile.tempdir = None


def test_bad_tmpdir_is_named_and_no_other_folder_is_taken(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "none", file):
        monkeypatch.setenv("TMPDIR", str(folder))
        x = torch.ones(1000)
        with pytest.raises(ValueError, match=f"TMPDIR {folder} is not a writable folder"):
            Parked([x], "disk", CPU)
        assert x.sum() == 1000
    monkeypatch.delenv("TMPDIR")
    assert scratch_folder() == "/var/tmp" or not os.access("/var/tmp", os.W_OK)


def test_parked_disk_without_room_leaves_the_tensors(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    x = torch.ones(1000)
    with pytest.raises(OSError, match="has no room for the 0.00 GiB .* point TMPDIR at a larger disk"):
        Parked([x], "disk", CPU)
    assert x.sum() == 1000


def refused_once(world) -> list[list[float]]:
    """Brings blocks back with room for one of them, then with room for all; returns their values."""
    # Blocks of more than 32 MiB: glibc has none of them in store in a process where nothing ran before.
    tensors = [torch.full((12 * MIB,), float(i)) for i in range(3)]
    parked = Parked(tensors, "disk", CPU)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        size = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 80 * MIB, before[1]))  # room for one of 48 MiB
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            parked.bring_back()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert out_of_memory(caught.value) and requested_bytes(caught.value) == 48 * MIB
    parked.bring_back()
    return [x.unique().tolist() for x in tensors]


def test_parked_bring_back_goes_on_after_a_refusal():
    assert run_ranks(refused_once, 1) == [[[0.0], [1.0], [2.0]]]


def test_requested_bytes_are_read_off_the_message():
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
    assert out_of_memory(cuda) and requested_bytes(cuda) == int(2.5 * GIB)
    vllm = RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    assert out_of_memory(vllm) and requested_bytes(vllm) == 0
    assert not out_of_memory(RuntimeError("shapes do not fit")) and not out_of_memory(OSError(2, "no such file"))


def small_blocks(world):
    """Returns [bytes, rss before, off, on] of 360 blocks that glibc keeps once freed, with a CPU run's settings."""
    keep_freed_memory()
    blocks = [torch.ones(256, 1024) for _ in range(120)] + [torch.ones(100_000 + 64 * i) for i in range(240)]
    meter, seen = Meter(CPU), []
    seen.append(meter.lap()[0])
    parked = Parked(blocks, "disk", CPU)
    size = parked.bytes
    seen.append(meter.lap()[0])
    parked.bring_back()
    for block in blocks:
        block.fill_(2.0)
    return [size, *seen, meter.lap()[0]]


def test_memory_of_small_blocks_goes_back_to_the_system():
    [(size, before, off, on)] = run_ranks(small_blocks, 1)
    assert size > BIG and before - off > 0.95 * size and abs(on - before) < 0.05 * size


# ── a policy ─────────────────────────────────────────────────────────────────


def steps(world, folder, place, tied):
    """Returns weights, moments and forward after three steps, with the trainer parked between them, or not."""
    cfg = config(model={"path": folder}, policy={"offload": place})
    policy, seen = build_policy(cfg, world), []
    everyone = synthetic_batch()
    for i in range(3):
        if place != "none":
            policy.logprobs(packed(cfg, world, everyone), 1.0)  # leaves the root gathered
            for p in policy.shards:
                p.grad = torch.ones_like(p)
            held = policy.bytes_by_owner()
            policy.offload(place, parameters=False)
            seen.append({k: v for k, v in policy.bytes_by_owner().items() if v} == {"parameters": held["parameters"]})
            before = full_weights(policy)  # a push reads these
            policy.offload(place)
            policy.offload(place)
            seen.append(sum(policy.bytes_by_owner().values()) == 0)
            # Gradients are let go.
            seen.append(held["gradients"] > 0 and bytes_on_disk(policy) == held["parameters"] + held["optimizer"])
            seen.append(i == 0 or held["optimizer"] > 1.5 * held["parameters"])
            try:
                policy.logprobs(packed(cfg, world, everyone), 1.0)
                seen.append(False)
            except AssertionError as error:
                seen.append("offloaded" in str(error))
            policy.onload()
            seen.append(policy.bytes_by_owner() == held)
            policy.zero_grad()
            after = full_weights(policy)
            seen.append(all(torch.equal(before[n], after[n]) for n in before))
        update_once(cfg, world, policy, None, everyone)
    moments = [
        x._local_tensor.clone() if hasattr(x, "_local_tensor") else x.clone()
        for state in policy.optimizer.state.values()
        for x in state.values()
    ]
    logp, _ = policy.logprobs(packed(cfg, world, everyone), 1.0)
    return full_weights(policy), moments, logp, seen


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_offload_between_steps_changes_no_bit(tmp_path_factory, n, tied):
    folder = small_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=tied)
    plain = run_ranks(steps, n, folder, "none", tied)
    parked = run_ranks(steps, n, folder, "disk", tied)
    for (weights, moments, logp, _), (weights_, moments_, logp_, seen) in zip(plain, parked, strict=True):
        assert all(seen) and len(seen) == 21
        assert ("lm_head.weight" in weights) is not tied
        assert all(torch.equal(weights[name], weights_[name]) for name in weights)
        assert len(moments) == len(moments_) > 20
        assert all(torch.equal(a, b) for a, b in zip(moments, moments_, strict=True)) and torch.equal(logp, logp_)


# ── the phases ───────────────────────────────────────────────────────────────


class Recorder:
    """Stands for an engine with a KV cache as large as asked for; notes what else is on the device."""

    version, capacity, parked, cache = None, 1, None, None

    def __init__(self, weights: torch.Tensor, kv_bytes: int):
        self.weights, self.kv_bytes, self.log, self.others = weights, kv_bytes, [], dict
        self.cache = torch.ones(kv_bytes, dtype=torch.uint8)

    def note(self, event: str) -> None:
        self.log.append((event, self.others()))

    def needs(self, entries):
        return Needs()

    def load(self, buckets, version):
        for _ in buckets:
            pass
        self.version = version
        self.note("push")

    def sleep(self, level):
        self.note("sleep")
        self.version = None if level == 2 else self.version
        self.parked = Parked([self.cache, *([self.weights] if level == 2 else [])], "gone", CPU)

    def wake(self, what):
        self.note(what)
        if self.parked and what == "kv_cache":
            self.parked.bring_back()
            self.parked = None
            self.cache.fill_(1)

    def bytes_by_owner(self):
        return {"engine weights": storage_bytes([self.weights], "cpu"), "KV cache": storage_bytes([self.cache], "cpu")}

    def held_words(self):
        return None


def phases(world, folder, place):
    """Makes two steps of a policy of 128 MiB with its reference; returns the bytes at each of the engine's moments."""
    keep_freed_memory()
    cfg = config(
        model={"path": folder},
        policy={"offload": place},
        reference={"offload": place},
        rollout={"sleep_level": 2},
        optimizer={"lr": 1e-4},
    )
    policy, reference = build_policy(cfg, world), build_policy(cfg, world, trainable=False)
    engine = Recorder(torch.ones(1000), 256 * MIB)
    memory = Memory(cfg, Models(policy, reference), engine, Timer(), world)

    def held(owner):
        return sum(row.bytes for row in memory.table() if row.owner.startswith(owner) and row.place == "device")

    engine.others = lambda: {name: held(name) for name in ("policy parameters", "policy opt", "reference", "KV")}
    with memory.rollout_phase():
        pass
    with memory.training_phase():
        for p in policy.shards:
            p.grad = torch.ones_like(p)
        policy.optimizer.step()
        policy.optimizer.zero_grad()
    policy.version += 1
    engine.log.clear()
    with memory.rollout_phase():
        pass
    with memory.training_phase():
        pass
    rows = {name: (border.on_device, border.measured, border.peak) for name, border in memory.phases.items()}
    places = {name: {r.owner: (r.place, r.bytes) for r in border.table} for name, border in memory.phases.items()}
    return engine.log, rows, places, memory.metrics()


@pytest.fixture(scope="module")
def measured(big_folder):
    return {place: run_ranks(phases, 1, big_folder, place)[0] for place in ("disk", "none")}


def test_phases_go_in_the_order_that_bounds_the_peak(measured):
    log, *_ = measured["disk"]
    assert [event for event, _ in log] == ["weights", "push", "kv_cache", "sleep"]
    held = dict(log)
    parameters = held["weights"]["policy parameters"]
    assert parameters > BIG / 2
    # Owners that the push does not read leave before the engine's weights come, the parameters before the KV cache.
    for event in ("weights", "push"):
        assert held[event] == {"policy parameters": parameters, "policy opt": 0, "reference": 0, "KV": 0}, event
    assert held["kv_cache"] == {"policy parameters": 0, "policy opt": 0, "reference": 0, "KV": 0}
    assert held["sleep"]["KV"] == 256 * MIB and held["sleep"]["policy parameters"] == 0, "asleep before the trainer"
    # Without offload all of that is there together.
    assert dict(measured["none"][0])["kv_cache"]["policy opt"] > 1.9 * parameters


def test_table_agrees_with_resident_memory(measured):
    _, rows, places, metrics = measured["disk"]
    names = ["idle trainer off", "pushed", "trainer off", "rollout", "engine asleep", "training"]
    for a, b in zip(names, names[1:], strict=False):
        told, seen = rows[b][0] - rows[a][0], rows[b][1] - rows[a][1]
        limit = max(0.05 * abs(told), 12 * MIB)
        assert abs(told - seen) < limit, (a, b, told / MIB, seen / MIB)
    assert rows["rollout"][0] > BIG and rows["training"][0] > 2.5 * BIG
    assert {rows[name][0] for name in ("trainer off", "engine asleep")} == {0}
    # Nothing on the way from the push to the KV cache takes more than its two ends.
    assert rows["rollout"][2] - rows["rollout"][1] < 0.05 * rows["rollout"][0]
    at = places["rollout"]
    assert at["policy optimizer"] == ("disk", at["policy optimizer"][1]) and at["policy optimizer"][1] > BIG
    assert at["KV cache"] == ("device", 256 * MIB) and places["engine asleep"]["KV cache"] == ("gone", 256 * MIB)
    assert metrics["memory/policy_optimizer_gib"] == at["policy optimizer"][1] / GIB
    # The most of any border, whenever it was.
    assert metrics["memory/KV_cache_gib"] == 0.25 and metrics["memory/peak_gib"] * GIB >= rows["training"][1]


# ── no room ──────────────────────────────────────────────────────────────────


def limited(room: int, action) -> str:
    """Returns the error that `action` raises when the address space may grow by `room` bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, before[1]))
    try:
        action()
    except NoRoomError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return "there was room"


def starved(world, folder):
    """Returns messages of a wake and of a trainer's return without memory; both work once there is some."""
    cfg = config(model={"path": folder}, policy={"offload": "none"}, rollout={"sleep_level": 2})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    memory = Memory(cfg, Models(policy), engine, Timer(), world)
    with memory.rollout_phase():
        pass
    with memory.training_phase():
        pass
    out = [limited(60 * MIB, lambda: memory.rollout_phase().__enter__())]
    with memory.rollout_phase():
        out.append(engine.version == policy.version)
    memory.cfg = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, offload="disk"))
    with memory.rollout_phase():
        pass
    memory.cfg = dataclasses.replace(memory.cfg, rollout=dataclasses.replace(cfg.rollout, sleep_level=0))
    out.append(limited(60 * MIB, lambda: memory.training_phase().__enter__()))
    with memory.training_phase():
        pass
    out.append(out_of_room_in_training(memory))
    return [*out, full_weights(policy)["model.norm.weight"].unique().tolist()]


def out_of_room_in_training(memory) -> str:
    def take():
        with memory.training_phase():
            torch.ones(1 << 28)

    return limited(100 * MIB, take)


def test_wake_without_memory_is_answered_by_the_table_and_three_flags(big_folder):
    [(wake, works, back, training, norm)] = run_ranks(starved, 1, big_folder)
    assert wake.startswith("no room for the engine's weights (0.13 GiB needed)") and works and norm == [0.25], wake
    assert "gone: engine weights 0." in wake and "policy parameters 0.13 GiB" in wake, wake
    assert " GiB in use. Flags that would help most: --policy.offload disk; a larger --rollout.tp" in wake
    assert back.startswith("no room for the policy (0.") and "disk: policy parameters 0." in back, back
    assert "device: engine weights 0." in back and "--rollout.sleep-level 1" in back, back
    assert training.startswith("no room for training (1.00 GiB needed)"), training
    for message in (wake, back, training):
        assert message.split("help most: ")[1].count("--") == 3 and "\n" not in message, message


def split(world):
    """Makes the same calls with the same names on ranks without an engine or without a policy."""
    cfg = config()
    memory = Memory(cfg, Models(None), None, Timer(), world)
    memory.owners = ["KV cache"]
    return memory.metrics().keys() == {"memory/KV_cache_gib", "memory/peak_gib"}, memory.table()


def test_a_rank_with_neither_side_has_the_names_of_all():
    assert run_ranks(split, 1) == [(True, [])]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_levels_of_the_hf_engine(folder, level):
    [(weights, version, words)] = run_ranks(levels, 1, folder, level)
    assert (weights == 0) is (level == 2), "a CPU is the host: level 1 leaves the weights where they are"
    assert version == (None if level == 2 else 0) and words


def levels(world, folder, level):
    cfg = config(model={"path": folder}, rollout={"sleep_level": level})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    memory = Memory(cfg, Models(policy), engine, Timer(), world)
    with memory.rollout_phase():
        words = engine.held_words()
    with memory.training_phase():
        asleep, version = engine.bytes_by_owner()["engine weights"], engine.version
    with memory.rollout_phase():
        return asleep, version, engine.held_words() == words


def test_scored_batch_is_as_before_under_offload(folder):
    """The frozen model has the same logp with and without offload."""
    one, other = run_ranks(frozen, 1, folder)[0]
    assert torch.equal(one, other) and one.abs().sum() > 0


def frozen(world, folder):
    cfg = config(model={"path": folder}, algo={"kl_coef": 0.1}, reference={"offload": "disk"})
    policy, reference = build_policy(cfg, world), build_policy(cfg, world, trainable=False)
    memory = Memory(cfg, Models(policy, reference), HFEngine(cfg, world, {2}), Timer(), world)
    out = []
    for _ in range(2):
        _, batch, _ = scored_batch(cfg, world, Models(policy, reference), synthetic_batch())
        out.append(batch.token["ref_logp"])
        with memory.rollout_phase():
            assert reference.bytes_by_owner()["parameters"] == 0 and policy.bytes_by_owner()["parameters"] > 0
        with memory.training_phase():
            pass
    return out


# ── the start ────────────────────────────────────────────────────────────────


def at_start(world, folder, place):
    """Returns the bytes of models on the device while the engine is built and after it, and the state of the engine."""
    from spmdrl.rl import build
    from spmdrl.session import engine as starts

    models, engines, seen = [], [], []

    def bytes_of():
        return sum(sum(model.bytes_by_owner().values()) for _, model in models[0].named())

    def build_models(*args):
        models.append(made(*args))
        seen.append(bytes_of())
        return models[0]

    def build_engine(*args):
        seen.append(bytes_of())
        engines.append(built(*args))
        sleep = engines[0].sleep
        engines[0].sleep = lambda level: (seen.append(f"sleep {level} at {bytes_of()}"), sleep(level))
        return engines[0]

    made, built = build.build_models, starts.build_engine
    build.build_models, starts.build_engine = build_models, build_engine
    run = open_demo(
        world,
        folder,
        {"policy": {"offload": place}, "reference": {"offload": place}, "rollout": {"sleep_level": 2}},
    )
    seen.append(bytes_of())
    first = len(seen)
    train(run)
    return seen[:first]


def test_engine_is_built_while_models_are_off_the_device_and_sleeps_before_they_return(tmp_path):
    for n in (1, 2):
        for before, during, asleep, after in run_ranks(at_start, n, str(tmp_path / f"disk{n}"), "disk"):
            assert before == after > 0 and during == 0 and asleep == "sleep 2 at 0"
    [(before, during, after)] = run_ranks(at_start, 1, str(tmp_path / "none"), "none")
    assert before == during == after > 0
