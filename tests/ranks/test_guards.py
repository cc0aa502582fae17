"""Steps that are not finite or spike, in real runs: left out, counted, kept, and replayed on one process."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from spmdrl.checkpoint import treefile
from spmdrl.config.dump import to_yaml
from spmdrl.hub.folder import TINY
from spmdrl.rl.spikes import read
from spmdrl.tools.replay import replay
from tests.e2e.runner import succeed
from tests.ranks.cases import full_weights, relative
from tests.ranks.demo import demo, metrics, open_demo, train, untimed
from tests.ranks.harness import RankError, run_ranks

STEPS, SPIKE = 11, 10
REWARD = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    huge = {first} <= calls <= {last} and calls % {each} == 3
    return {size} if huge else float(solution_str[:1] == ground_truth[:1]) + 0.1 * len(solution_str) % 0.7
"""
LOSS = """
import torch
from spmdrl.algos.losses import ppo

def broken(x, clip_low=None, clip_high=None, dual_clip=None):
    per_token, stats = ppo(x)
    # A value alone, or a gradient alone.
    {body}
    return per_token, stats
"""
PER_STEP = 16
"""Gradings of each of two ranks."""


def planted(folder: Path, size: float, first: int, last: int, body: str = "", **more) -> dict:
    """Settings of a run in which each rank grades one sample of steps `first` to `last` by `size`."""
    counts = {"first": (first - 1) * PER_STEP + 1, "last": last * PER_STEP, "each": PER_STEP, "size": size}
    (folder / "reward.py").write_text(REWARD.format(**counts))
    algo = {"advantage": "dr_grpo", "updates_per_step": 1, "kl_coef": 0.0}
    if body:
        (folder / "loss.py").write_text(LOSS.format(body=body))
        algo["loss"] = str(folder / "loss.py") + ":broken"
    sections = {
        "run": {"steps": STEPS},
        "algo": algo,
        "reward": {"function": str(folder / "reward.py")},
        "eval": {"every": 0},
        "checkpoint": {"every": 1, "keep": 4},
    }
    return {name: sections.get(name, {}) | more.get(name, {}) for name in sections.keys() | more.keys()}


def trained(world, folder: str, sections: dict, stop_after: int = 0):
    """Runs to the end; returns the weights and the guard's state."""
    run = open_demo(world, folder, sections, stop_after)
    if world.is_first:
        (Path(folder) / "config.yaml").write_text(to_yaml(demo(folder, **sections)))
    try:
        train(run)
    except Exception as error:
        if type(error).__name__ != "Interrupted":
            raise
    run.close()
    return (
        full_weights(run.models.policy),
        run.models.policy.guard.state(),
        run.models.policy.updates_done,
        run.models.policy.version,
    )


def replayed(world, place: str, model: str = "") -> list[str]:
    return list(replay(Path(place), model))


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """A run of two ranks with a spike in step 10."""
    folder = tmp_path_factory.mktemp("spike")
    run_ranks(trained, 2, str(folder / "run"), planted(folder, 3e4, SPIKE, SPIKE))
    return folder / "run"


def test_spike_is_kept_and_replayed_on_one_process(spiked):
    rows = {row["step"]: row for row in metrics(spiked)}
    places = sorted((spiked / "spikes").iterdir())
    assert [p.name for p in places] == [f"step_{SPIKE:06d}"], "one spike, and the steps around it are none"
    before = sorted(row["grad_norm"] for step, row in rows.items() if step < SPIKE)
    assert rows[SPIKE]["grad_norm"] > 20 * before[len(before) // 2]
    assert all(row["updates_nonfinite"] == 0 for row in rows.values())
    assert rows[SPIKE]["version"] == SPIKE, "kept, not left out"
    told, batch = read(places[0])
    assert told["norm"] == rows[SPIKE]["grad_norm"] and told["version"] == SPIKE - 1
    assert len(batch) == 32 and sorted(told["files"]) == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert (batch.seq["reward"] > 1e4).sum() == 2 and torch.isfinite(batch.token["advantages"]).all()
    ended = succeed([places[0]], module="spmdrl.tools.replay")
    text = "\n".join(ended.out)
    assert f"step_{SPIKE - 1}, as at the start of the step" in text, text
    norm = float(next(line for line in ended.out if line.startswith("norm")).split()[1].rstrip(","))
    assert abs(norm / told["norm"] - 1) < 1e-5 and "equals the run's to" in text, text
    # The two planted ones stand first, or with those of their groups.
    head = [line.split() for line in ended.out[ended.out.index(next(x for x in ended.out if "|dlogp|" in x)) + 1 :: 2]]
    assert {line[5] for line in head[:2]} == {"3e+04"}, text
    assert [float(line[2]) for line in head] == sorted((float(line[2]) for line in head), reverse=True)
    assert len(head) == 8 and " -> " in text


def test_replay_says_when_the_weights_are_others(spiked, tmp_path):
    """Without the checkpoint of that moment an older one is taken, without any the start, and never a damaged one."""
    run = tmp_path / "run"
    shutil.copytree(spiked, run, symlinks=True)
    place = str(run / "spikes" / f"step_{SPIKE:06d}")
    weights = run / "checkpoints" / f"step_{SPIKE - 1}" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    [lines] = run_ranks(replayed, 1, place)
    assert any(f"step_{SPIKE - 2}" in line and "results differ" in line for line in lines), lines
    shutil.rmtree(run / "checkpoints")
    [lines] = run_ranks(replayed, 1, place)
    assert any(line.startswith("weights  tiny, of optimizer step 0") for line in lines), lines
    [lines] = run_ranks(replayed, 1, place, str(spiked / "checkpoints" / f"step_{SPIKE - 1}" / "model"))
    assert any("as named by --model" in line for line in lines), lines
    want = json.loads((Path(place) / "spike.json").read_text())["norm"]
    norm = float(next(line for line in lines if line.startswith("norm")).split()[1])
    assert abs(norm / want - 1) < 1e-5


@pytest.mark.parametrize(
    "what, message",
    [
        ("gone", "name a folder that a run has saved"),
        ("one rank", "rank_00001.safetensors is not a readable tree file"),
        ("outside", "lacks names of files in its folder"),
        ("config", "config.yaml does not exist"),
    ],
)
def test_replay_refuses_what_is_not_whole(spiked, tmp_path, what, message):
    run = tmp_path / "run"
    shutil.copytree(spiked, run, symlinks=True)
    place = run / "spikes" / f"step_{SPIKE:06d}"
    if what == "gone":
        shutil.rmtree(place)
    elif what == "one rank":
        (place / "rank_00001.safetensors").write_bytes(b"\x80\x04.")
    elif what == "outside":
        told = json.loads((place / "spike.json").read_text())
        (place / "spike.json").write_text(json.dumps(told | {"files": ["../../../secret"]}))
    else:
        (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match=message):
        list(replay(place))


HUGE = "(x.advantages.abs() > 1e3)"
WHOLE = f"per_token = per_token * torch.where({HUGE}, torch.nan, 1.0)"
# The value is inf where the gradient is 0: only the loss tells.
VALUE = f"per_token = per_token + torch.where({HUGE}, torch.inf, 0.0)"
# The value is as it was, and 0 times the slope of sqrt at 0 is nan.
SLOPE = f"per_token = per_token + 0.0 * torch.where({HUGE}, 0.0 * x.logp, 1.0).sqrt()"


@pytest.mark.parametrize("body", [WHOLE, VALUE, SLOPE], ids=["loss and gradient", "loss alone", "gradient alone"])
def test_step_that_is_not_finite_is_left_out_counted_and_replayed(tmp_path, body):
    """Step 3 of 4 is bad: weights and moments of the run are those of a run in which it had no effect."""
    bad = planted(tmp_path, 3e4, 3, 3, body, run={"steps": 4})
    out = run_ranks(trained, 2, str(tmp_path / "run"), bad)
    rows = metrics(tmp_path / "run")
    assert [row["updates_nonfinite"] for row in rows] == [0, 0, 1, 0]
    assert [row["version"] for row in rows] == [1, 2, 2, 3] and out[0][2:] == (3, 3)
    assert rows[2]["loss"] is None and (rows[2]["grad_norm"] is None) == (body != VALUE)
    # Linear over the two steps after a warm-up of two, whatever became of them: to half of the peak in the last one.
    assert "entropy/mean" not in rows[2] and [row["lr"] for row in rows] == pytest.approx([1.5e-4, 3e-4, 3e-4, 1.5e-4])
    for row in (rows[0], rows[1], rows[3]):
        assert all(value is not None for value in row.values()), "nothing of it stays"
    place = tmp_path / "run" / "spikes" / "step_000003"
    told, batch = read(place)
    assert not told["loss_finite"] or body == SLOPE
    [lines] = run_ranks(replayed, 1, str(place))
    text = "\n".join(lines)
    # Group baselines spread a huge reward over its group of 4, on both ranks.
    large = (batch.token["advantages"].abs() > 1e3) & batch.token["mask"]
    want = {(int(batch.seq["prompt"][i]), int(batch.seq["sample"][i])) for i in batch.seq_index[large].unique()}
    named = {(int(line.split()[0]), int(line.split()[1])) for line in lines if line.endswith("NOT FINITE")}
    assert named and named == want, text
    if body == WHOLE:
        # The same without that step's experience: only what the step left behind could differ.
        last = treefile.read(place / "rank_00000.safetensors")
        assert last["seq"]["update"].eq(0).all() and "norm     nan, as in the run" in text, text


def test_steps_that_are_not_finite_end_the_run_at_the_limit_also_across_a_resume(tmp_path):
    sections = planted(tmp_path, 3e4, 2, 9, WHOLE, run={"steps": 6}, checkpoint={"every": 1, "keep": 2})
    with pytest.raises(
        RankError, match=r"the gradient norm is nan at optimizer step 1, the last of 3 bad steps in a row"
    ):
        run_ranks(trained, 2, str(tmp_path / "run"), sections)
    rows = metrics(tmp_path / "run")
    assert [row["updates_nonfinite"] for row in rows] == [0, 1, 1], "the third ended it"
    assert len(list((tmp_path / "run" / "spikes").iterdir())) == 3
    # Two stood in the checkpoint: one more of the resumed run is the third. Its first grading is that of step 4 here.
    (tmp_path / "reward.py").write_text(REWARD.format(first=1, last=99, each=PER_STEP, size=3e4))
    again = sections | {"run": sections["run"] | {"allow_changes": True}}
    with pytest.raises(RankError, match="the last of 3 bad steps in a row"):
        run_ranks(trained, 2, str(tmp_path / "run"), again)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    first = planted(tmp_path, 3e4, 2, 9, WHOLE, run={"steps": 6}, optimizer={"bad_steps": 0})
    with pytest.raises(RankError, match="gradient norm is nan at optimizer step 1; weights are unchanged"):
        run_ranks(trained, 2, str(tmp_path / "first"), first)
    assert len(metrics(tmp_path / "first")) == 1


def test_resume_goes_on_in_the_schedule_after_a_step_that_was_left_out(tmp_path):
    """Step 1 of 4 is bad on one rank, and so is step 3, the first one of the process that resumes."""
    bad = planted(tmp_path, 3e4, 2, 2, WHOLE, run={"steps": 4})
    for stop in (2, 0):
        run_ranks(trained, 1, str(tmp_path / "run"), bad, stop)
    rows = metrics(tmp_path / "run")
    assert [row["updates_nonfinite"] for row in rows] == [1, 0, 1, 0]
    assert [row["lr"] for row in rows] == pytest.approx([1.5e-4, 3e-4, 3e-4, 1.5e-4])


def test_skipped_step_changes_nothing(tmp_path):
    """A single bad step leaves the weights bit by bit, and the moments stay empty."""
    bad = planted(tmp_path, 3e4, 2, 2, WHOLE, run={"steps": 2})
    two = run_ranks(trained, 2, str(tmp_path / "two"), bad)[0]
    one = run_ranks(trained, 2, str(tmp_path / "one"), planted(tmp_path, 3e4, 9, 9, WHOLE, run={"steps": 1}))[0]
    assert relative(two[0], one[0]) == 0.0 and two[2:] == one[2:]
    assert untimed(metrics(tmp_path / "two"))[0] == untimed(metrics(tmp_path / "one"))[0]
    assert not math.isnan(sum(x.sum().item() for x in two[0].values()))


def megatron_steps(world, folder: str, path: str, loss: str):
    """Makes a good step and saves it, makes a bad one, saves it and reads it again, on two stages of a pipeline."""
    from dataclasses import replace

    from tests.ranks.cases import synthetic_batch, update_models
    from tests.ranks.megatron_cases import open_models, weights_of

    sections = {"algo": {"advantage": "dr_grpo", "loss": loss}}
    cfg, here, models = open_models(world, {"pp": 2}, sections, {"policy": path}, "megatron")
    good = synthetic_batch()
    bad = [replace(t, reward=3e4) if i == 0 else t for i, t in enumerate(good)]
    first = update_models(cfg, here, models, good)
    models.policy.save(Path(folder))
    before = weights_of(here, models)
    second = update_models(cfg, here, models, bad)
    after = weights_of(here, models)
    done = models.policy.updates_done
    models.policy.load(Path(folder))
    return first, second, before, after, weights_of(here, models), done


@pytest.mark.parametrize("body", [WHOLE, VALUE], ids=["loss and gradient", "loss alone"])
def test_step_that_is_not_finite_is_left_out_by_megatron_too(tmp_path, body):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from tests.ranks.cases import small_model

    (tmp_path / "loss.py").write_text(LOSS.format(body=body))
    path = small_model(tmp_path / "model", tie_word_embeddings=False)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, path)
    found = run_ranks(megatron_steps, 2, str(tmp_path / "saved"), path, str(tmp_path / "loss.py") + ":broken")
    for first, second, *_, done in found:
        assert (first["updates_nonfinite"], second["updates_nonfinite"], done) == (0, 1, 1)
        assert math.isfinite(first["loss"]) and math.isnan(second["loss"]), (first, second)
        assert math.isfinite(second["grad_norm"]) == (body == VALUE)
    _, _, before, after, loaded, _ = found[0]
    assert before and all(torch.equal(before[n], after[n]) and torch.equal(before[n], loaded[n]) for n in before)
