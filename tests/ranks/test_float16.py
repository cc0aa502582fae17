"""float16 with a loss scale: gradients of float32 on any ranks, overflow that costs a step, and an exact resume."""

import math

import pytest
import torch

from spmdrl.config.checks import check
from spmdrl.config.divergence import divergence_problems
from spmdrl.config.fields import ConfigError
from spmdrl.config.schema import ModelConfig
from spmdrl.config.sft import SFTConfig
from spmdrl.policy.grad_guard import LossScale, scaled
from tests.ranks.cases import (
    build_policy,
    config,
    full_weights,
    gradients_of,
    relative,
    small_model,
    synthetic_batch,
    update_once,
)
from tests.ranks.harness import run_ranks
from tests.ranks.test_resume_exact import K, finish, go_on

FAR = 2.0**60
"""A scale at which every gradient is infinite in float16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("float16") / "model")


def policy_of(world, folder, dtype: str, **sections):
    cfg = config(model={"path": folder, "dtype": dtype}, **sections)
    return cfg, build_policy(cfg, world)


def gradient(world, folder, dtype: str, scale: float | None, chunked: bool, loss: float = 1.0):
    """Returns the gradient of one step; the loss is multiplied by a number by which the gradient is then divided."""
    cfg, policy = policy_of(world, folder, dtype, policy={"chunked_loss": chunked})
    if scale is not None:
        policy.loss_scale.scale = scale
    inner = policy.gradient

    def small(micros, objective, shared):
        plain, told = objective.loss, objective.token_loss
        objective.loss = lambda *args: with_loss(plain(*args), loss)
        objective.token_loss = lambda *args: scaled(told(*args), loss)
        return inner(micros, objective, shared)

    policy.gradient = small
    found = gradients_of(policy, lambda: update_once(cfg, world, policy, None, synthetic_batch()))
    return {name: x.double() / loss for name, x in found[0].items()}


def with_loss(result, factor: float):
    return type(result)(result.loss * factor, result.stats)


def compared(world, folder):
    """Returns how far float16's gradients are from float32's, then what an overflow does."""
    want = gradient(world, folder, "float32", None, True)
    far = {
        (chunked, scale, loss): relative(want, gradient(world, folder, "float16", scale, chunked, loss))
        for chunked in (True, False)
        for scale, loss in ((2.0**10, 1.0), (2.0**24, 2.0**-20), (1.0, 2.0**-20))
    }
    cfg, policy = policy_of(world, folder, "float16", optimizer={"bad_steps": 1})
    policy.loss_scale.scale = FAR
    before = {name: x.clone() for name, x in full_weights(policy).items()}
    over = update_once(cfg, world, policy, None, synthetic_batch())
    same = all(torch.equal(x, before[name]) for name, x in full_weights(policy).items())
    backed_off, counts = policy.loss_scale.scale, (policy.updates_done, policy.updates_due, policy.guard.row)
    policy.loss_scale.scale = 2.0**10
    fine = update_once(cfg, world, policy, None, synthetic_batch())
    moved = not all(torch.equal(x, before[name]) for name, x in full_weights(policy).items())
    return far, over, same, backed_off, counts, fine, moved


@pytest.mark.parametrize("ranks", [1, 2])
def test_layout_float16_has_the_gradient_of_float32_and_survives_overflow(folder, ranks):
    for far, over, same, backed_off, counts, fine, moved in run_ranks(compared, ranks, folder):
        for (chunked, scale, loss), distance in far.items():
            if scale == 1:
                assert distance > 0.02, f"chunked {chunked}: a gradient this small needs its scale"
            else:
                assert distance < 1e-2, (chunked, scale, loss, distance)
        assert same and counts == (0, 1, 0) and backed_off == FAR / 2
        assert (over["updates_overflowed"], over["updates_nonfinite"], over["loss_scale"]) == (1, 0, FAR / 2)
        assert not math.isfinite(over["grad_norm"]) and math.isfinite(over["loss"])
        assert moved and fine["updates_overflowed"] == 0 and math.isfinite(fine["grad_norm"])


def resumed(world, root, sections):
    """Makes a run whose scale overflows and grows, and one that goes on in its middle."""
    LossScale.INTERVAL = 2
    LossScale.__init__.__defaults__ = (2.0**19, 0)
    _, whole = finish(world, root / "whole", sections)
    if world.is_first:
        go_on(root / "whole", root / "resumed")
    torch.distributed.barrier()
    first, again = finish(world, root / "resumed", sections)
    return whole, first, again


def test_resume_in_float16_is_exact_and_keeps_the_scale(tmp_path):
    sections = {
        "model": {"path": "tiny", "dtype": "float16"},
        "eval": {"every": 0},
        "checkpoint": {"every": K, "keep": 9, "at_end": False},
    }
    whole, first, again = run_ranks(resumed, 2, tmp_path, sections)[0]
    assert first == K and all(torch.equal(x, again[name]) for name, x in whole.items())
    from tests.ranks.demo import metrics

    rows = metrics(tmp_path / "resumed")
    scales = [row["loss_scale"] for row in metrics(tmp_path / "whole")]
    assert scales == [row["loss_scale"] for row in rows] and len(set(scales)) > 1, scales
    assert max(row["logp_diff/max"] for row in rows) < 0.05, "the engine has the trainer's float16"


def test_loss_scale_moves_as_torchs_scaler():
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=LossScale.INTERVAL)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    finite = [True] * 2001 + [False, True, False, False] + [True] * 2000
    for each in finite:
        theirs.scale(weight.sum())  # creates the scale
        weight.grad = torch.full((1,), 1.0 if each else torch.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.adapt(each)
        assert ours.scale == theirs.get_scale()
    again = LossScale()
    again.restore(ours.state())
    assert again == ours and ours.scale == 2.0**15


def test_float16_at_the_least_scale_is_a_bad_step():
    scale = LossScale(1.0)
    assert not scale.can_shrink
    scale.adapt(False)
    assert scale.scale == 1.0


def test_float16_is_refused_where_nothing_scales_its_loss():
    with pytest.raises(ConfigError, match="--model.dtype float16: only the fsdp backend has a loss scale"):
        check(config(model={"dtype": "float16"}, policy={"backend": "megatron"}), 1)
    student = SFTConfig(model=ModelConfig(dtype="float16"))
    assert "--model.dtype float16" in divergence_problems(student, "teacher")[0]
    with pytest.raises(ValueError, match="--model.dtype float16: distillation supports no loss scale"):
        scaled(lambda *args: None, 2.0)  # type: ignore[arg-type]
