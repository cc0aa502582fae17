"""Describes GPUs for plans: memory, matmul throughput and link bandwidths, from a built-in table or a file.

Memory is the total reported by `torch.cuda.mem_get_info`, which is less than the product name suggests: an 80 GB H100
reports 79.1 GiB. A plan counts the CUDA context and NCCL buffers separately. Rates are the dense bfloat16 peaks from
NVIDIA's data sheets. No job reaches peak rates, so times computed from them are lower bounds. Link speeds are per
direction, i.e. half of the NVLink and PCIe bandwidths in data sheets (PCIe 5: 128 GB/s, PCIe 4: 64 GB/s). One network
card per GPU is assumed.

Sources:
    H100 SXM, https://www.nvidia.com/en-us/data-center/h100/: 989 TFLOPS, 3.35 TB/s, NVLink 900 GB/s; DGX H100
        has eight 400 Gb/s network cards and 2 TB for the host, https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
    H200 SXM, https://www.nvidia.com/en-us/data-center/h200/: like the H100, but with 141 GB at 4.8 TB/s
    H20, 96 GB: there is no public data sheet. 148 TFLOPS, 4.0 TB/s, NVLink 900 GB/s are figures published by server
        vendors; 95.0 GiB is from an error message, https://github.com/modelscope/DiffSynth-Studio/issues/1238
    B200, https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html: 2.25 PFLOPS, NVLink 1.8 TB/s;
        178.35 GiB and 7.67 TB/s as reported by the driver, https://github.com/pytorch/ao/pull/4002
    A100 SXM4 80 GB, https://www.nvidia.com/en-us/data-center/a100/: 312 TFLOPS, 2.04 TB/s, NVLink 600 GB/s; DGX A100
        has 200 Gb/s network cards
"""

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Gpu:
    """One GPU and its node."""

    name: str
    """Name shown in the plan."""
    memory_gib: float
    """Memory reported by CUDA, in GiB (2**30 bytes)."""
    matmul_tflops: float
    """Peak dense bfloat16 matmul throughput in TFLOPS (1e12 floating-point operations per second)."""
    memory_tb_s: float
    """Memory bandwidth in TB/s (1e12 bytes per second)."""
    nvlink_gb_s: float
    """Bandwidth to the other GPUs of the node, per direction, in GB/s (1e9 bytes per second)."""
    network_gb_s: float
    """Bandwidth to other nodes (this GPU's share of the network cards), per direction, in GB/s."""
    gpus_per_node: int = 8
    """Number of GPUs per node."""
    host_gb_s: float = 0.0
    """Bandwidth to host memory, per direction, in GB/s. 0 means unknown; copies then count as 0 s."""
    host_memory_gib: float = 0.0
    """Host memory per node in GiB. 0 means unknown; a plan then reports host memory use without checking a limit."""


HOST = 2000.0  # GiB; a 2 TB host has 2,048 GiB, but the operating system uses some of it
NODE: dict[str, Any] = {"host_memory_gib": HOST, "host_gb_s": 64}
"""Host memory and link speed of an eight-GPU node with PCIe 5.0."""

GPUS = {
    "h100": Gpu("H100 SXM 80 GB", 79.1, 989, 3.35, 450, 50, **NODE),
    "h200": Gpu("H200 SXM 141 GB", 139.8, 989, 4.8, 450, 50, **NODE),
    "h20": Gpu("H20 96 GB", 95.0, 148, 4.0, 450, 50, **NODE),
    "b200": Gpu("B200 180 GB", 178.3, 2250, 7.67, 900, 50, **NODE),
    "a100": Gpu("A100 SXM 80 GB", 79.1, 312, 2.04, 300, 25, host_memory_gib=HOST, host_gb_s=32),
}
"""Known GPUs, by their `--gpu` name."""

NEEDED = [f.name for f in fields(Gpu) if f.default is MISSING]
OPTIONAL = [f.name for f in fields(Gpu) if f.default is not MISSING]
HOW_TO_ADD = (
    f"another GPU is a YAML or JSON file with {', '.join(NEEDED)} (optional: {', '.join(OPTIONAL)}), "
    "given as --gpu FILE"
)


def gpu(name_or_file: str) -> Gpu:
    """Return a GPU given its name (`h100` or `H100`) or the path of a file that describes one.

    Raises:
        ValueError: the name is unknown or the file is invalid; the message explains how to add a GPU.
    """
    known = GPUS.get(name_or_file.lower())
    if known:
        return known
    file = Path(name_or_file).expanduser()
    if not file.is_file():
        raise ValueError(f"--gpu {name_or_file}: neither one of {', '.join(GPUS)} nor a file; {HOW_TO_ADD}")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))  # a YAML parser also reads JSON
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--gpu {name_or_file}: cannot be read ({type(error).__name__}: {error}); {HOW_TO_ADD}"
        ) from error
    return _from_file(name_or_file, values)


def _from_file(path: str, values: Any) -> Gpu:
    """Validate the fields of a file and build a Gpu from them."""
    if not isinstance(values, dict):
        raise ValueError(f"--gpu {path}: contains no fields; {HOW_TO_ADD}")
    unknown = [str(key) for key in values if key not in NEEDED + OPTIONAL]
    missing = [key for key in NEEDED if key not in values]
    if unknown or missing:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing)
        wrong += [f"has unknown fields: {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"--gpu {path}: {' and '.join(wrong)}; {HOW_TO_ADD}")
    known: dict[str, Any] = {"name": str(values["name"])}
    for key, value in values.items():
        if key != "name":
            known[key] = _number(path, key, value)
    if known.get("gpus_per_node", 8) != int(known.get("gpus_per_node", 8)):
        raise ValueError(f"--gpu {path}: gpus_per_node {values['gpus_per_node']!r} must be a whole number")
    known["gpus_per_node"] = int(known.get("gpus_per_node", 8))
    return Gpu(**known)


def _number(path: str, key: str, value: Any) -> float:
    """Convert a field's value to a number and validate it. YAML parses numbers such as `1e3` as strings."""
    unknown = key in ("host_memory_gib", "host_gb_s")
    try:
        number = float(value if not isinstance(value, bool) else "no")
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not unknown):
        least = "of at least 0 (0: unknown)" if unknown else "above 0"
        raise ValueError(f"--gpu {path}: {key} {value!r} must be a number {least}")
    return number
