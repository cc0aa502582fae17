"""Law 5 with the HF engine: it never samples from wrong weights. Buckets, digests, versions."""

import pytest
import torch

from spmdrl.engines.engine import Request, StaleEngineError
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.policy.models import Models
from spmdrl.session.device_table import Memory
from spmdrl.session.engine_check import EngineCheck
from spmdrl.session.transfer import Transfer
from spmdrl.tracking.metrics import Timer
from spmdrl.weights.reshard import CorruptWeightsError
from tests.ranks.cases import build_policy, config, full_weights, small_model, synthetic_batch, update_once
from tests.ranks.harness import run_ranks


def request(version: int) -> Request:
    return Request((0, 0), [1, 5, 6], 7, version, 3)


def refused(engine, version: int) -> str:
    try:
        engine.submit(request(version))
    except StaleEngineError as error:
        return str(error)
    return ""


def sample_all(engine, version) -> list[int]:
    engine.submit(request(version))
    while True:
        if done := engine.poll():
            assert done[0].version == version
            return done[0].tokens


def engine_life(world, folder, level):
    """Visits every place in a run where an engine might sample from weights it should not have."""
    cfg = config(model={"path": folder}, rollout={"sleep_level": level, "push_bucket_mib": 1})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    memory = Memory(cfg, Models(policy), engine, Timer(), world)
    seen = {"before any push": refused(engine, 0)}
    with memory.rollout_phase():
        seen["pushed"] = refused(engine, 1), refused(engine, -1), memory.last_push.version, memory.last_push.deep
        first = sample_all(engine, 0)
    size = memory.last_push.bytes
    with memory.training_phase():
        seen["asleep"] = refused(engine, 0), engine.version
        update_once(cfg, world, policy, None, synthetic_batch())
        seen["trained"] = refused(engine, policy.version), engine.version
    engine.wake("weights")
    engine.wake("kv_cache")
    seen["awake, not pushed"] = refused(engine, policy.version), refused(engine, 0), engine.version
    engine.sleep(level)
    with memory.rollout_phase():
        seen["pushed again"] = refused(engine, 1), refused(engine, 0), memory.last_push.version
        second = sample_all(engine, 1)
    held = {n: p.detach() for n, p in engine.model.named_parameters()}
    want = full_weights(policy)
    same = held.keys() == want.keys() and all(torch.equal(held[n], want[n]) for n in want)
    memory.last_push = None
    with memory.training_phase():
        pass
    with memory.rollout_phase():  # nothing new: level 2 has to push all the same, the others not
        seen["unchanged"] = memory.last_push is not None, sample_all(engine, 1) == second
    return seen, first, second, same, size == sum(x.numel() * 4 for x in want.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_stale_engine_refuses_until_it_holds_the_version(folder, n, level):
    results = run_ranks(engine_life, n, folder, level)
    for seen, first, second, same, size in results:
        assert "holds no weights, the trainer is at version 0" in seen["before any push"]
        ahead, behind, version, deep = seen["pushed"]
        assert "holds weight version 0, the trainer is at version 1" in ahead and behind
        assert version == 0 and deep
        message, held = seen["asleep"]
        assert (held is None and "holds no weights" in message) if level == 2 else held == 0
        message, held = seen["trained"]
        assert "the trainer is at version 1: push the weights" in message and held in (0, None)
        ahead, old, held = seen["awake, not pushed"]
        assert ahead and (held is None and "holds no weights" in old if level == 2 else held == 0)
        now, old, version = seen["pushed again"]
        assert now == "" and "holds weight version 1, the trainer is at version 0" in old and version == 1
        assert seen["unchanged"] == (level == 2, True)
        assert same and size
        assert len(first) == len(second) == 3
    assert all(r[1:3] == results[0][1:3] for r in results)


def corrupted(world, folder, how):
    """Corrupts a bucket on its way on every rank: one alone would end the job, and nobody could repair it."""
    cfg = config(model={"path": folder})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    transfer = Transfer(world, policy, engine, torch.float32, 1 << 14)
    transfer.push(0)
    load, report = engine.load, []

    def tampered(buckets, version):
        def given():
            for i, bucket in enumerate(buckets):
                if i == 1:
                    # A tensor that a rank holds whole is the policy's own, and others' rows arrive checked.
                    name = list(bucket)[-1]
                    x = bucket[name].flatten().clone()
                    if how == "element":
                        x[len(x) // 2] += 1e-3
                    elif how == "sign":
                        x[3] = -x[3]
                    elif how == "missing":
                        del bucket[name]
                    if how != "missing":
                        bucket[name] = x.view(bucket[name].shape)
                yield bucket

        load(given(), version)

    engine.load, policy.version = tampered, 1
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.01)
    try:
        transfer.push(1)
    except CorruptWeightsError as error:
        report.append(str(error))
    after = [refused(engine, 0), refused(engine, 1)] if report else []
    engine.load = load
    pushed = transfer.push(1)
    return report, after, engine.version, refused(engine, 1), pushed.deep


@pytest.mark.parametrize("how", ["element", "sign", "missing"])
def test_stale_corrupt_push_is_refused_and_the_engine_too(folder, how):
    for n in (1, 2):
        for (message,), after, version, now, deep in run_ranks(corrupted, n, folder, how):
            assert "the engine's memory does not contain version 1" in message and deep
            assert all("the engine holds no weights" in m for m in after) and len(after) == 2
            assert version == 1 and now == ""  # A clean push repairs it.


def interrupted(world, folder):
    """Stops a push half way: no version is left, not even the old one, whose weights are half gone."""
    cfg = config(model={"path": folder})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    transfer = Transfer(world, policy, engine, torch.float32, 1 << 14)
    transfer.push(0)
    plan = transfer.routes["model"].plan
    run = plan.run

    def half(pieces):
        for i, bucket in enumerate(run(pieces)):
            if i == 2:
                raise ConnectionError("the other node is gone")
            yield bucket

    plan.run = half
    with pytest.raises(ConnectionError):
        transfer.push(1)
    return policy.version, engine.version, refused(engine, 0), refused(engine, 1)


def test_stale_interrupted_push_leaves_nothing_to_sample_from(folder):
    policy, engine, old, ahead = run_ranks(interrupted, 1, folder)[0]
    assert policy == 0 and engine is None
    assert all("the engine holds no weights" in message for message in (old, ahead))


class Leaking(HFEngine):
    """Reports another log p where other rows wait or run."""

    def poll(self):
        done = super().poll()
        for made in done if self.groups or self.waiting else []:
            made.logp[-1] += 0.01
        return done


def checked(world, folder):
    """Returns what the check of an engine says of a right one and of a wrong one, and what else it changes."""
    cfg, found = config(model={"path": folder}, rollout={"sleep_level": 2}, policy={"offload": "host"}), []
    policy = build_policy(cfg, world)
    for kind in (HFEngine, Leaking):
        engine, timer = kind(cfg, world, {2}), Timer()
        memory = Memory(cfg, Models(policy), engine, timer, world)
        memory.check = EngineCheck(cfg, world, policy, engine, 0)
        state, message = torch.get_rng_state(), ""
        with memory.rollout_phase():
            sampled, due = memory.check.sampled.clone(), memory.check.due
        try:
            with memory.training_phase():
                pass
        except ValueError as error:
            message = str(error)
        with memory.rollout_phase():
            first = sample_all(engine, 0)
        kept = torch.equal(state, torch.get_rng_state()) and engine.version == policy.version == 0
        same = torch.equal(sampled, memory.check.sampled) and due and not memory.check.due
        found.append((message, kept and same, sampled, first, sorted(timer.flush())))
    return found


def test_stale_or_wrong_engines_are_refused_on_every_rank_after_the_first_push(folder):
    (right, wrong), (right_1, wrong_1) = run_ranks(checked, 2, folder)
    assert right[0] == "" and wrong[0] == wrong_1[0]
    assert wrong[0].startswith("--rollout.engine hf computes qwen2 wrongly in float32: log p of 2"), wrong
    assert "0.01 at most" in wrong[0] and all(x[1] for x in (right, wrong, right_1, wrong_1))
    assert torch.equal(right[2], right_1[2]) and right[2][:, 0].tolist() == [5, 9, 9, 14]
    assert right[3] == wrong[3] and right[4] == ["time/push", "time/sleep", "time/wake"]
