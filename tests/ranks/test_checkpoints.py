"""Checkpoints by several ranks: damage of every kind is found by all, any layout reads any other's, and what is written
beside training is what was there when it began.
"""

import json
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.checkpoint import files, store, treefile
from spmdrl.checkpoint.background import Saver
from spmdrl.checkpoint.files import rank_files
from spmdrl.checkpoint.manifest import contents, problems, write_manifest
from spmdrl.checkpoint.published import Keep, steps_saved
from spmdrl.checkpoint.store import find_resume, load
from spmdrl.hub.folder import TINY
from spmdrl.policy import model_files as fixed
from spmdrl.policy.models import Models
from spmdrl.policy.safe_pickle import vet
from tests.ranks.cases import build_policy, config, full_weights, synthetic_batch, update_once
from tests.ranks.harness import run_ranks
from tests.saving import save


def tiny(world, dtype="float32", **checkpoint_settings):
    return config(
        model={"dtype": dtype},
        optimizer={"lr": 1e-3, "clip_grad_norm": 1.0},
        parallel={"dp_replicate": world.mesh["dp_replicate"].size()},
        checkpoint=checkpoint_settings,
    )


def step(cfg, world, policy) -> dict:
    return update_once(cfg, world, policy, None, synthetic_batch())


def state_of(policy) -> dict:
    return {"version": policy.version, "updates_done": policy.updates_done}


def take_up(world, root, dtype="float32"):
    """Takes up a policy as the newest checkpoint has it."""
    cfg = tiny(world, dtype)
    policy = build_policy(cfg, world)
    state = load(find_resume(Path(root), world), Models(policy))
    policy.version, policy.updates_done = state["version"], state["updates_done"]
    policy.updates_due = policy.updates_done
    return cfg, policy, state


def three_steps(world, root):
    """Saves checkpoints of steps 1 to 3, and returns the result of the fourth step."""
    cfg = tiny(world)
    policy = build_policy(cfg, world)
    for done in (1, 2, 3):
        step(cfg, world, policy)
        mine = {"rank": world.rank, "of": torch.arange(world.rank + 2)}
        keep = Keep(3)
        save(Path(root), done, Models(policy), state_of(policy), mine, world, keep, cfg)
    return step(cfg, world, policy), full_weights(policy)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(checkpoints of two ranks, result of their next step)."""
    root = tmp_path_factory.mktemp("three")
    return root, run_ranks(three_steps, 2, str(root))[0]


# ── the contract ─────────────────────────────────────────────────────────────


def test_resume_manifest_names_layout_settings_and_ranks(saved):
    root, _ = saved
    manifest = json.loads((root / "step_3" / "MANIFEST.json").read_text())
    assert manifest["world_size"] == 2 and manifest["step"] == 3
    assert manifest["layout"]["backend"] == "fsdp" and manifest["layout"]["placement"] == "colocated"
    assert manifest["layout"]["axes"]["dp_shard"] == 2 and manifest["layout"]["axes"]["dp_replicate"] == 1
    assert len(manifest["config_hash"]) == 32
    trees = [treefile.read(path) for path in rank_files(root / "step_3")]
    assert [tree["rank"] for tree in trees] == [0, 1] and [len(tree["of"]) for tree in trees] == [2, 3]
    assert (root / "step_3" / "state" / "config.yaml").is_file()


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    place = rng.randrange(len(raw) * 8)
    raw[place // 8] ^= 1 << place % 8
    path.write_bytes(raw)


def cut(path: Path, rng: random.Random) -> None:
    with open(path, "r+b") as f:
        f.truncate(rng.randrange(path.stat().st_size))


def swap(one: Path, other: Path) -> None:
    away = one.with_name("away")
    one.rename(away)
    other.rename(one)
    away.rename(other)


def corrupt(root: Path, kind: str, rng: random.Random) -> tuple[str, str]:
    """Damages `step_3`, and by a swap another one; returns the damage, and the newest whole checkpoint."""
    newest = root / "step_3"
    every = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
    path = rng.choice(every)
    name = path.relative_to(newest)
    if kind == "flip":
        flip(path, rng)
    elif kind == "cut":
        cut(path, rng)
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        # With the same file of the checkpoint before, or with another of its own.
        pairs = [p for p in every if p.read_bytes() != (root / "step_2" / p.relative_to(newest)).read_bytes()]
        path = rng.choice(pairs)
        name = path.relative_to(newest)
        if rng.random() < 0.5:
            swap(path, root / "step_2" / name)
            return f"swapped {name} with step_2", "step_1"
        swap(path, rng.choice([p for p in pairs if p != path]))
    else:
        manifest = json.loads((newest / "MANIFEST.json").read_text())
        kind = rng.choice(("number", "ranks", "folder"))
        if kind == "number":
            (newest / "MANIFEST.json").write_text(
                json.dumps(manifest | {"world_size": rng.choice((1, 3, 8))}, indent=1)
            )
        elif kind == "ranks":
            shutil.copy(
                newest / "state" / "ranks" / files.rank_name(0), newest / "state" / "ranks" / files.rank_name(2)
            )
        else:
            shutil.rmtree(newest)
            shutil.copytree(root / "step_1", newest)
        return f"wrong world: {kind}", "step_2"
    return f"{kind} {name}", "step_2"


KINDS = ("flip", "cut", "missing", "swapped", "world")
CORRUPTIONS = 30


def resume_all(world, roots):
    """Returns the checkpoint from which each of many folders would be resumed, and the result of loading it."""
    return [find_resume(Path(root), world).name for root in roots]


def test_resume_30_random_corruptions_30_detected_0_loaded(saved, tmp_path):
    root, _ = saved
    roots, told, whole_ones = [], [], []
    for seed in range(CORRUPTIONS):
        copy = tmp_path / str(seed)
        shutil.copytree(root, copy, symlinks=True)
        assert problems(copy / "step_3") == []
        done, left = corrupt(copy, KINDS[seed % len(KINDS)], random.Random(seed))
        roots.append(str(copy))
        told.append(done)
        whole_ones.append(left)
    detected = [bool(problems(Path(r) / "step_3")) for r in roots]
    assert detected == [True] * CORRUPTIONS, [t for t, d in zip(told, detected, strict=True) if not d]
    for found in run_ranks(resume_all, 2, roots):
        assert found == whole_ones, list(zip(told, found, whole_ones, strict=True))
    assert len(set(told)) > 20 and set(whole_ones) == {"step_1", "step_2"}


# ── layouts ──────────────────────────────────────────────────────────────────


def carry(world, source, root):
    """Loads, and saves again from this layout."""
    cfg, policy, state = take_up(world, source)
    save(Path(root), 3, Models(policy), state, None, world, config=cfg)


def go_on(world, root, dtype="float32"):
    cfg, policy, _ = take_up(world, root, dtype)
    return step(cfg, world, policy), full_weights(policy)


def test_resume_through_every_layout_loses_no_bit(saved, tmp_path):
    """FSDP 2 -> HSDP 2x1 -> HSDP 2x2 -> one rank -> FSDP 4 -> FSDP 2: the next step equals that of the first two."""
    root, (metrics, weights) = saved
    source = root
    for index, (n, replicate) in enumerate([(2, 2), (4, 2), (1, 1), (4, 1)]):
        target = tmp_path / str(index)
        run_ranks(carry, n, str(source), str(target), dp_replicate=replicate)
        model = [folder / "step_3" / "model" / "model.safetensors" for folder in (root, target)]
        assert model[0].read_bytes() == model[1].read_bytes()
        axes = json.loads((target / "step_3" / "MANIFEST.json").read_text())["layout"]["axes"]
        assert axes["dp_replicate"] == replicate and axes["dp_shard"] == n // replicate
        source = target
    got, after = run_ranks(go_on, 2, str(source))[0]
    assert got == metrics and all(torch.equal(after[name], weights[name]) for name in weights)
    # Moments count: without them AdamW steps by lr in every weight.
    assert metrics["grad_norm"] > 1e-2


# ── the type of the weights ──────────────────────────────────────────────────


def steps_in_bfloat16(world, root):
    """Saves a checkpoint after two steps; returns its float32 weights, and the result of the third step."""
    cfg = tiny(world, "bfloat16")
    policy = build_policy(cfg, world)
    for _ in range(2):
        step(cfg, world, policy)
    save(Path(root), 2, Models(policy), state_of(policy), None, world, config=cfg)
    weights = full_weights(policy)
    return weights, step(cfg, world, policy), full_weights(policy)


@pytest.fixture(scope="module")
def saved_in_bfloat16(tmp_path_factory):
    root = tmp_path_factory.mktemp("bfloat16")
    return root, *run_ranks(steps_in_bfloat16, 2, str(root))[0]


def weights_of(world, root, dtype):
    """Weights that a run takes up, or the words of its refusal."""
    try:
        _, policy, _ = take_up(world, root, dtype)
    except ValueError as error:
        return str(error)
    return full_weights(policy)


def alike(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def masters_in(folder: Path) -> set[str]:
    return {name for name in vet(folder / "state" / "optimizer") if name.startswith("masters.")}


def test_resume_in_bfloat16_goes_on_from_float32_weights_bit_for_bit(saved_in_bfloat16):
    from transformers import AutoModelForCausalLM

    root, weights, metrics, after = saved_in_bfloat16
    rounded = {name: w.bfloat16() for name, w in weights.items()}
    # There is something to lose.
    assert all(w.dtype == torch.float32 and not torch.equal(w, rounded[name].float()) for name, w in weights.items())
    model = load_file(root / "step_2" / "model" / "model.safetensors")
    assert alike(model, rounded)
    assert json.loads((root / "step_2" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    opened = AutoModelForCausalLM.from_pretrained(root / "step_2" / "model")
    assert opened.dtype == torch.bfloat16 and alike(dict(opened.named_parameters()), rounded)
    assert masters_in(root / "step_2") == {f"masters.{name}" for name in weights}
    got, went = run_ranks(go_on, 2, str(root), "bfloat16")[0]
    assert got == metrics and alike(went, after)
    assert alike(run_ranks(weights_of, 1, str(root), "bfloat16")[0], weights)


def test_resume_between_types_takes_the_float32_weights_there_are(saved, saved_in_bfloat16, tmp_path):
    """It does so with --run.allow-changes, and from folders in which a bfloat16 run had float32 weights in model/."""
    weights, plain = saved_in_bfloat16[1], load_file(saved[0] / "step_3" / "model" / "model.safetensors")
    assert {w.dtype for w in plain.values()} == {torch.float32} and masters_in(saved[0] / "step_3") == set()
    assert alike(run_ranks(weights_of, 1, str(saved_in_bfloat16[0]), "float32")[0], weights)
    assert alike(run_ranks(weights_of, 1, str(saved[0]), "bfloat16")[0], plain)
    # Rounded weights alone are not what a run goes on from.
    shutil.copytree(saved[0] / "step_3", tmp_path / "step_3")
    save_file({n: w.bfloat16() for n, w in plain.items()}, tmp_path / "step_3" / "model" / "model.safetensors")
    manifest = json.loads((tmp_path / "step_3" / "MANIFEST.json").read_text())
    write_manifest(tmp_path / "step_3", 3, manifest["world_size"])
    said = run_ranks(weights_of, 1, str(tmp_path), "bfloat16")[0]
    assert "is torch.bfloat16, and the checkpoint holds no torch.float32 weights to resume from" in said


def saved_before(world, root, way: str):
    """Makes the first two updates of a policy: alone, after a checkpoint, or continued from that one."""
    cfg = tiny(world)
    policy = build_policy(cfg, world)
    if way != "alone":
        save(Path(root), 1, Models(policy), state_of(policy), None, world, config=cfg)
    if way == "resumed":
        cfg, policy, _ = take_up(world, root)
    step(cfg, world, policy)
    return step(cfg, world, policy), full_weights(policy)


def test_resume_a_checkpoint_before_the_first_update_changes_nothing(tmp_path):
    """AdamW counts its steps from the first real one, after a critic's warm-up or first steps that learn nothing."""
    alone, *others = (run_ranks(saved_before, 2, str(tmp_path / way), way)[0] for way in ("alone", "saved", "resumed"))
    for metrics, weights in others:
        assert metrics == alone[0] and all(torch.equal(weights[name], alone[1][name]) for name in weights)


def other_settings(world, root):
    cfg = config(optimizer={"lr": 1e-3, "weight_decay": 7.0, "betas": (0.1, 0.2), "eps": 1e-3})
    policy = build_policy(cfg, world)
    load(find_resume(Path(root), world), Models(policy))
    steps = {float(state["step"]) for state in policy.optimizer.state.values()}
    return steps, [(group["weight_decay"], group["betas"], group["eps"]) for group in policy.optimizer.param_groups]


def test_resume_with_settings_of_the_optimizer_that_were_set_anew(saved):
    steps, groups = run_ranks(other_settings, 2, str(saved[0]))[0]
    assert steps == {3.0} and groups == [(7.0, (0.1, 0.2), 1e-3), (0.0, (0.1, 0.2), 1e-3)]


def begin_without(world, root):
    """Message of a start with a model whose tokenizer cannot be written, on every rank."""
    cfg, root = tiny(world), Path(root)
    policy, saver = build_policy(cfg, world), Saver(cfg, root, world)
    whole = fixed.load_tokenizer

    def broken(*args):
        tokenizer = whole(*args)
        tokenizer.save_pretrained = None
        return tokenizer

    fixed.load_tokenizer = broken
    try:
        saver.prepare(Models(policy), [].append)
    except ValueError as error:
        return str(error)
    finally:
        fixed.load_tokenizer = whole


def test_start_of_a_run_that_could_save_no_checkpoint_ends(tmp_path):
    first, second = run_ranks(begin_without, 2, str(tmp_path))
    assert f"{TINY}: checkpoints of this model cannot be saved, because transformers cannot write" in first
    assert second == f"rank 0: {first}"


def save_later(world, root):
    """Saves a checkpoint of a run whose model folder is gone by the time it is due."""
    source = Path(root) / "model"
    cfg = config(model={"path": str(source)})
    policy, saver = build_policy(cfg, world), Saver(cfg, Path(root) / "checkpoints", world)
    saver.prepare(Models(policy), [].append)
    torch.distributed.barrier()
    if world.is_first:
        source.rename(source.with_name("gone"))
    saver.save(1, {}, None, Models(policy))


def test_checkpoint_needs_nothing_of_the_folder_that_the_model_came_from(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    run_ranks(save_later, 2, str(tmp_path))
    folder = tmp_path / "checkpoints" / "step_1" / "model"
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert (folder / "generation_config.json").read_bytes() == (TINY / "generation_config.json").read_bytes()


# ── beside training ──────────────────────────────────────────────────────────


class Gate:
    """A model whose writing waits until the gate is opened."""

    def __init__(self, policy):
        self.policy, self.open, self.begun, self.most, self.running = policy, threading.Event(), [], 0, 0

    def saving(self, copy=False):
        write, number = self.policy.saving(copy), len(self.begun)

        def gated(folder, world):
            self.begun.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
            assert self.open.wait(60)
            write(folder, world)
            self.running -= 1

        return gated


def both_ways(world, root):
    """Saves the same moment in the step and beside the steps after it."""
    # In bfloat16 the state holds float32 weights too.
    cfg, root = tiny(world, "bfloat16", background=True), Path(root)
    policy = build_policy(cfg, world)
    for _ in range(2):
        step(cfg, world, policy)
    mine = {"numbers": torch.arange(3.0) + world.rank}
    state = state_of(policy) | {"list": [1]}
    save(root / "step", 2, Models(policy), state, mine, world, config=cfg)
    saver, gate = Saver(cfg, root / "beside", world), Gate(policy)
    saver.save(2, state, mine, Models(gate))
    # Values that were handed over may change from here on, as the weights do.
    state["list"].append(2)
    mine["numbers"] += 1
    before = full_weights(policy)
    for _ in range(2):
        step(cfg, world, policy)
    moved = max((full_weights(policy)[n] - before[n]).abs().max().item() for n in before)
    unfinished = saver.poll() == {} and not (root / "beside" / "step_2").exists()
    gate.open.set()
    went_on = step(cfg, world, policy)["grad_norm"]
    saver.finish()
    return unfinished, moved, went_on, sorted(saver.poll()), saver.poll()


def test_background_checkpoint_is_of_the_moment_it_was_taken(tmp_path):
    for unfinished, moved, went_on, numbers, again in run_ranks(both_ways, 2, str(tmp_path)):
        assert unfinished and moved > 1e-4 and went_on > 0
        assert numbers == ["time/checkpoint_write"] and again == {}
    one, other = tmp_path / "step" / "step_2", tmp_path / "beside" / "step_2"
    assert problems(one) == [] and problems(other) == []
    names = contents(one)
    assert names.keys() == contents(other).keys() and "model/model.safetensors" in names
    assert sum(name.endswith(".distcp") for name in names) == 2 and len(rank_files(other)) == 2
    # torch numbers storages in its own metadata at random; tensors are in the .distcp files.
    for name in names:
        if not name.endswith(".metadata"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    resumed = [run_ranks(go_on, 1, str(root), "bfloat16")[0] for root in (one.parent, other.parent)]
    assert resumed[0][0] == resumed[1][0]
    assert all(torch.equal(resumed[0][1][n], resumed[1][1][n]) for n in resumed[0][1])


def two_in_a_row(world, root):
    cfg, root = tiny(world, background=True, keep=1), Path(root)
    policy = build_policy(cfg, world)
    step(cfg, world, policy)
    saver, gate = Saver(cfg, root, world), Gate(policy)
    saver.save(1, {}, None, Models(gate))
    time.sleep(0.2)
    alone = [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")]
    threading.Timer(0.5, gate.open.set).start()
    began = time.monotonic()
    saver.save(2, {}, None, Models(gate))  # waits for the first
    waited, there = time.monotonic() - began, (root / "step_1").is_dir()
    saver.finish()
    return alone, waited, there, gate.most, gate.begun


def test_background_at_most_one_is_in_flight(tmp_path):
    for alone, waited, there, most, begun in run_ranks(two_in_a_row, 2, str(tmp_path)):
        assert alone == ["checkpoint step_1"] and waited > 0.25 and there and most == 1 and begun == [0, 1]
    assert steps_saved(tmp_path) == [2] and problems(tmp_path / "step_2") == []


def fail_beside(world, root):
    cfg, root = tiny(world, background=True), Path(root)
    policy = build_policy(cfg, world)
    saver = Saver(cfg, root, world)
    saver.save(1, {}, {"x": 1}, Models(policy))
    saver.finish()
    saver.save(2, {}, {"x": object() if world.rank else 1}, Models(policy))
    until, said = time.monotonic() + 60, ""
    while not said and time.monotonic() < until:
        try:
            saver.poll()
        except RuntimeError as error:
            said = str(error)
        time.sleep(0.01)
    return said


def test_background_an_error_ends_the_job_on_every_rank_and_what_was_there_stays(tmp_path):
    first, second = run_ranks(fail_beside, 2, str(tmp_path))
    said = "checkpoint step_2 could not be written in the background: "
    assert first.startswith(said) and "rank 1: " in first
    assert second.startswith(said + "TypeError")
    assert steps_saved(tmp_path) == [1] and problems(tmp_path / "step_1") == []
    assert not list(tmp_path.glob(".incomplete*"))


def room(world, root, dtype):
    """Bytes that a checkpoint was estimated to take, and those that it took."""
    cfg = tiny(world, dtype)
    policy = build_policy(cfg, world)
    thought = sum(model.checkpoint_bytes() for model in store.saved_models(Models(policy)))
    saver = Saver(cfg, Path(root), world)
    warned = []
    saver.prepare(Models(policy), warned.append)
    step(cfg, world, policy)
    saver.save(1, {}, None, Models(policy))
    return thought, saver.expected_bytes, warned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_free_disk_is_asked_for_what_a_checkpoint_takes(tmp_path, dtype):
    (thought, took, warned), (other, _, _) = run_ranks(room, 2, str(tmp_path), dtype)
    assert thought == other and warned == []
    assert took == sum(contents(tmp_path / "step_1").values())
    assert abs(thought - took) / took < 0.1
