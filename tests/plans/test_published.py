"""Published layouts are planned as fitting (mutations: test_mutations.py; more layouts: tests/long/test_plans.py)."""

from unittest.mock import patch

import pytest

from spmdrl.config.checks import check
from spmdrl.config.load import from_command_line
from spmdrl.plan import run
from spmdrl.plan.gpus import GPUS, Gpu
from spmdrl.plan.report import verdict_lines
from tests.unit.test_plan_anchors import ANCHORS, MUTATIONS, ROOT


def plan_of(anchor: dict, flags: list[str], world: int, gpu: Gpu, stage: str = "all") -> run.Plan:
    """Plans a job. stage: `all` kinds of ranks, or only the `first`, the `last`, or the `middle` one of most."""
    cfg = from_command_line(["--config", str(ROOT / anchor["config"]), *anchor["flags"], *flags]).config
    # The engines of these jobs need not be installed to plan them.
    check(cfg, world, here=False)
    kinds_of = run.kinds_of

    def chosen(*args) -> list:
        kinds = kinds_of(*args)
        middle = max(kinds, key=lambda kind: kind.ranks)
        return {"all": kinds, "first": kinds[:1], "middle": [middle], "last": kinds[-1:]}[stage]

    with patch.object(run, "kinds_of", chosen):
        return run.plan(cfg, world, gpu)


def verdict(plan: run.Plan) -> str:
    return verdict_lines(plan)[-1]


def fits(anchor: dict) -> None:
    """Plans an anchor, and compares its numbers with those of its source and of the model's config."""
    plan = plan_of(anchor, [], anchor["gpus"], GPUS[anchor["gpu"]])
    assert plan.fits and "fits with" in verdict(plan), verdict(plan)
    assert sum(p.kind.ranks for p in plan.kinds) == anchor["gpus"]
    # The largest stage holds what the model's config says, norms and biases aside.
    told = anchor["largest_stage"]
    largest = max(p.rank.step.numbers for p in plan.kinds)
    assert largest / 1e9 == pytest.approx(told["shared_g"] + told["experts_g"], rel=0.01)
    trains = max((p for p in plan.kinds if p.rank.step.numbers), key=lambda p: p.rank.step.numbers)
    update = trains.rank.memory["update"]
    assert sum(n for tag, n in update.items() if "param" in tag) == pytest.approx(2 * largest, rel=0.01)
    if anchor["optimizer"] == "host":
        layout, ranks = anchor["layout"], anchor["placement"]["train"]
        copies = ranks // (layout["tp"] * layout["pp"]), ranks // (layout["ep"] * layout["etp"] * layout["pp"])
        mine = told["shared_g"] / copies[0] + told["experts_g"] / copies[1]
        assert trains.rank.step.host["optimizer on the host"] / 1e9 == pytest.approx(12 * mine, rel=0.01)
    # Every sequence of an engine has room for its full length once at least.
    samples = [p.engine for p in plan.kinds if p.engine]
    assert samples and all(e["sequences"] >= 1 and not e["unknown"] for e in samples)
    assert all(e["ranks"] == anchor["engine"]["ranks"] for e in samples)
    if seconds := anchor["reported"].get("seconds_per_step"):
        assert 0 < plan.seconds < seconds


@pytest.mark.parametrize("name", [name for name, anchor in ANCHORS.items() if not anchor.get("long")])
def test_a_published_layout_fits(name):
    fits(ANCHORS[name])


def test_an_engine_that_does_not_divide_the_heads_is_refused():
    (mutation,) = [m for m in MUTATIONS if m.get("seen") == "plan"]
    anchor = ANCHORS[mutation["anchor"]]
    with pytest.raises(ValueError, match=mutation["flag"]):
        plan_of(anchor, mutation["flags"], anchor["gpus"], GPUS[anchor["gpu"]])
