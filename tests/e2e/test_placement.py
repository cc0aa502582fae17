"""Split placement as a user starts it: torchrun, one rank trains, one scores, one samples a step ahead."""

import pytest

from tests.e2e.runner import GONE_WITHIN, argv, metrics
from tests.e2e.warm import run, succeed

pytestmark = pytest.mark.timeout(200)
STEPS = 12
FLAGS = argv(
    "--parallel.placement split --parallel.rollout_ranks 1 --rollout.staleness 1 --rollout.engine hf "
    f"--run.steps {STEPS} "
    "--algo.kl_coef 0.01 --rollout.prompts_per_step 16 --eval.every 6 --eval.prompts 64 --tracking.trackers jsonl "
    "--run.timeout 60"
)
BROKEN = """
calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls > 300:
        raise RuntimeError("nobody can grade this")
    return float(solution_str == ground_truth)
"""


def test_a_split_run_ends_with_all_that_a_run_leaves(tmp_path):
    folder = tmp_path / "run"
    ended = succeed([*FLAGS, "--parallel.scoring_ranks", "1", "--run.dir", folder], 150, ranks=3)
    assert ended.out[0] == "ranks    3 = 1 to train (dp_shard 1), 1 for frozen models, 1 to sample (1 step ahead)"
    assert ended.out[-1].startswith(f"run {folder}  checkpoint {folder / 'checkpoints' / 'latest'}"), ended.show()
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["rollout/staleness"] == 0 and all(0 < row["rollout/staleness"] <= 1 for row in rows[1:])
    assert ["eval/accuracy" in row for row in rows] == [step in (0, 6, STEPS - 1) for step in range(STEPS)]
    for name in ("kl/mean", "time/rollout", "time/update", "time/push", "memory/engine_weights_gib", "tokens/s"):
        assert name in rows[1], name
    assert {p.name for p in (folder / "checkpoints" / f"step_{STEPS}").iterdir()} == {"model", "state", "MANIFEST.json"}
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 4 * STEPS


def test_a_reward_that_fails_on_a_rank_that_samples_ends_those_that_train(tmp_path):
    (tmp_path / "reward.py").write_text(BROKEN)
    args = [*FLAGS, "--run.dir", tmp_path / "run", "--reward.function", tmp_path / "reward.py"]
    ended = run(args, 100, ranks=2)
    assert ended.rc != 0 and not ended.left, ended.show()
    assert len(ended.messages) == 1 and "nobody can grade this" in ended.messages[0], ended.show()
    assert ended.messages[0].startswith("spmdrl: rank 1 on "), ended.show()
    assert ended.ended - ended.stamp("spmdrl: rank 1 on ") < GONE_WITHIN, ended.show()
