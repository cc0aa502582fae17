"""Loads vLLM and its compiled libraries, and writes the seconds of each part as JSON.

    python -m benchmarks._vllm_loads FILE

A library of NEEDED that does not load ends the program with its error; another one leaves a warning, because vLLM only
tries to load it. On a CPU, vLLM chooses among its libraries itself.
"""

import importlib
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks._about import available, measured_on, save

PYTHON = ("vllm", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2")
WORKER = ("vllm.device_allocator.cumem", "vllm.v1.worker.gpu_worker")
"""Modules of the engine's process on a GPU."""

NEEDED = r"(_C|_moe_C)(_stable_libtorch)?|_vllm_fa3_C|cumem_allocator"
"""Pattern of the names of libraries that a run needs."""


def libraries() -> list[str]:
    """Return the names of the compiled modules that the installed vLLM has, which differ between its versions."""
    spec = find_spec("vllm")
    assert spec and spec.origin
    root = Path(spec.origin).parent
    files = [*root.glob("*.so"), *root.glob("vllm_flash_attn/*.so")]
    return sorted(
        ".".join(["vllm", *file.relative_to(root).parts]).split(".abi3")[0].split(".cpython")[0] for file in files
    )


def main() -> None:
    about, seconds = measured_on(available(), sys.argv[1], readings=False), {}
    found = libraries() if about["device"] != "cpu" else []
    tried = {name for name in found if not re.fullmatch(NEEDED, name.rpartition(".")[2])}
    for name in (*PYTHON, *found, *(WORKER if found else ())):
        began = time.perf_counter()
        try:
            importlib.import_module(name)
        except Exception as error:  # A library may fail in any way.
            if name not in tried:
                raise
            print(f"warning: {name} does not load: {type(error).__name__}: {error}", flush=True)
            continue
        seconds[name] = time.perf_counter() - began
        print(f"figure vllm-loads {name} {seconds[name]:.2f} s", flush=True)
        save(Path(sys.argv[1]), about, seconds=seconds)


if __name__ == "__main__":
    main()
