"""Compiles the Triton kernels on a machine without a GPU: registers, shared memory and spills of each.

    python benchmarks/kernels/compiled.py [--quick] [--targets NAME ...] [--json FILE]

`_launches.py` records every launch that the public functions make for the shapes below: complete vocabularies and a
rank's part of them, every dtype and setting. The installed triton compiles each with the specialisation of a real
launch: pointers and numbers that are multiples of 16, constants, and on AMD tensors below 2 GiB. The figures come from
the compilers: `ptxas -v` for NVIDIA, the metadata of the assembly for AMD. The program exits with 1 if a kernel does
not compile, does not fit, or spills registers. --quick: two shapes in bf16, with the settings of most and of least
work. To use another version of triton, put it into PYTHONPATH.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("TRITON_INTERPRET", None)  # with the interpreter, Triton would not compile
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "kernels"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import triton  # noqa: E402
from _launches import DTYPES, KERNELS, Launch, launches_of  # noqa: E402
from _measure import measured_on, reason  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from spmdrl_kernels import triton_rows  # noqa: E402


@dataclass(frozen=True)
class Target:
    """A GPU, and the limits of one block of threads on it."""

    gpu: GPUTarget
    shared: int
    """Largest number of bytes of shared memory of a block."""
    registers: int
    """Largest number of registers of one thread."""

    @property
    def widens(self) -> bool:
        """True if torch's matmuls can write fp32 from 16-bit inputs on this GPU."""
        return self.gpu.backend == "cuda"


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, 255),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, 255),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, 255),
    # Each SIMD has 512 registers per lane, and two of a block's 8 warps share them.
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, 256),
}
QWEN, LLAMA = 151_936, 32_000
SHAPES = [
    *((8192, vocabulary // parts) for vocabulary in (QWEN, LLAMA) for parts in (1, 2, 4, 8)),
    (8192, 128_256),
    # Sizes that are not multiples of 16; more rows than fit into one block; one token.
    (5003, 50_257),
    (5003, 32_003),
    (70_000, LLAMA),
    (1, QWEN),
]
QUICK = [(8192, QWEN), (5003, 50_257)]
FIGURES = ("registers", "shared", "spilled", "stack")
"""Figures per thread, except `shared`, which is in bytes per block; see `of_nvidia` and `of_amd`."""


class Elsewhere:
    """Stand-in for the driver of an absent GPU. Device number i is the i-th target."""

    def __init__(self):
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return list(TARGETS.values())[self.device].gpu


def kernel_of(name: str):
    return getattr(triton_rows, KERNELS[name])


def arguments_of(kernel) -> list[str]:
    """Return the names of the arguments that are not constants: those in lower case."""
    return [name for name in kernel.arg_names if name.islower()]


def specialised(launch: Launch, device: int) -> str:
    """Return Triton's specialisation of a launch except constants: types, D for a multiple of 16, S for below 2 GiB."""
    driver.active.device = device
    kernel, constants = kernel_of(launch.kernel), dict(launch.constants)
    *_, bind = kernel.device_caches[device]
    _, kinds, _ = bind(*launch.arguments, **constants)
    parts = (
        "None" if kind == "constexpr" else f"{kind}:{more}" if isinstance(more, str) and more else kind
        for kind, more in kinds[: len(launch.arguments)]
    )
    return " ".join(parts)


def compile_launch(launch: Launch, device: int) -> dict[str, int]:
    """Compile a launch for a target without loading or running it; return its figures (`FIGURES`).

    Raises:
        Exception: the compiler fails.
    """
    driver.active.device = device
    kernel = kernel_of(launch.kernel)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        built = kernel.warmup(*launch.arguments, grid=(1,), **dict(launch.constants))
    if "amdgcn" in built.asm:
        return of_amd(built.asm["amdgcn"], built.metadata.shared)
    return of_nvidia(output.getvalue(), built.metadata.shared)


def of_nvidia(output: str, shared: int) -> dict[str, int]:
    """Read the figures from the output of `ptxas -v`. spilled: bytes that a thread stores to memory and loads."""
    (used,) = re.findall(r"Used (\d+) registers", output)
    ((stack, stored, loaded),) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output
    )
    return {"registers": int(used), "shared": shared, "spilled": int(stored) + int(loaded), "stack": int(stack)}


def of_amd(assembly: str, shared: int) -> dict[str, int]:
    """Read the figures from the metadata at the end of the assembly. spilled: vector and scalar registers."""
    counts = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return {
        "registers": counts["vgpr_count"],
        "shared": max(shared, counts["group_segment_fixed_size"]),
        "spilled": counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        "stack": counts["private_segment_fixed_size"],
    }


def problem(row: dict[str, Any]) -> str:
    """Return the problem of a row; empty if it has none."""
    if "error" in row:
        return row["error"]
    limits = TARGETS[row["target"]]
    most = {"registers": limits.registers, "shared": limits.shared, "spilled": 0, "stack": 0}
    return ", ".join(f"{row[name]} {name}, at most {limit}" for name, limit in most.items() if row[name] > limit)


def compile_all(names: list[str], quick: bool) -> list[dict[str, Any]]:
    """Compile all launches; return a row for each target and each way to compile a kernel."""
    launches: dict[bool, dict[Launch, str]] = {}
    rows: dict[tuple, dict[str, Any]] = {}
    for name in names:
        device, widens = list(TARGETS).index(name), TARGETS[name].widens
        if widens not in launches:
            dtypes = ["bf16"] if quick else list(DTYPES)
            launches[widens] = launches_of(QUICK if quick else SHAPES, dtypes, widens, quick)
        for launch, call in launches[widens].items():
            key = name, launch.kernel, specialised(launch, device), launch.constants
            if key in rows:
                continue
            rows[key] = row = dict(zip(("target", "kernel", "arguments"), key, strict=False))
            row |= {"constants": dict(launch.constants), "call": call}
            try:
                row |= compile_launch(launch, device)
            except Exception as error:
                row["error"] = reason(error)
    return list(rows.values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the range of figures for each kernel and dtype of logits, then every row with a problem."""
    groups = defaultdict(list)
    for row in rows:
        # The first argument looks like *bf16:D.
        groups[row["target"], row["kernel"], re.split(r"[*:]", row["arguments"])[1]].append(row)
    print("target   kernel    logits  ways  registers  shared  spilled  wrong")
    for names, group in groups.items():
        done = [row for row in group if "error" not in row]
        used = [row["registers"] for row in done] or [0]
        shared, spilled = (max((row[name] for row in done), default=0) for name in ("shared", "spilled"))
        wrong = sum(bool(problem(row)) for row in group)
        print(
            "{:8} {:9} {:6}".format(*names),
            f"{len(group):>5} {min(used):>4} - {max(used):>3} {shared:>7} {spilled:>8} {wrong:>6}",
        )
    for row in rows:
        if why := problem(row):
            print(f"{row['target']} {row['kernel']} {row['constants']}: {why}; {row['call']}; {row['arguments']}")


def write(path: str, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write facts, then a line for each way to compile a kernel, with its figures on each target."""
    facts: dict[str, Any] = {"about": about, "figures": FIGURES}
    facts["arguments"] = {name: arguments_of(kernel_of(name)) for name in KERNELS}
    ways: dict[str, dict[str, Any]] = {}
    for row in rows:
        way = {name: row[name] for name in ("kernel", "arguments", "constants")}
        entry = ways.setdefault(json.dumps(way), way | {"call": row["call"]})
        entry[row["target"]] = row.get("error") or [row[name] for name in FIGURES]
    lines = ",\n".join(json.dumps(way) for way in ways.values())
    Path(path).write_text(json.dumps(facts)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME", help=", ".join(TARGETS)
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    about = measured_on("cpu", args.json)  # it compiles and computes nothing
    driver.set_active(Elsewhere())
    triton.knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as folder:
        # ptxas prints nothing for a kernel that is in the cache.
        triton.knobs.cache.dir = folder
        rows = compile_all(args.targets, args.quick)
    print(f"triton {triton.__version__}, torch {torch.__version__}, {len(rows)} compiled")
    show(rows)
    if args.json:
        write(args.json, about, rows)
    sys.exit(any(problem(row) for row in rows))


if __name__ == "__main__":
    main()
