import json
from dataclasses import asdict, replace

import pytest
import yaml

from spmdrl.plan.gpus import GPUS, NEEDED, OPTIONAL, Gpu, gpu

L40S = Gpu("L40S", 44.4, 362, 0.864, 32, 12.5)


def test_known_by_name_in_either_case():
    assert gpu("h100") is gpu("H100") is GPUS["h100"]
    assert set(GPUS) == {"h100", "h200", "h20", "b200", "a100"}


def test_figures_are_of_the_data_sheets_and_never_the_sparse_ones():
    """CUDA reports slightly fewer GiB than the sheets print GB; sparse rates are twice the dense ones."""
    printed = {"h100": (80, 1979), "h200": (141, 1979), "h20": (96, 296), "b200": (180, 4500), "a100": (80, 624)}
    for name, (gb, sparse) in printed.items():
        it = GPUS[name]
        assert 0.98 * gb < it.memory_gib < gb
        assert it.matmul_tflops == pytest.approx(sparse / 2, rel=1e-3)
        assert it.gpus_per_node == 8 and it.network_gb_s < it.nvlink_gb_s < it.memory_tb_s * 1000


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
def test_a_file_describes_another(tmp_path, write):
    file = tmp_path / "l40s"
    file.write_text(write({key: asdict(L40S)[key] for key in NEEDED}))
    assert gpu(str(file)) == L40S
    file.write_text(write(asdict(L40S) | {"gpus_per_node": 4, "host_memory_gib": 500}))
    assert gpu(str(file)) == replace(L40S, gpus_per_node=4, host_memory_gib=500)


def test_an_unknown_one_is_told_how_to_be_added():
    with pytest.raises(ValueError) as raised:
        gpu("h300")
    message = str(raised.value)
    assert message.startswith("--gpu h300: ") and "\n" not in message
    for word in [*GPUS, *NEEDED, *OPTIONAL, "--gpu FILE"]:
        assert word in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory_gb": 48}, "has unknown fields: memory_gb"),
        ({"memory_gib": None}, "memory_gib None must be a number"),
        ({"memory_gib": "a lot"}, "memory_gib 'a lot' must be a number above 0"),
        ({"host_memory_gib": -1}, r"host_memory_gib -1 must be a number of at least 0 \(0: unknown\)"),
        ({"network_gb_s": 0}, "network_gb_s 0 must be a number above 0"),
        ({"nvlink_gb_s": float("nan")}, "nvlink_gb_s nan must be"),
        ({"matmul_tflops": True}, "matmul_tflops True must be"),
        ({"gpus_per_node": 2.5}, "gpus_per_node 2.5 must be a whole number"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, says):
    file = tmp_path / "gpu.yaml"
    file.write_text(yaml.safe_dump(asdict(L40S) | change))
    with pytest.raises(ValueError, match=says):
        gpu(str(file))


@pytest.mark.parametrize("text", ["", "- 1", "{", "name: x"], ids=["empty", "list", "broken", "incomplete"])
def test_a_file_without_the_fields_is_refused(tmp_path, text):
    file = tmp_path / "gpu.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="another GPU is a YAML or JSON file"):
        gpu(str(file))
