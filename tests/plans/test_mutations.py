"""Mutations of published layouts are refused for the reason that a sum by hand gives.

One of each kind: memory of training (optimizer, activations), of sampling and of a push, and the KV cache. The others
are in tests/long/test_plans.py. Settings that break rules are refused before a plan (tests/unit/test_plan_anchors.py).
"""

import pytest

from tests.plans.test_published import plan_of, verdict
from tests.unit.test_plan_anchors import ANCHORS, MUTATIONS, device

GB, GIB = 1e9, 1 << 30
PLANNED = [m for m in MUTATIONS if m["reason"] != "rules"]


def name_of(mutation: dict) -> str:
    return f"{mutation['anchor']}: {mutation['what']}"


def refused(mutation: dict) -> None:
    """Plans a mutation, and compares why it does not fit with its sum by hand."""
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


@pytest.mark.parametrize("mutation", [m for m in PLANNED if not m.get("long")], ids=name_of)
def test_a_mutation_is_refused_with_its_reason(mutation):
    refused(mutation)
