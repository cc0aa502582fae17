"""Split placement: ranks that train, score and sample apart learn what they learn together; staleness is bounded."""

from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.plan import plan_lines
from spmdrl.config.schema import ParallelConfig
from spmdrl.rl.build import build_run
from spmdrl.rl.compose import compose
from spmdrl.session.session import Session
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import config
from tests.ranks.demo import STEPS, Interrupted, demo, metrics, train_demo, untimed
from tests.ranks.harness import RankError, run_ranks


def split(rollout: int, scoring: int = 0, **axes) -> dict:
    return {"placement": "split", "rollout_ranks": rollout, "scoring_ranks": scoring} | axes


def split_demo(world, folder: str, parallel: dict, sections: dict, stop_after: int = 0, fail_at: int = -1) -> dict:
    """Runs the demo under split placement; returns per step sampled here (step, version, tokens' versions)."""
    world = world_from_group(ParallelConfig(**parallel), 1, torch.device("cpu"), world.rank, timedelta(seconds=60))
    Path(folder).mkdir(exist_ok=True)
    run = build_run(Session(demo(folder, **sections | {"parallel": parallel}), world, Timer()))
    seen, save, sampler = [], run.checkpoint, run.sampler
    fill_batch = sampler and sampler.fill_batch

    def watched(step, drawn, version, carried):
        if step == fail_at:
            raise ValueError("the reward is broken")
        done = fill_batch(step, drawn, version, carried)
        versions = {v for t in done.episodes for v in t.versions[t.mask].tolist()}
        prompts = sorted({(t.position, t.prompt) for t in done.episodes})
        seen.append((step, run.memory.version, sorted(versions), prompts))
        return done

    def then_die(step):
        save(step)
        if step + 1 == stop_after:
            raise Interrupted

    run.checkpoint = then_die
    if sampler:
        sampler.fill_batch = watched
    with suppress(Interrupted):
        train(run)
    run.close()
    models = {name: type(model).__name__ for name, model in run.models.named()}
    return {
        "seen": seen,
        "models": models,
        "engine": sampler is not None,
        "draws": run.state.draws,
        "start": run.checkpoints.start_step,
    }


# Rounding of float32 grows through AdamW's first step, whose size does not depend on the gradient's.
DOUBLE = {"dtype": "float64"}


@pytest.fixture(scope="module")
def colocated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    run_ranks(train_demo, 1, str(folder), {"model": DOUBLE})
    return untimed(metrics(folder))


def same(a: dict, b: dict, names, within: float) -> None:
    for name in names:
        assert abs(a[name] - b[name]) <= within * max(1.0, abs(a[name])), (a["step"], name, a[name], b[name])


POLICY, REMOTE = {"policy": "FsdpPolicy", "reference": "FsdpPolicy"}, {"reference": "RemotePolicy"}
LAYOUTS = {
    "1 + 1": (split(1), [POLICY, {}]),
    "2 + 2": (split(2), [POLICY] * 2 + [{}] * 2),
    "2 + 1 + 1": (split(1, 1), [POLICY | REMOTE] * 2 + [REMOTE, {}]),
    "sp 2 + 2 + 1": (split(1, 2, sp=2), [POLICY | REMOTE] * 2 + [REMOTE] * 2 + [{}]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_split_learns_what_colocated_does(layout, colocated, tmp_path):
    parallel, models = LAYOUTS[layout]
    got = run_ranks(split_demo, len(models), str(tmp_path / "run"), parallel, {"model": DOUBLE})
    assert [rank["models"] for rank in got] == models
    assert [rank["engine"] for rank in got] == [not m for m in models]
    rows = untimed(metrics(tmp_path / "run"))
    assert len(rows) == STEPS
    for a, b in zip(colocated, rows, strict=True):
        assert a.keys() | {"rollout/staleness"} == b.keys()
        same(a, b, a.keys() - {"microbatches", "logp_diff/max", "logp_diff/mean"}, 1e-9)
        # The engine reports its logp in float32.
        assert b["logp_diff/max"] < 1e-6
        assert b["rollout/staleness"] == 0 and b["kl/mean"] > 0
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4 * STEPS


MEGATRON = {
    "tp 2 + 1": (split(1, tp=2), 3),
    "pp 2 with layers 1 + 2, + 1": (split(1, pp=2, first_stage_layers=1), 3),
    "tp 2 + 2 + 1": (split(1, 2, tp=2), 5),
}


@pytest.fixture(scope="module")
def colocated_single(tmp_path_factory):
    """Metrics of FSDP on one rank in float32, as Megatron has no float64."""
    folder = tmp_path_factory.mktemp("single") / "run"
    run_ranks(train_demo, 1, str(folder), {})
    return untimed(metrics(folder))


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
@pytest.mark.parametrize("layout", MEGATRON)
def test_layout_megatron_split_learns_what_fsdp_colocated_does(layout, colocated_single, tmp_path):
    parallel, ranks = MEGATRON[layout]
    sections = {"policy": {"backend": "megatron"}}
    resumed, apart = layout == "tp 2 + 1", ranks == 5
    if resumed:
        sections["checkpoint"] = {"every": 1, "keep": 1, "at_end": False}
        run_ranks(split_demo, ranks, str(tmp_path / "run"), parallel, sections, 2)
    got = run_ranks(split_demo, ranks, str(tmp_path / "run"), parallel, sections)
    assert [rank["start"] for rank in got] == [2 * resumed] * ranks
    own = {"policy": "MegatronPolicy", "reference": "RemotePolicy" if apart else "MegatronPolicy"}
    assert [rank["models"] for rank in got] == [own] * 2 + [REMOTE] * (ranks - 3) + [{}]
    rows = untimed(metrics(tmp_path / "run"))
    assert len(rows) == STEPS
    for a, b in zip(colocated_single, rows, strict=True):
        names = a.keys() - {"microbatches", "logp_diff/max", "logp_diff/mean"}
        print(layout, max((abs(a[n] - b[n]) / max(1.0, abs(a[n])), n) for n in names), b["logp_diff/max"])
        same(a, b, names, 2e-5)
        assert b["logp_diff/max"] < 1e-5
        assert b["rollout/staleness"] == 0 and b["kl/mean"] > 0


@pytest.mark.parametrize(("ranks", "staleness"), [(2, 2), (3, 1)])
def test_stale_samples_are_as_old_as_staleness_says(ranks, staleness, colocated, tmp_path):
    sections = {"rollout": {"staleness": staleness}}
    got = run_ranks(split_demo, ranks, str(tmp_path / "run"), split(ranks - 1), sections)
    for rank in got[1:]:
        # (step, what the engine held, what its tokens say): by the weights of step k - staleness.
        want = [(k, max(k - staleness, 0), [max(k - staleness, 0)]) for k in range(STEPS)]
        assert [row[:3] for row in rank["seen"]] == want
    assert not got[0]["seen"] and {rank["draws"] for rank in got} == {8 * STEPS}
    rows = untimed(metrics(tmp_path / "run"))
    assert [row["rollout/staleness"] for row in rows] == [min(k, staleness) for k in range(STEPS)]
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] == pytest.approx(colocated[0]["loss"], abs=1e-6)
    assert rows[1]["loss"] != pytest.approx(colocated[1]["loss"], abs=1e-6)
    # The engine's logp is of older weights, and evaluation of those of its step.
    assert rows[1]["logp_diff/max"] > 1e-4 > rows[0]["logp_diff/max"]
    assert rows[2]["eval/accuracy"] > 0 and "eval/accuracy" not in rows[1]
    if ranks == 2:
        run_ranks(split_demo, ranks, str(tmp_path / "again"), split(ranks - 1), sections)
        assert untimed(metrics(tmp_path / "again")) == rows


def test_stale_samples_are_corrected_unless_told_otherwise():
    stale = {"parallel": split(1), "rollout": {"staleness": 1}}
    assert compose(config()).correction == "none"
    assert compose(config(parallel=split(1))).correction == "none"
    assert compose(config(**stale)).correction == "tis_token"
    assert compose(config(**stale, correction={"kind": "none"})).correction == "none"
    assert compose(config(**stale, correction={"kind": "icepop"})).correction == "icepop"
    assert compose(config(**stale, algo={"old_logp": "rollout"})).correction == "none"
    assert compose(config(rollout={"oversample": 2.0, "partial_steps": 1})).correction == "tis_token"


@pytest.mark.parametrize("staleness", [0, 1])
def test_resume_goes_on_with_what_was_sampled_ahead(staleness, colocated, tmp_path):
    saving = {"rollout": {"staleness": staleness}, "checkpoint": {"every": 1, "keep": 1, "at_end": False}}
    saving["model"] = DOUBLE
    folder = str(tmp_path / "run")
    before = run_ranks(split_demo, 2, folder, split(1), saving, 3)
    after = run_ranks(split_demo, 2, folder, split(1), saving)
    assert [rank["start"] for rank in after] == [3, 3] and [rank["draws"] for rank in after] == [8 * STEPS] * 2
    first, second = before[1]["seen"], after[1]["seen"]
    # With a step ahead step 3 stands in the checkpoint, sampled by the weights of step 2.
    assert [row[:2] for row in first] == [(i, max(i - staleness, 0)) for i in range(3 + staleness)]
    assert [row[:2] for row in second] == [(i, i - staleness) for i in range(3 + staleness, STEPS)]
    rows = untimed(metrics(folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    if not staleness:
        for a, b in zip(colocated, rows, strict=True):
            same(a, b, a.keys() - {"microbatches"}, 1e-5)


EXPERIENCE = {
    "filter, greedy": {
        "filter": {"keep": "mixed"},
        "algo": {"preset": "remax", "kl_coef": 0.05, "updates_per_step": 2},
    },
    "replay": {"filter": {"replay_steps": 2, "resample": "best_random"}},
    "partial": {"rollout": {"oversample": 2.0, "partial_steps": 1, "temperature": 3.0, "max_new_tokens": 24}},
}


@pytest.mark.parametrize("name", EXPERIENCE)
def test_layout_all_kinds_of_experience_work_split(name, tmp_path):
    sections = {"run": {"steps": 4}, "eval": {"every": 0}} | EXPERIENCE[name]
    run_ranks(train_demo, 1, str(tmp_path / "one"), sections)
    run_ranks(split_demo, 2, str(tmp_path / "run"), split(1), sections)
    for a, b in zip(untimed(metrics(tmp_path / "one")), untimed(metrics(tmp_path / "run")), strict=True):
        same(a, b, a.keys() - {"microbatches"}, 1e-5)
    ahead = sections | {"rollout": sections.get("rollout", {}) | {"staleness": 1}}
    late = run_ranks(split_demo, 3, str(tmp_path / "ahead"), split(2), ahead)
    for rank in late[1:]:
        assert [row[:2] for row in rank["seen"]] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    rows = untimed(metrics(tmp_path / "ahead"))
    assert len(rows) == 4 and late[0]["draws"] == late[1]["draws"] >= 32
    if name == "filter, greedy":
        assert all(row["filter/rounds"] >= 1 for row in rows)
    if name == "partial":
        assert any(len(row[2]) > 1 for rank in late for row in rank["seen"]), "tokens of more than one version"
        assert late[0]["draws"] > 32 and max(row["rollout/staleness"] for row in rows) > 1


OTHERS = {
    "critic and reward model": {
        "algo": {"preset": "ppo", "updates_per_step": 2, "kl_coef": 0.05},
        "reward": {"model": "classifier", "model_coef": 0.5},
        "safety": {"cost_model": "classifier", "limit": 0.1},
    },
    "process rewards": {"algo": {"preset": "prime", "kl_coef": 0.0, "updates_per_step": 2}, "filter": {"keep": ""}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_layout_other_models_answer_from_their_own_ranks(name, tmp_path):
    folder = str(tmp_path / "classifier")
    classifier(folder)
    sections = {"run": {"steps": 2}, "eval": {"every": 1, "prompts": 8}} | {
        section: {k: folder if v == "classifier" else v for k, v in values.items()}
        for section, values in OTHERS[name].items()
    }
    run_ranks(train_demo, 1, str(tmp_path / "one"), sections)
    got = run_ranks(split_demo, 4, str(tmp_path / "run"), split(1, 1), sections)
    assert set(got[2]["models"].values()) == {"RemotePolicy"} and not got[3]["models"]
    for a, b in zip(untimed(metrics(tmp_path / "one")), untimed(metrics(tmp_path / "run")), strict=True):
        same(a, b, a.keys() - {"microbatches"}, 1e-5)
        assert ("eval/model" in b or "eval_before/model" in b) == (name != "process rewards")


def classifier(folder: str) -> None:
    """Makes the demo's policy with a head of one label."""
    from transformers import AutoModelForSequenceClassification

    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.tokenizer import load_tokenizer

    source = resolve("tiny", False)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    load_tokenizer(source, False).save_pretrained(folder)


def test_a_sampler_that_fails_ends_the_job_by_name(tmp_path):
    sections = {"rollout": {"staleness": 1}, "eval": {"every": 0}}
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: the reward is broken"):
        run_ranks(split_demo, 2, str(tmp_path / "run"), split(1), sections, 0, 2)


BAD = [
    (4, {"parallel": split(0)}, ["--parallel.rollout-ranks 0", "needs at least 1 rank that samples"]),
    (2, {"parallel": split(2)}, ["--parallel.rollout-ranks 2", "leave no rank to train (the job has 2)"]),
    (
        4,
        {"parallel": split(2, 2)},
        ["--parallel.rollout-ranks 2", "2 that score leave no rank to train (the job has 4)"],
    ),
    (4, {"parallel": {"rollout_ranks": 1}}, ["--parallel.rollout-ranks 1", "--parallel.placement split"]),
    (4, {"parallel": {"scoring_ranks": 1}}, ["--parallel.scoring-ranks 1", "--parallel.placement split"]),
    (4, {"rollout": {"staleness": 1}}, ["--rollout.staleness 1", "--parallel.placement split"]),
    (4, {"parallel": split(3), "rollout": {"tp": 2, "engine": "vllm"}}, ["--rollout.tp 2", "3 ranks that sample"]),
    (4, {"parallel": split(2, dp_shard=4)}, ["--parallel.dp-shard 4", "training has 2 ranks", "2 or -1"]),
    (4, {"parallel": split(1, sp=2)}, ["--parallel.sp 2", "must divide the 3 ranks that train"]),
    (4, {"parallel": split(1), "run": {"lockstep_debug": True}}, ["--run.lockstep-debug", "colocated"]),
    (
        5,
        {"parallel": split(1, 1, tp=3), "policy": {"backend": "megatron"}},
        ["--parallel.scoring-ranks 1", "of 3, or 0"],
    ),
    (
        4,
        {"parallel": split(1, 1), "reference": {"refresh_every": 2}},
        ["--parallel.scoring-ranks 1", "--reference.refresh-every 0"],
    ),
]


@pytest.mark.parametrize(("ranks", "sections", "parts"), BAD)
def test_a_placement_that_cannot_be_is_refused_in_one_line(ranks, sections, parts):
    with pytest.raises(ConfigError) as error:
        check(config(**sections), ranks)
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and all(part in lines[1] for part in parts), lines


def test_scorers_without_a_frozen_model_stand_by(tmp_path):
    sections = {"algo": {"kl_coef": 0.0, "updates_per_step": 2}, "run": {"steps": 2}}
    got = run_ranks(split_demo, 3, str(tmp_path / "run"), split(1, 1), sections)
    assert not got[1]["models"] and len(metrics(tmp_path / "run")) == 2


def test_the_plan_says_who_does_what():
    plan = plan_lines(config(parallel=split(4, 1, sp=1), rollout={"tp": 2, "staleness": 1, "engine": "vllm"}), 8)
    assert plan[0] == "ranks    8 = 3 to train (dp_shard 3), 1 for frozen models, 4 to sample (1 step ahead)"
    assert "2 engines of 2 ranks" in plan[1]
