"""Groups of a rollout come whole to a judge of pairs, however they are sampled, cut, carried on or laid out."""

import json

import pytest

from tests.ranks.demo import metrics, train_demo, untimed
from tests.ranks.harness import run_ranks
from tests.unit.judge_stand_in import Answer, StandIn, written
from tests.unit.test_judge_pairs import better, shown

STEPS = 3
BASE = {
    "run": {"steps": STEPS},
    "model": {"path": "tiny", "dtype": "float64"},
    "rollout": {"samples_per_prompt": 4, "prompts_per_step": 4, "temperature": 2.0, "max_new_tokens": 8},
    "algo": {"updates_per_step": 1, "kl_coef": 0.0},
    "eval": {"every": 2, "samples": 2, "prompts": 4},
}
CASES = {
    "plain": {},
    "over-sampled": {"rollout": {"oversample": 2.0}},
    "carried on": {"rollout": {"oversample": 2.0, "partial_steps": 1, "max_new_tokens": 24}},
    "greedy": {"algo": {"preset": "remax", "advantage": "remax", "loss": "reinforce"}},
    "filtered": {"filter": {"keep": "mixed", "max_rounds": 9, "metric": "wins"}},
}


def by_text(number: int, asked: dict) -> Answer:
    """The response that comes first in the alphabet is better, but the judge has a taste for the place A."""
    a, b = shown(asked)
    return Answer(better("A" if a <= b or len(a) == len(b) else "B"))


def sections(case: str, file: str) -> dict:
    more = CASES[case] | {"reward": {"function": file}}
    return {name: BASE.get(name, {}) | more.get(name, {}) for name in BASE.keys() | more.keys()}


@pytest.mark.parametrize("case", CASES)
def test_layout_pairs_are_compared_alike_on_one_rank_and_two(case, tmp_path):
    server = StandIn(by_text)
    file = written(tmp_path, url=server.url, model="m", compare=2)
    rows, asked = [], []
    try:
        for ranks in (1, 2):
            run_ranks(train_demo, ranks, str(tmp_path / str(ranks)), sections(case, file))
            rows.append(untimed(metrics(tmp_path / str(ranks))))
            asked.append(sorted(json.dumps(shown(each)) for each in server.requests))
            server.requests.clear()
    finally:
        server.close()
    one, two = rows
    assert [row["step"] for row in one] == list(range(1, STEPS + 1))
    for a in rows[0] + rows[1]:
        assert 0 < a["reward/mean"] < 1 and a["reward/ungraded"] == 0
        assert a["reward/part/order_agreement"] < 1 == a["reward/part/answered"]
    if CASES[case].get("rollout"):
        # What is cut short depends on the speed of engines.
        return
    assert asked[0] == asked[1]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"microbatches"}:
            assert abs(a[name] - b[name]) < 1e-5, (a["step"], name, a[name], b[name])
    if case == "plain":
        # What one response wins, another loses.
        assert all(row["reward/mean"] == pytest.approx(0.5) for row in one)
        assert one[0]["eval/score"] == pytest.approx(0.5)
