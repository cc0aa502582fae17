"""Mutations of published layouts are refused for the reason that a sum by hand gives."""

import pytest

from tests.long.test_plan_anchors import plan_of, verdict
from tests.unit.test_plan_anchors import ANCHORS, MUTATIONS, device

GB, GIB = 1e9, 1 << 30
HEAVY = [m for m in MUTATIONS if m["reason"] != "rules"]
"""They are planned; settings that break rules are refused before (tests/unit/test_plan_anchors.py)."""


@pytest.mark.parametrize("mutation", HEAVY, ids=lambda m: f"{m['anchor']}: {m['what']}")
def test_a_mutation_is_refused_with_its_reason(mutation):
    anchor = ANCHORS[mutation["anchor"]]
    gpu = device(mutation)
    # One kind of ranks that does not fit is enough; engines are alike on all of them.
    stage = mutation.get("stage", "middle" if mutation.get("phase") == "training" else "last")
    plan = plan_of(anchor, mutation["flags"], mutation.get("world", anchor["gpus"]), gpu, stage)
    assert not plan.fits and "does not fit" in verdict(plan), verdict(plan)
    need = float(mutation["sum"].split(" = ")[1].split(" GB of ")[0])
    (planned,) = plan.kinds
    sums = {phase: sum(tags.values()) for phase, tags in planned.rank.memory.items()}
    if mutation["reason"] == "kv cache":
        assert planned.engine["sequences"] == 0 and "KV cache" in verdict(plan), verdict(plan)
        return
    if planned.engine.get("lack") and mutation["phase"] == "rollout":
        # The engine's share does not hold its weights.
        assert planned.engine["weights"] + planned.engine["lack"] >= need * GB * 0.9
        assert "KV cache" in verdict(plan)
        return
    phases = ("logp", "update") if mutation["phase"] == "training" else (mutation["phase"],)
    most = max(sums.get(phase, 0) for phase in phases)
    assert most > gpu.memory_gib * GIB and most >= need * GB * 0.98, sums
    assert planned.peak()[0] in phases, sums
