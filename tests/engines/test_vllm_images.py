"""Real vLLM samples from prompts with images: log p is that of transformers, and caches never mix images or weights.

The measuring is done in `vision_probe.py`, one process a scenario.
"""

import json
from importlib.util import find_spec

import pytest

from tests.builds import no_vllm
from tests.e2e.runner import run

pytestmark = [
    pytest.mark.skipif(bool(no_vllm()), reason=no_vllm()),
    pytest.mark.timeout(300),
]
FP32 = 1e-5
"""Largest |dlogp| of the engine in float32 from transformers in float64."""
ROUNDING = 3
"""Bound of the same in units of the error of transformers' own float32, where that is above FP32."""
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]
LORA = ["lora"] if find_spec("peft") else []


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """Facts by scenario."""
    root = tmp_path_factory.mktemp("facts")
    ended = run([root, *FAMILIES, *LORA], 280, module="tests.engines.vision_probe")
    files = {file.stem: json.loads(file.read_text()) for file in root.glob("*.json")}
    assert ended.rc == 0 and set(files) == {*FAMILIES, *LORA}, ended.show()
    for name, facts in files.items():
        assert "failed" not in facts, f"{name}: {facts['failed']}\n{ended.show()}"
    return files


def check(row: dict, tokens: int) -> None:
    """Holds one row of facts to the bounds; samples that are all alike prove nothing."""
    assert row["engine"] < max(FP32, ROUNDING * row["hf"]) and row["hf"] < 1e-4, row
    assert row["tokens"] >= tokens and row["spread"] > 0.1 and row["placeholders"] == 0, row


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_of_samples_from_no_one_and_two_images(measured, family):
    check(measured[family]["rows"], 36)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tokens_with_different_images_share_no_prefix(measured, family):
    facts = measured[family]
    assert facts["same tokens"] and facts["difference of the images"] > 0.1, facts
    check(facts["mirrored"], 10)
    check(facts["again"], 15)


@pytest.mark.parametrize("family", FAMILIES)
def test_stale_features_of_images_are_dropped_by_a_push(measured, family):
    facts = measured[family]
    assert facts["towers"] > 10, "checksums cover the tower"
    check(facts["changed tower"], 10)
    # The same push without the reset is wrong by far: the check above can see the fault.
    assert facts["without reset"]["engine"] > 0.01, facts
    told = facts["corrupt"]
    assert told["push"].startswith("CorruptWeightsError") and told["version"] is None and told["name"], told


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_after_sleep(measured, family):
    facts = measured[family]
    assert facts["features asleep"] == 0 and facts["version after level 2"] is None
    check(facts["after level 1"], 15)
    check(facts["after level 2"], 15)


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_are_never_sampled(measured, family):
    """Their logits are the largest; log p is that of the other tokens alone."""
    for row in measured[family]["likely placeholders"]:
        assert row["likelihood of placeholders"] > 0.99, row
        check(row, 25)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_whose_ids_and_images_disagree_are_refused(measured, family):
    facts = measured[family]["refusals"]
    for name in ("an image too few", "without images", "not expanded"):
        assert facts[name].startswith("ValueError: request (") and "placeholders of image features" in facts[name], (
            facts
        )
    if "video" in facts:
        assert facts["video"].startswith("ValueError: request (") and "the placeholder of a video" in facts["video"]
    assert facts["left"] == 0 and facts["held images"] <= 4


@pytest.mark.skipif(not LORA, reason="PEFT is not installed")
def test_parity_of_adapters_beside_a_tower(measured):
    facts = measured["lora"]
    check(facts["before"], 36)
    check(facts["after"], 36)


def test_nothing_of_torchvision_is_left_in_the_process(measured):
    for name, facts in measured.items():
        assert facts["torchvision"] == [False, []], name
