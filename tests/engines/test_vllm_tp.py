"""One vLLM engine over two ranks, and two engines side by side, under real torchrun, against one rank alone.

Learning is compared greedily drawn: the temperature of a rollout must be above 0, so it is set so low that the best
token is all but certain. At temperature 1 a sum in another order (TP adds partial products) may move a draw that lies on
an edge, and everything after it.
"""

from importlib.util import find_spec

import pytest

from tests.e2e.runner import metrics, succeed

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]
FP32 = 1e-4
STEPS = 3
FLAGS = ("--rollout.engine", "vllm", "--run.steps", STEPS, "--rollout.prompts_per_step", "16", "--rollout.samples_per_prompt",
         "4", "--rollout.assignment", "static", "--checkpoint.no-at-end", "--tracking.trackers", "jsonl", "--eval.every",
         "3", "--eval.prompts", "32", "--eval.temperature", "0", "--run.timeout", "60")
LAYOUTS = {"one rank": (0, 1), "one engine on two ranks": (2, 2), "two engines": (2, 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    """metrics.jsonl by layout."""
    out = {}
    for name, (ranks, tp) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("run")
        succeed([*FLAGS, "--rollout.tp", tp, "--run.dir", folder], 120, ranks=ranks)
        out[name] = metrics(folder)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity_of_engine_and_trainer(runs, layout):
    assert [row["step"] for row in runs[layout]] == [1, 2, 3]
    for row in runs[layout]:
        assert 0 < row["logp_diff/max"] < FP32, row


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_of_engines_does_not_change_greedy_accuracy(runs, layout):
    """Before training every token is the same; after 3 updates one of 32 prompts may sit on an edge."""
    one, other = runs["one rank"], runs[layout]
    assert one[0]["eval/accuracy"] == other[0]["eval/accuracy"]
    assert abs(one[-1]["eval/accuracy"] - other[-1]["eval/accuracy"]) <= 1 / 32


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_of_engines_does_not_change_the_samples(runs, layout):
    """Seeds belong to data: the same draws at temperature 1, so the same rewards and losses up to float noise."""
    for one, other in zip(runs["one rank"], runs[layout], strict=True):
        assert other["reward/mean"] == pytest.approx(one["reward/mean"], abs=1 / 64), (one, other)
        assert other["entropy/mean"] == pytest.approx(one["entropy/mean"], rel=0.02)
        assert other["response_length/mean"] == pytest.approx(one["response_length/mean"], rel=0.01)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
