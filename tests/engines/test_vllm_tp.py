"""One vLLM engine over two ranks, and two engines side by side, under real torchrun, against one rank alone.

Seeds belong to data, so the samples at temperature 1 are the same ones. A sum in another order (TP adds partial
products) differs by 1e-6 in logp: only a draw that lies so near an edge could come out otherwise, and none here does.
"""

from pathlib import Path

import pytest

from benchmarks._gpu_judge import judge
from tests.builds import no_vllm
from tests.e2e.runner import argv, metrics, succeed

pytestmark = [
    pytest.mark.skipif(bool(no_vllm()), reason=no_vllm()),
    pytest.mark.timeout(300),
]
FP32 = 1e-4
STEPS = 3
FLAGS = argv(
    f"--rollout.engine vllm --run.steps {STEPS} --rollout.prompts_per_step 16 --rollout.samples_per_prompt 4 "
    f"--rollout.assignment static --eval.every {STEPS} --eval.prompts 32 --eval.temperature 0 --checkpoint.no-at-end "
    "--tracking.trackers jsonl --run.timeout 60"
)
LAYOUTS = {
    "one rank": (0, 1, ""),
    "one engine on two ranks": (2, 2, ""),
    "two engines": (2, 1, ""),
    # vLLM takes the default process group for its own; here a rank of it has no engine.
    "one engine on the last two of three": (3, 2, "--parallel.placement split --parallel.rollout_ranks 2"),
}

STAGE_OF = {
    "one engine on two ranks": "ranks_tp2",
    "two engines": "ranks_tp1",
    "one engine on the last two of three": "ranks_split",
}
"""Layout -> the stage of benchmarks/first_gpu_run.py that runs it on GPUs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """Returns metrics.jsonl by layout."""
    out = {"before": set(map(str, Path("/dev/shm").iterdir()))}
    for name, (ranks, tp, more) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("run")
        succeed([*FLAGS, *argv(more), "--rollout.tp", tp, "--run.dir", folder], 120, ranks=ranks)
        out[name] = metrics(folder)
        # Stages on GPUs are judged the same: logp_diff, gradients, each rank's engine, and the sums over it.
        samplers = [1, 2] if "split" in more else list(range(max(1, ranks)))
        assert judge(folder, STEPS, samplers, "vllm", "cpu", 0.0)[0] == [], name
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity_of_engine_and_trainer(runs, layout):
    assert [row["step"] for row in runs[layout]] == [1, 2, 3]
    for row in runs[layout]:
        assert 0 < row["logp_diff/max"] < FP32, row


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_of_engines_does_not_change_the_run(runs, layout):
    """Samples (by rewards and lengths), greedy accuracy before and after, and updates agree between layouts."""
    for one, other in zip(runs["one rank"], runs[layout], strict=True):
        for name in ("reward/mean", "response_length/mean", "eval/accuracy"):
            assert other.get(name) == one.get(name), (name, one, other)
        for name in ("entropy/mean", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), (name, one, other)
    assert runs[layout][0]["eval/accuracy"] is not None and runs[layout][-1]["eval/accuracy"] is not None


def test_engine_on_two_ranks_leaves_no_shared_memory(runs):
    """A name that stays would keep the next job from starting, and two jobs at a time from living side by side."""
    left = set(map(str, Path("/dev/shm").iterdir())) - runs["before"]
    assert not [path for path in left if "cpushm" in path], left
