"""Jobs that are killed in mid-epoch or in the middle of conversations go on exactly, by the same command."""

import gzip
import json

import pytest

from spmdrl.data.builtin import reverse_pairs
from tests.e2e.kills import VARIABLE, differences, untimed
from tests.e2e.runner import argv
from tests.e2e.warm import run, succeed
from tests.ranks.test_environment import TALK, WORLDS

pytestmark = pytest.mark.timeout(240)
ALL = "--run.steps 12 --eval.every 4 --checkpoint.every 3 --tracking.trackers jsonl --run.timeout 30"
JOBS = {
    # Five steps are an epoch.
    "sft": "--data.train builtin:reverse --data.eval builtin:reverse:eval --data.limit 320 --eval.rows 32 "
    "--sft.neftune 5",
    "preference": "--data.train {stream} --data.eval builtin:reverse-pairs:eval --data.rows-per-step 16 --eval.rows 32 "
    "--optimizer.lr 1e-4 --reference.refresh-every 4 --reference.mix 0.5",
    "reward_model": "--data.train {stream} --data.eval builtin:reverse-pairs:eval --data.rows-per-step 16 "
    "--eval.rows 32",
    "online_preference": "--rollout.engine hf --deterministic --data.limit 20 --rollout.prompts-per-step 4 "
    "--rollout.samples-per-prompt 4 --eval.prompts 8 --optimizer.lr 1e-4 --reference.refresh-every 4",
}


@pytest.fixture
def stream(tmp_path) -> str:
    """Pairs in a file that is read while it trains; five steps of 16 rows are an epoch."""
    rows = reverse_pairs(held_out=False)[:80]
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return str(path)


@pytest.mark.parametrize("job", JOBS)
def test_resume_of_a_job_after_a_kill_in_mid_epoch_is_bit_equal(job, stream, tmp_path):
    """SIGKILL of one of two ranks in its ninth step, the fourth of the second epoch, and the same command again."""
    module, flags = f"spmdrl.{job}", [*argv(ALL), *argv(JOBS[job].format(stream=stream))]
    kill = {"rank": 1, "phase": "update", "time": 9, "seconds": 0.0, "note": str(tmp_path / "note"), "job": module}
    succeed([*flags, "--run.dir", tmp_path / "whole"], module=module, ranks=2)
    cut = [*flags, "--run.dir", tmp_path / "cut"]
    ended = run(cut, module="tests.e2e.kills", ranks=2, env={VARIABLE: json.dumps(kill)})
    assert ended.rc and (tmp_path / "note").exists(), ended.show()
    assert (tmp_path / "cut" / "checkpoints" / "latest").resolve().name == "step_6"
    assert len(untimed(tmp_path / "cut")) in (7, 8), "steps after the checkpoint are done again"
    again = succeed(cut, module=module, ranks=2)
    assert any(line.startswith("resumed from") for line in again.out), again.show()
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    assert [row["step"] for row in untimed(tmp_path / "cut")] == list(range(1, 13))


TALKS = (
    "--rollout.engine hf --deterministic --data.train builtin:episodes --data.eval builtin:episodes:eval "
    "--data.limit 64 --reward.function environment --algo.advantage turn_rloo --rollout.prompts-per-step 4 "
    "--rollout.samples-per-prompt 4 --rollout.max-new-tokens 40 --rollout.max-prompt-tokens 16 "
    "--rollout.oversample 1.5 --rollout.partial-steps 2 --eval.every 0 --checkpoint.every 2 --run.steps 6 "
    "--tracking.trackers jsonl --run.timeout 30"
)


@pytest.mark.parametrize("world", ["Counts", "Echoes"])
def test_resume_of_conversations_after_a_kill_in_the_middle_of_them_is_bit_equal(world, tmp_path):
    """SIGKILL of one of two ranks while episodes of its fourth rollout wait for their worlds.

    Episodes carried over the checkpoint before it go on from the world's state, or from their turns run again.
    """
    template, env, note = tmp_path / "talk.jinja", tmp_path / "world.yaml", tmp_path / "note"
    template.write_text(TALK)
    env.write_text(f"environment: {WORLDS}:{world}\nsettings: {{pause: 0.1}}\n")
    flags = [*argv(TALKS), "--env", env, "--data.chat-template", template]
    succeed([*flags, "--run.dir", tmp_path / "whole"], ranks=2)
    kill = {"rank": 1, "phase": "rollout", "time": 4, "seconds": 0.25, "note": str(note)}
    cut = [*flags, "--run.dir", tmp_path / "cut"]
    ended = run(cut, module="tests.e2e.kills", ranks=2, env={VARIABLE: json.dumps(kill)})
    assert ended.rc and json.loads(note.read_text())["how"] == "inside" and not ended.left, ended.show()
    assert (tmp_path / "cut" / "checkpoints" / "latest").resolve().name == "step_2"
    at_checkpoint = untimed(tmp_path / "cut")[1]
    assert at_checkpoint["rollout/cut_prompts"] > 0 and at_checkpoint["rollout/cut_tokens"] > 0
    again = succeed(cut, ranks=2)
    assert any(line.startswith("resumed from") for line in again.out), again.show()
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
