"""SIGKILL of a rank at seeded moments of named phases, and the same command again: the same run to the last bit."""

import json

import pytest

from tests.e2e.kills import FLAGS, PHASES, VARIABLE, differences, story, untimed
from tests.e2e.runner import succeed

pytestmark = pytest.mark.timeout(600)
STEPS = 10
KILLS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def record(root):
    return story(root, KILLS, STEPS, seed=5)


def test_resume_after_every_kill_is_bit_equal_to_a_run_without(record):
    assert record["odd"] == []
    assert len(record["kills"]) == KILLS and {kill["phase"] for kill in record["kills"]} == set(PHASES)
    assert {kill["rank"] for kill in record["kills"]} == {0, 1}
    assert record["runs"] and all(found == [] for found in record["runs"]), record


def test_resume_went_on_and_not_from_the_start(record, root):
    saved = [kill["saved"] for kill in record["kills"]]
    assert len(set(saved)) > 2, saved
    rows = untimed(root / "run_1")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["grad_norm"] for row in rows}) > STEPS // 2 and "eval/accuracy" in rows[5]


def test_resume_differences_are_seen(record, root, tmp_path):
    """The comparison can fail: it sees one changed bit of one number, and one changed file."""
    rows = [json.loads(line) for line in (root / "run_1" / "metrics.jsonl").read_text().splitlines()]
    rows[3]["loss"] += 1e-16 + abs(rows[3]["loss"]) * 2**-52
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoints").symlink_to(root / "run_1" / "checkpoints")
    assert [d.split(" ")[2] for d in differences(root / "whole", tmp_path)] == ["loss"]
    latest = tmp_path / "one" / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    (tmp_path / "one" / "metrics.jsonl").write_bytes((root / "run_1" / "metrics.jsonl").read_bytes())
    manifest = json.loads((root / "run_1" / "checkpoints" / "latest" / "MANIFEST.json").read_text())
    manifest["files"]["model/model.safetensors"]["xxh3_128"] = "0" * 32
    (latest / "MANIFEST.json").write_text(json.dumps(manifest))
    assert differences(root / "whole", tmp_path / "one") == ["model/model.safetensors: not the same file"]


def test_restart_by_torchrun_goes_on_from_the_last_step(record, root, tmp_path):
    """With `--max-restarts 1` rank 1 dies in its third update; both ranks start again, and end as if undisturbed."""
    kill = {"rank": 1, "phase": "update", "time": 3, "seconds": 0.0, "note": str(tmp_path / "note")}
    ended = succeed(
        [*FLAGS, "--run.steps", STEPS, "--run.dir", tmp_path / "run"],
        180,
        ranks=2,
        module="tests.e2e.kills",
        launch=("--max-restarts", "1"),
        env={VARIABLE: json.dumps(kill)},
    )
    assert (tmp_path / "note").exists(), "it was killed"
    said = [line for line in ended.out if line.startswith("resumed from")]
    assert len(said) == 1 and said[0].endswith("step_2: step 2"), ended.show()
    assert differences(root / "whole", tmp_path / "run") == []
