"""The real demo, in process: 1 and 2 ranks train alike, one seed gives one run, a resumed run is the run."""

import time

import pytest

from tests.ranks.demo import STEPS, metrics, train_demo, untimed
from tests.ranks.harness import run_ranks

SEED = {"run": {"seed": 1}, "model": {"dtype": "float64"}}
"""A run in which no step's loss, a sum of terms of both signs, is near 0."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "run"
    began = time.monotonic()
    assert run_ranks(train_demo, 2, str(folder), SEED) == [(0, STEPS, 2 * STEPS)] * 2
    assert time.monotonic() - began < 100
    return folder


def test_layout_one_rank_and_two_train_to_the_same_loss(two_ranks, tmp_path):
    assert run_ranks(train_demo, 1, str(tmp_path / "run"), SEED) == [(0, STEPS, 2 * STEPS)]
    assert run_ranks(train_demo, 2, str(tmp_path / "sp"), SEED, sp=2) == [(0, STEPS, 2 * STEPS)] * 2
    one, two, sp = (untimed(metrics(f)) for f in (tmp_path / "run", two_ranks, tmp_path / "sp"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == list(range(1, STEPS + 1))
    for other in (two, sp):
        for a, b in zip(one, other, strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"microbatches"}:
                assert abs(a[name] - b[name]) < 1e-10, (a["step"], name, a[name], b[name])
    # It learns something at every step, on something.
    for row in one:
        assert abs(row["loss"]) > 1e-3 and row["grad_norm"] > 0.5 and row["lr"] > 0
        assert 0 < row["reward/mean"] < 1 and row["entropy/mean"] > 0.05 and row["advantage/nonzero"] > 0.3
        assert row["logp_diff/max"] < 1e-6
    assert one[-1]["kl/mean"] > 10 * max(one[0]["kl/mean"], 1e-6)
    assert {row["version"] for row in one} == set(range(1, STEPS + 1))
    assert all("eval/accuracy" in one[i] for i in (0, 2, 4)) and "eval/accuracy" not in one[1]
    assert len({row["loss"] for row in one}) == STEPS


OLDER = {
    "several updates": {"algo": {"old_logp": "rollout", "updates_per_step": 4}, "optimizer": {"lr": 2e-3}},
    "replayed": {"filter": {"replay_steps": 2}, "algo": {"updates_per_step": 1}},
    "carried over": {
        "rollout": {"oversample": 2.0, "partial_steps": 1, "temperature": 3.0, "max_new_tokens": 24},
        "algo": {"old_logp": "policy"},
    },
}
"""Sound runs whose update meets logp of other weights than its own."""


@pytest.mark.parametrize("case", OLDER)
def test_logp_diff_compares_engine_and_trainer_at_the_same_weights(case, tmp_path):
    """A threshold far below the change of one update does not end the run."""
    sections = {"optimizer": {"lr": 1e-2}} | OLDER[case] | {"run": {"steps": 3}, "eval": {"every": 0}}
    sections |= {"rollout": sections.get("rollout", {}) | {"logp_diff_stop": 1e-4}}
    run_ranks(train_demo, 2, str(tmp_path / "run"), sections)
    rows = untimed(metrics(tmp_path / "run"))
    assert len(rows) == 3 and all(0 < row["logp_diff/mean"] <= row["logp_diff/max"] < 1e-4 for row in rows), rows
    # The amount that a correction has to cover is a metric too: of all tokens, where the update begins.
    assert (max(row["mismatch/k3"] for row in rows) > 1e-3) == (case != "several updates"), rows


def test_two_runs_with_one_seed_are_identical(two_ranks, tmp_path):
    run_ranks(train_demo, 2, str(tmp_path / "again"), SEED)
    first, again = untimed(metrics(two_ranks)), untimed(metrics(tmp_path / "again"))
    assert first == again  # to the last digit
    assert (two_ranks / "samples.jsonl").read_text() == (tmp_path / "again" / "samples.jsonl").read_text()
    run_ranks(train_demo, 1, str(tmp_path / "other"), {"run": {"seed": 4, "steps": 1}})
    assert untimed(metrics(tmp_path / "other"))[0]["loss"] != first[0]["loss"]


def test_layout_queue_assignment_samples_the_same(two_ranks, tmp_path):
    """By law 3 the rank that draws a sample plays no part, so the luck of the queue shows in rounding alone."""
    run_ranks(
        train_demo, 2, str(tmp_path / "run"), {"rollout": {"assignment": "queue"}, "run": {"steps": 2, "seed": 1}}
    )
    static, queue = untimed(metrics(two_ranks)), untimed(metrics(tmp_path / "run"))
    for a, b in zip(static, queue, strict=False):
        for name in ("loss", "reward/mean", "grad_norm", "entropy/mean", "response_length/mean"):
            # The schedule is over other steps, so only the first step's later updates may differ at all.
            assert a["step"] > 1 or abs(a[name] - b[name]) < 1e-6, (a["step"], name)


@pytest.mark.parametrize("n", [1, 2])
def test_resume_continues_the_run_it_left(two_ranks, tmp_path, n):
    """After three steps, a kill and the same command, metrics of all five steps equal those of the run without it."""
    folder = str(tmp_path / "run")
    saving = SEED | {"checkpoint": {"every": 1, "keep": 1, "at_end": False}}
    got = run_ranks(train_demo, n, folder, saving, 3)
    assert got == [(0, 3, 6)] * n
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    assert run_ranks(train_demo, n, folder, saving) == [(3, STEPS, 2 * STEPS)] * n
    want, resumed = untimed(metrics(two_ranks)), untimed(metrics(folder))
    for name in ("eval/accuracy", "eval/score"):
        assert name in resumed[2]
    for a, b in zip(want, resumed, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"microbatches"}:
            assert a[name] == b[name] if n == 2 else abs(a[name] - b[name]) < 1e-10, (a["step"], name)
