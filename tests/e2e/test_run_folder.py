"""Situations that a user meets in a run folder: other settings are refused, a new start keeps the old run, a full disk
ends the job by name, checkpoints are written beside training, and the command line shows them.
"""

import json
import resource
import shutil

import pytest

from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import steps_saved
from tests.e2e.runner import GONE_WITHIN, Job, argv, metrics
from tests.e2e.warm import run, succeed

pytestmark = pytest.mark.timeout(300)
FLAGS = argv(
    "--rollout.engine hf --rollout.assignment static --rollout.prompts_per_step 8 --eval.every 2 --eval.prompts 16 "
    "--checkpoint.every 1 --checkpoint.keep 2 --tracking.trackers jsonl --run.timeout 30"
)
TIMED = ("time/", "memory/", "tokens/s")


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Two runs of 5 steps, one of which writes its checkpoints while training goes on."""
    root = tmp_path_factory.mktemp("folder")
    flags = [*FLAGS, "--run.steps", 5, "--checkpoint.keep-every", 2, "--checkpoint.best", "eval/accuracy"]
    plain = succeed([*flags, "--run.dir", root / "plain"], ranks=2)
    beside = succeed([*flags, "--run.dir", root / "beside", "--checkpoint.background"], ranks=2)
    return {"root": root, "flags": flags, "plain": plain, "beside": beside}


def untimed(folder) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in metrics(folder)]


def test_background_changes_no_number_and_no_weight(story):
    root = story["root"]
    assert untimed(root / "plain") == untimed(root / "beside")
    for step in (4, 5):
        one, other = (root / name / "checkpoints" / f"step_{step}" for name in ("plain", "beside"))
        assert problems(one) == problems(other) == []
        weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, other)]
        assert weights[0] == weights[1]
    rows = metrics(root / "beside")
    assert sum("time/checkpoint_write" in row for row in rows) >= 2, "what it took is told where it ended"
    assert all("time/checkpoint_wait" in row for row in rows[1:]) and "time/checkpoint" in rows[1]
    assert not any("time/checkpoint_write" in row for row in metrics(root / "plain"))


def test_keep_as_asked_for(story):
    """The two newest, multiples of 2 and the best one stay; evaluations come before steps 1, 3, 5 and at the end."""
    for name in ("plain", "beside"):
        folder = story["root"] / name
        accuracy = {row["step"]: row["eval/accuracy"] for row in metrics(folder) if "eval/accuracy" in row}
        saved = steps_saved(folder / "checkpoints")
        assert {5, 4, 2} <= set(saved) and len(saved) <= 4
        told = json.loads((folder / "checkpoints" / "measured.json").read_text())
        assert {int(step) for step in told} == {2, 4, 5}
        # Step 3 began with the weights of step_2. The line of step 5 has the evaluation at the end of the run.
        assert told["2"] == {"eval/accuracy": accuracy[3]} and told["5"] == {"eval/accuracy": accuracy[5]}


def test_command_line_on_a_real_run(story):
    root = story["root"]
    shown = succeed(["list", root / "plain"], module="spmdrl.checkpoint")
    assert [line.split()[0] for line in shown.out] == [
        "step",
        *map(str, sorted(steps_saved(root / "plain" / "checkpoints"))),
    ]
    assert "fsdp dp_shard 2" in shown.out[-1] and "latest" in shown.out[-1] and shown.out[-1].endswith("ok")
    assert sum("best" in line for line in shown.out) == 1
    assert succeed(["verify", root / "plain"], module="spmdrl.checkpoint").out
    told = succeed(["diff", root / "plain", root / "beside"], module="spmdrl.checkpoint").out
    assert "  --checkpoint.background: False -> True" in told and "state: equal" in told
    assert any(line.startswith("model: ") and line.endswith("all equal") for line in told)
    told = succeed(["diff", root / "plain"], module="spmdrl.checkpoint").out
    assert "  step: 4 -> 5" in told and any("tensors differ, by at most" in line for line in told)


def test_resume_with_other_settings_is_refused_and_allowed(story, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(story["root"] / "plain", folder, symlinks=True)
    flags = [*story["flags"], "--run.dir", folder, "--optimizer.lr", "1e-3", "--run.steps", 6]
    before = (folder / "config.yaml").read_text(), untimed(folder)
    ended = run(flags)
    assert ended.rc == 1 and len(ended.messages) == 1, ended.show()
    assert "ValueError: " in ended.messages[0] and "--optimizer.lr: 0.0002 there, 0.001 here" in ended.messages[0]
    assert "--run.allow-changes" in ended.messages[0] and "Traceback" not in "\n".join(ended.err)
    assert ((folder / "config.yaml").read_text(), untimed(folder)) == before
    allowed = succeed([*flags, "--run.allow-changes"])
    assert any("--optimizer.lr: 0.0002 there, 0.001 here" in line for line in allowed.out), allowed.show()
    assert any(line.startswith("resumed from") for line in allowed.out), allowed.show()
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[5]["lr"] == 1e-3 and rows[4]["lr"] == 2e-4
    text = (folder / "config.yaml").read_text()
    assert "lr: 0.001" in text and "allow_changes: false" in text


def test_fresh_starts_over_and_keeps_the_old_run(story, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(story["root"] / "plain", folder, symlinks=True)
    flags = [*story["flags"], "--run.dir", folder, "--run.fresh", "--run.seed", 1, "--run.steps", 1]
    ended = succeed(flags)
    assert f"--run.fresh: {folder} is now {folder}.old-1" in ended.out, ended.show()
    assert not any(line.startswith("resumed from") for line in ended.out)
    assert untimed(tmp_path / "run.old-1") == untimed(story["root"] / "plain")
    assert problems(tmp_path / "run.old-1" / "checkpoints" / "step_5") == []
    assert [row["step"] for row in metrics(folder)] == [1] and "fresh: false" in (folder / "config.yaml").read_text()


def test_evaluate_one_checkpoint_after_the_other(story, tmp_path):
    """One folder for both: an evaluation leaves its log there, and is bound to nothing that one before left.

    All prompts there are, unless it is told otherwise.
    """
    root, rows = story["root"], tmp_path / "rows.jsonl"
    words = [f"{i:03d}".translate(str.maketrans("0123456789", "abcdefghij")) for i in range(300)]
    rows.write_text("".join(json.dumps({"prompt": f"{word}=", "answer": word[::-1]}) + "\n" for word in words))
    for step, bound, count in ((4, ["--eval.prompts", 8], 8), (5, ["--data.eval", rows, "--eval.samples", 2], 300)):
        model = root / "plain" / "checkpoints" / f"step_{step}" / "model"
        flags = [*argv("--rollout.engine hf --run.dir"), root / "plain", "--model.path", model, *bound]
        ended = succeed(flags, module="spmdrl.evaluate")
        told = json.loads(ended.out[-1])
        assert told["model"] == str(model) and 0 <= told["eval/accuracy"] <= 1, ended.show()
        assert (told["prompts"], told["samples"]) == (count, count * (1 if step == 4 else 2)), told
        said = [line for line in ended.out if line.startswith(f"{count} prompts from ")]
        assert said and ("(--eval.prompts 8)" in said[-1]) == (step == 4), ended.show()
    assert (root / "plain-eval" / "logs" / "rank_0.log").exists()
    assert not (root / "plain-eval" / "config.yaml").exists()


@pytest.mark.parametrize("more", [[], ["--checkpoint.background"]], ids=["in the step", "beside it"])
def test_full_disk_ends_the_job_by_name(story, tmp_path, more):
    """A limit on the size of files stands for a full disk: the write of the weights fails in the middle."""
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, hard))
    try:
        job = Job([*FLAGS, "--run.steps", 50, "--run.dir", folder, *more], ranks=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        ended = job.wait(120)
    finally:
        job.kill()
    assert not ended.timed_out and ended.rc != 0 and not ended.left, ended.show()
    assert len(ended.messages) == 1, ended.show()
    said = ended.messages[0]
    assert "checkpoint step_1 could not be written" in said and "File too large" in said, ended.show()
    assert "--checkpoint.keep" in said and "--run.dir" in said and "Traceback" not in ended.ours, ended.show()
    assert ended.ended - ended.stamp("spmdrl: rank") < GONE_WITHIN
    # A rank that had not heard of it yet may make the folder anew, which the next start removes; it is empty.
    left = [p for p in (folder / "checkpoints").rglob("*") if p.is_file()]
    assert left == [] and steps_saved(folder / "checkpoints") == []
