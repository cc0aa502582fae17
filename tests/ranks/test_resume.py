"""Checkpoints come back on this and on other layouts; damage is seen and named; runs go on."""

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import steps_saved
from spmdrl.checkpoint.store import find_resume, load
from spmdrl.data.chat import CHATML
from spmdrl.hub.folder import TINY
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.train import train
from spmdrl.weights.safetensors import SafetensorsWriter
from tests.ranks.cases import build_policy, config, full_weights, synthetic_batch, update_once, whole
from tests.ranks.demo import STEPS, Interrupted, metrics, open_demo, untimed
from tests.ranks.harness import run_ranks
from tests.saving import newest_valid, save


def tiny(world, path="tiny", **optimizer):
    return config(
        model={"path": path},
        data={"chat_template": "chatml"},
        optimizer={"lr": 1e-3, "clip_grad_norm": 1.0, "warmup_steps": 5} | optimizer,
        parallel={"dp_replicate": world.mesh["dp_replicate"].size()},
    )


def result(cfg, world, policy):
    metrics = update_once(cfg, world, policy, None, synthetic_batch())
    weights = full_weights(policy)
    return metrics, weights if world.rank == 0 else None


GENERATION = '{"eos_token_id": 2,  "temperature": 0.6, "top_p": 0.9}'
"""Generation config as many models have it, which transformers reads but does not write."""


def train_and_save(world, root, path):
    """Makes two steps, a checkpoint, and the step after it."""
    cfg = tiny(world, path)
    policy = build_policy(cfg, world)
    for _ in range(2):
        update_once(cfg, world, policy, None, synthetic_batch())
    state = {"step": 2, "version": policy.version, "updates_done": policy.updates_done}
    folder = save(Path(root), 2, Models(policy), state, {"rank": world.rank}, world)
    saved = full_weights(policy)
    return str(folder), result(cfg, world, policy), saved if world.rank == 0 else None


def load_and_go_on(world, root):
    cfg = tiny(world)
    policy = build_policy(cfg, world)
    found = find_resume(Path(root), world)
    state = load(found, Models(policy))
    policy.version, policy.updates_done = state["version"], state["updates_done"]
    policy.updates_due = policy.updates_done
    saved = full_weights(policy)
    return state, result(cfg, world, policy), saved if world.rank == 0 else None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (root of the checkpoints, result of the step after, weights that were saved), by two ranks."""
    root, model = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(TINY, model)
    (model / "generation_config.json").write_text(GENERATION)
    (folder, after, weights), (other, (metrics, _), _) = run_ranks(train_and_save, 2, str(root), str(model))
    assert folder == other == str(root / "step_2") and metrics == after[0]
    return root, after, weights


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_resume_on_the_same_layout_is_identical(saved):
    root, (metrics, weights), at_save = saved
    (state, (got, after), loaded), _ = run_ranks(load_and_go_on, 2, str(root))
    assert state == {"step": 2, "version": 2, "updates_done": 2}
    assert same(loaded, at_save)
    assert got == metrics and same(after, weights)  # to the last bit
    assert abs(metrics["grad_norm"]) > 1e-2


@pytest.mark.parametrize(("n", "replicate"), [(1, 1), (3, 1), (4, 2)])
def test_resume_on_another_layout_goes_on_alike(saved, n, replicate):
    root, (metrics, weights), at_save = saved
    state, (got, after), loaded = run_ranks(load_and_go_on, n, str(root), dp_replicate=replicate)[0]
    assert state["step"] == 2 and same(loaded, at_save)
    for name in ("loss", "grad_norm", "entropy/mean", "lr"):
        assert abs(got[name] - metrics[name]) <= 1e-6 * max(1.0, abs(metrics[name])), name
    # AdamW without its moments would step by lr in every weight: 6e-4 here.
    assert max((after[n] - weights[n]).abs().max().item() for n in weights) < 2e-6


def test_resume_model_folder_opens_in_transformers(saved):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, _, at_save = saved
    folder = root / "step_2" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert same({n: p.detach() for n, p in model.named_parameters()}, at_save)
    fresh = AutoModelForCausalLM.from_pretrained(TINY)
    tokens = torch.tensor([[1, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        moved = (model(tokens).logits - fresh(tokens).logits).abs().max()
        fresh.load_state_dict(at_save, strict=False)
        assert torch.equal(model(tokens).logits, fresh(tokens).logits) and moved > 1e-3
    ours, shipped = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(TINY)
    assert ours("abc=").input_ids == shipped("abc=").input_ids
    assert model.generation_config.eos_token_id == 2
    assert (folder / "generation_config.json").read_text() == GENERATION
    assert ours.chat_template == CHATML and shipped.chat_template is None
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert not [p for p in (root / "step_2").rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]


def test_resume_sharded_safetensors_open_too(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.config.save_pretrained(tmp_path)
    writer = SafetensorsWriter(tmp_path, shard_bytes=300_000)
    for name, p in model.named_parameters():
        writer.add({name: p})
    writer.close()
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(dict(again.named_parameters()), dict(model.named_parameters()))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())


class Plain:
    """A policy that saves one small file: the tests are about the folder around it."""

    def saving(self, copy=False):
        """Implements the method of the contract."""

        def write(folder, world):
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model" / "config.json").write_text("{}")
            (folder / "model" / "weights").write_bytes(bytes(range(256)) * 40)

        return write


def keep_some(world, root):
    root = Path(root)
    if world.is_first:
        # A killed job left these; the second is of the very step that is saved next.
        for name in (".incomplete-step_1", ".incomplete-step_3"):
            (root / name / "model").mkdir(parents=True)
            (root / name / "model" / "half").write_bytes(b"x" * 10)
    torch.distributed.barrier()
    before = find_resume(root, world)
    for step in (1, 2, 3):
        save(root, step, Models(Plain()), {"step": step}, None, world)
    save(root, 3, Models(Plain()), {"step": 3, "again": True}, None, world)
    return before, str(find_resume(root, world))


def test_resume_keeps_the_newest_and_half_written_ones_never_count(tmp_path):
    for before, found in run_ranks(keep_some, 2, str(tmp_path)):
        assert before is None and found == str(tmp_path / "step_3")
    assert steps_saved(tmp_path) == [3, 2] and not (tmp_path / ".incomplete-step_3").exists()
    assert (tmp_path / "latest").resolve() == (tmp_path / "step_3").resolve() and (tmp_path / "latest").is_symlink()
    assert json.loads((tmp_path / "latest" / "state" / "run.json").read_text()) == {"step": 3, "again": True}
    manifest = json.loads((tmp_path / "step_3" / "MANIFEST.json").read_text())
    assert manifest["step"] == 3 and manifest["world_size"] == 2
    assert set(manifest["files"]) == {"model/weights", "model/config.json", "state/run.json"}
    assert manifest["files"]["model/weights"]["bytes"] == 10240
    assert problems(tmp_path / "step_3") == []


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "flipped bit": (lambda f: flip(f / "model" / "weights"), "model/weights: its hash is not the manifest's"),
    "cut short": (lambda f: (f / "model" / "weights").write_bytes(b"abc"), "model/weights: 3 bytes instead of"),
    "missing file": (lambda f: (f / "state" / "run.json").unlink(), "state/run.json: missing"),
    "missing manifest": (lambda f: (f / "MANIFEST.json").unlink(), "MANIFEST.json: "),
    "cut manifest": (lambda f: (f / "MANIFEST.json").write_text('{"step": 3, "fi'), "MANIFEST.json: "),
    "other manifest": (lambda f: (f / "MANIFEST.json").write_text("[]"), "MANIFEST.json: "),
    "manifest of nothing": (
        lambda f: (f / "MANIFEST.json").write_text('{"files": {}}'),
        "MANIFEST.json: does not list",
    ),
    "empty manifest": (lambda f: (f / "MANIFEST.json").write_text('{"files": null}'), "MANIFEST.json: "),
}


def resume_from(world, root):
    try:
        return str(find_resume(Path(root), world))
    except ValueError as error:
        return f"ValueError: {error}"


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("kept")
    run_ranks(keep_some, 1, str(root))
    return root


@pytest.mark.parametrize("how", DAMAGE)
def test_resume_damage_is_named_and_the_one_before_is_taken(three_saved, tmp_path, how, caplog, monkeypatch):
    root = tmp_path / "checkpoints"
    shutil.copytree(three_saved, root, symlinks=True)
    damage, message = DAMAGE[how]
    damage(root / "step_3")
    assert problems(root / "step_3")[0].startswith(message)
    with caplog.at_level("WARNING", "spmdrl"):
        monkeypatch.setattr(logging.getLogger("spmdrl"), "propagate", True)  # a run turns it off
        assert newest_valid(root) == root / "step_2"
    assert "step_3 is damaged" in caplog.text and "resuming from step_2" in caplog.text
    damage(root / "step_2")
    with pytest.raises(ValueError, match="step_3 is damaged .*step_2 is damaged .* None is usable: move the"):
        newest_valid(root)


def test_resume_every_rank_hears_of_damage(three_saved, tmp_path):
    root = tmp_path / "checkpoints"
    shutil.copytree(three_saved, root, symlinks=True)
    flip(root / "step_3" / "model" / "weights")
    assert run_ranks(resume_from, 2, str(root)) == [str(root / "step_2")] * 2
    flip(root / "step_2" / "model" / "weights")
    for said in run_ranks(resume_from, 2, str(root)):  # every rank stops, none starts from nothing
        assert said.startswith("ValueError: checkpoint") and "or choose another --run.dir" in said


# ── runs with more to remember than a policy ─────────────────────────────────

SAFE = {
    # Two critics beside the policy, an adaptive KL coefficient, a Lagrange multiplier, moments of the rewards so far,
    # and steps that sample more than one round of prompts.
    "algo": {
        "preset": "safe_rlhf",
        "kl_coef": 0.05,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_target": 0.01,
        "kl_horizon": 200.0,
        "updates_per_step": 2,
    },
    "shaping": {"normalize": "running"},
    "safety": {"cost": "cost", "limit": 0.1, "lr": 0.5},
    "critic": {"lr": 3e-3, "warmup_steps": 1},
    "filter": {"keep": "accuracy_range", "low": 0.05, "high": 0.45},
    "eval": {"every": 0},
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth)) / max(1, len(ground_truth))
    return {"score": right, "cost": len(solution_str) / 8 - 0.3}
"""
STOP = 2


def remembered(run) -> dict:
    """Gathers all that a step depends on, weights and moments whole. Collective."""
    models = {"policy": run.models.policy, **run.models.trained()}
    moments = {}
    for name, model in models.items():
        state = model.optimizer.state
        named = [(n, state[p]["exp_avg_sq"]) for n, p in model.named_weights() if p in state]
        moments[name] = whole(named) if named else {}
    return {
        "algorithm": dict(run.algo.state),
        "draws": run.state.draws,
        "version": run.models.policy.version,
        "updates": {name: model.updates_done for name, model in models.items()},
        "due": {name: model.updates_due for name, model in models.items()},
        "weights": {name: full_weights(model) for name, model in models.items()},
        "moments": moments,
    }


def train_and_look(world, folder, sections, stop_after=0):
    """Returns the memory of a run when it begins and when it ends."""
    run = open_demo(world, folder, sections, stop_after)
    first = remembered(run)
    with suppress(Interrupted):
        train(run)
    run.close()
    return first, remembered(run)


@pytest.fixture(scope="module")
def safe_run(tmp_path_factory):
    """Returns (settings, folder of a run without a break, folder of one that stopped, memory of that one)."""
    root = tmp_path_factory.mktemp("safe")
    (root / "reward.py").write_text(REWARD)
    saving = {"checkpoint": {"every": STOP, "keep": 1, "at_end": False}}
    sections = SAFE | saving | {"reward": {"function": str(root / "reward.py")}}
    run_ranks(train_and_look, 2, str(root / "whole"), sections)
    _, left = run_ranks(train_and_look, 2, str(root / "broken"), sections, STOP)[0]
    return sections, root / "whole", root / "broken", left


def same_memory(a: dict, b: dict) -> bool:
    if any(a[k] != b[k] for k in ("algorithm", "draws", "version", "updates", "due")):
        return False
    tensors = [(k, name) for k in ("weights", "moments") for name in a[k]]
    return all(a[k].keys() == b[k].keys() for k, _ in tensors) and all(same(a[k][n], b[k][n]) for k, n in tensors)


@pytest.mark.parametrize("n", [2, 1])
def test_resume_of_a_run_with_critics_and_controllers_goes_on_as_if_it_had_not_stopped(safe_run, tmp_path, n):
    sections, without_break, broken, left = safe_run
    # There is something to remember, and all of it differs from the start of a run.
    start = {"kl_coef": 0.05, "multiplier": 1.0, "reward_count": 0.0, "reward_mean": 0.0, "reward_m2": 0.0}
    assert left["algorithm"].keys() == start.keys() and all(left["algorithm"][k] != start[k] for k in start)
    assert left["draws"] > STOP and left["version"] == STOP - 1
    assert left["updates"] == left["due"] == {"policy": 2 * (STOP - 1), "critic": 2 * STOP, "cost_critic": 2 * STOP}
    assert all(x.any() for name in left["moments"] for x in left["moments"][name].values())
    assert not torch.equal(left["weights"]["critic"]["score.weight"], left["weights"]["cost_critic"]["score.weight"])
    shutil.copytree(broken, tmp_path / "run", symlinks=True)
    found, _ = run_ranks(train_and_look, n, str(tmp_path / "run"), sections)[0]
    assert same_memory(found, left)
    want, resumed = untimed(metrics(without_break)), untimed(metrics(tmp_path / "run"))
    assert [row["step"] for row in want] == [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    for a, b in zip(want, resumed, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"microbatches", "critic/microbatches", "cost_critic/microbatches"}:
            assert a[name] == b[name] if n == 2 else abs(a[name] - b[name]) < 1e-5, (a["step"], name)
    # Two updates a step, two of warm-up, then a line to 0, which the update after the last one would have: from where
    # each model begins to learn, in units of the mean of a step.
    assert "lr" not in want[0]
    assert [row["lr"] / 3e-4 for row in want[1:]] == pytest.approx([0.75, 5.5 / 6, 3.5 / 6, 1.5 / 6])
    for name in ("critic/lr", "cost_critic/lr"):
        assert [row[name] / 3e-3 for row in want] == pytest.approx([0.75, 7.5 / 8, 5.5 / 8, 3.5 / 8, 1.5 / 8])


def load_with_critic(world, root):
    cfg = tiny(world)
    models = Models(build_policy(cfg, world), critic=FsdpPolicy(cfg, world, 1, head="value"))
    try:
        load(find_resume(Path(root), world), models)
    except ValueError as error:
        return str(error)
    return ""


def test_resume_as_an_algorithm_with_another_model_is_refused(saved):
    for message in run_ranks(load_with_critic, 2, str(saved[0])):
        assert "step_2 holds no critic, which this run trains" in message
