"""Describes GPUs for plans: their memory, matrix rate and link speeds, from a table or from a file.

Memory is the total that CUDA reports to a process (`torch.cuda.mem_get_info`). It is less than the number in the
product's name: an H100 of 80 GB reports 79.1 GiB. A plan counts the CUDA context and NCCL of a process separately.
Rates are the peaks of NVIDIA's data sheets for dense bfloat16. No job reaches peak rates, so times computed from them
are lower bounds. Link speeds are for one direction, so they are half of the NVLink and PCIe bandwidths in data sheets
(PCIe 5: 128 GB/s, PCIe 4: 64 GB/s). Each GPU has one network card.

Sources:
    H100 SXM, https://www.nvidia.com/en-us/data-center/h100/: 989 TFLOPS, 3.35 TB/s, NVLink 900 GB/s; DGX H100
        has eight 400 Gb/s network cards and 2 TB for the host, https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
    H200 SXM, https://www.nvidia.com/en-us/data-center/h200/: like the H100, but with 141 GB at 4.8 TB/s
    H20, 96 GB: no data sheet is public. 148 TFLOPS, 4.0 TB/s, NVLink 900 GB/s are the figures that vendors of servers
        print; 95.0 GiB is from an error message, https://github.com/modelscope/DiffSynth-Studio/issues/1238
    B200, https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html: 2.25 PFLOPS, NVLink 1.8 TB/s;
        178.35 GiB and 7.67 TB/s as read from the driver, https://github.com/pytorch/ao/pull/4002
    A100 SXM4 of 80 GB, https://www.nvidia.com/en-us/data-center/a100/: 312 TFLOPS, 2.04 TB/s, NVLink 600 GB/s; DGX A100
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
    """Name that the plan prints."""
    memory_gib: float
    """Memory that CUDA reports, in GiB (2**30 bytes)."""
    matmul_tflops: float
    """Peak rate of dense bfloat16 matrix products, in 1e12 floating-point operations a second."""
    memory_tb_s: float
    """Bandwidth of the GPU's memory, in 1e12 bytes a second."""
    nvlink_gb_s: float
    """Bandwidth to the other GPUs of the node in one direction, in 1e9 bytes a second."""
    network_gb_s: float
    """Bandwidth to other nodes in one direction (this GPU's share of the network cards), in 1e9 bytes a second."""
    gpus_per_node: int = 8
    """Number of GPUs in a node."""
    host_gb_s: float = 0.0
    """Bandwidth to the host's memory in one direction, in 1e9 bytes a second. 0: unknown, then copies count as 0 s."""
    host_memory_gib: float = 0.0
    """Memory of a node's host, in GiB. 0: unknown; a plan then reports the bytes on the host without a limit."""


HOST = 2000.0  # GiB; the operating system keeps some of the 2,048 GiB of a host with 2 TB
NODE: dict[str, Any] = {"host_memory_gib": HOST, "host_gb_s": 64}
"""Memory and link speed of the host of a node with eight GPUs on PCIe 5.0."""

GPUS = {
    "h100": Gpu("H100 SXM 80 GB", 79.1, 989, 3.35, 450, 50, **NODE),
    "h200": Gpu("H200 SXM 141 GB", 139.8, 989, 4.8, 450, 50, **NODE),
    "h20": Gpu("H20 96 GB", 95.0, 148, 4.0, 450, 50, **NODE),
    "b200": Gpu("B200 180 GB", 178.3, 2250, 7.67, 900, 50, **NODE),
    "a100": Gpu("A100 SXM 80 GB", 79.1, 312, 2.04, 300, 25, host_memory_gib=HOST, host_gb_s=32),
}
"""Known GPUs, by the name that `--gpu` takes."""

NEEDED = [f.name for f in fields(Gpu) if f.default is MISSING]
OPTIONAL = [f.name for f in fields(Gpu) if f.default is not MISSING]
HOW_TO_ADD = (
    f"another GPU is a YAML or JSON file with {', '.join(NEEDED)} (optional: {', '.join(OPTIONAL)}), "
    "given as --gpu FILE"
)


def gpu(name_or_file: str) -> Gpu:
    """Return a GPU by its name (`h100` or `H100`) or by the path of a file that describes one.

    Raises:
        ValueError: the name is unknown, or the file cannot be used; the message describes how to add a GPU.
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
    """Check the fields of a file and return a Gpu with them."""
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
    """Convert a field's value to a number and check it; YAML reads a number that is written like `1e3` as text."""
    unknown = key in ("host_memory_gib", "host_gb_s")
    try:
        number = float(value if not isinstance(value, bool) else "no")
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not unknown):
        least = "of at least 0 (0: unknown)" if unknown else "above 0"
        raise ValueError(f"--gpu {path}: {key} {value!r} must be a number {least}")
    return number
