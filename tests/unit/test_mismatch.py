"""|logp of engine - logp of trainer| of a step has a threshold that warns, and one that ends the job."""

import math

import pytest

from spmdrl.rl.compose import compose
from spmdrl.rl.describe import check_mismatch
from tests.ranks.cases import config

WARN, STOP = 0.1, 1.0


def told(mean: float | None, warn: float = WARN, stop: float = STOP, **sections) -> str:
    sections["rollout"] = sections.get("rollout", {}) | {"logp_diff_warn": warn, "logp_diff_stop": stop}
    values = {"loss": 1.0} if mean is None else {"logp_diff/mean": mean, "logp_diff/max": 9.0}
    return check_mismatch(7, values, config(**sections))


@pytest.mark.parametrize("mean", [0.0, 1e-6, WARN])
def test_nothing_is_said_up_to_the_threshold(mean):
    assert told(mean) == ""


@pytest.mark.parametrize("mean", [WARN * 1.01, 0.5, STOP])
def test_a_warning_above_the_first_threshold(mean):
    text = told(mean)
    assert text.startswith(f"step 7: |logp of engine - logp of trainer| is {mean:.4g} in the mean, above ")
    assert "--rollout.logp-diff-warn 0.1" in text and "logp_diff/max" in text and "--correction.kind" in text
    assert "\n" not in text


@pytest.mark.parametrize("mean", [STOP * 1.01, 50.0, math.inf, math.nan])
def test_the_end_above_the_second_threshold(mean):
    with pytest.raises(ValueError, match=r"step 7: .* above --rollout.logp-diff-stop 1: .*raise the threshold") as e:
        told(mean)
    assert f"is {mean:.4g} in the mean" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("mean", [0.5, 50.0, math.inf, math.nan])
def test_a_threshold_of_0_is_none(mean):
    assert told(mean, warn=0.0, stop=0.0) == ""
    assert "logp-diff-warn" in told(mean, stop=0.0)
    assert told(min(mean, STOP) if mean == mean else 0.5, warn=0.0) == ""


def test_not_a_number_is_above_any_threshold():
    assert "is nan in the mean" in told(math.nan, stop=0.0)
    with pytest.raises(ValueError, match="logp-diff-stop"):
        told(math.nan, warn=0.0)


def test_a_stop_below_the_warning_stops():
    with pytest.raises(ValueError, match="logp-diff-stop 0.01"):
        told(0.05, stop=0.01)


@pytest.mark.parametrize(
    ("most", "sections"),
    [
        (1e-3, {"model": {"dtype": "float32"}}),
        (0.1, {"model": {"dtype": "bfloat16"}}),
        (0.1, {"model": {"dtype": "float32"}, "rollout": {"quantization": "int8"}}),
        (0.1, {"model": {"dtype": "float32"}, "rollout": {"top_p": 0.9}}),
    ],
)
def test_the_threshold_by_default_follows_what_sets_engine_and_trainer_apart(most, sections):
    cfg = config(**sections)
    assert cfg.rollout.logp_diff_warn is None
    assert check_mismatch(7, {"logp_diff/mean": most * 0.99}, cfg) == ""
    assert f"--rollout.logp-diff-warn {most:g}: " in check_mismatch(7, {"logp_diff/mean": most * 1.01}, cfg)


def test_a_step_without_the_number_is_passed_over():
    """No token had an advantage, so none was run."""
    assert told(None) == "" and told(None, warn=1e-9, stop=1e-9) == ""


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({}, "no setting of this run explains the difference"),
        ({"rollout": {"quantization": "int8"}}, "they may differ because of --rollout.quantization int8;"),
        ({"model": {"dtype": "bfloat16"}}, "they may differ because of --model.dtype bfloat16;"),
        (
            {"rollout": {"staleness": 1, "partial_steps": 2}},
            # Tokens of carried samples that are older still are not compared.
            "they may differ because of --rollout.staleness 1;",
        ),
    ],
)
def test_what_sets_engine_and_trainer_apart_is_named(sections, names):
    assert names in told(0.5, **sections)
    with pytest.raises(ValueError, match=names.rstrip(";")):
        told(5.0, **sections)


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        ({}, "none"),
        ({"rollout": {"quantization": "int8"}}, "tis_token"),
        ({"rollout": {"quantization": "fp8"}}, "tis_token"),
        ({"rollout": {"quantization": "int8"}, "correction": {"kind": "none"}}, "none"),
        ({"rollout": {"quantization": "int8"}, "algo": {"old_logp": "rollout"}}, "none"),
    ],
)
def test_a_quantized_engine_is_corrected_unless_told_otherwise(sections, kind):
    assert compose(config(**sections)).correction == kind
