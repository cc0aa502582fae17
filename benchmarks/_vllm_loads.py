"""Loads vLLM and its compiled libraries, and writes the seconds of each part as JSON.

    python -m benchmarks._vllm_loads FILE

A library that does not load ends the program with its error. On a CPU, vLLM chooses among its libraries itself.
"""

import importlib
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks._about import available, measured_on, save

PYTHON = ("vllm", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2")
WORKER = ("vllm.device_allocator.cumem", "vllm.v1.worker.gpu_worker")
"""Modules of the engine's process on a GPU."""


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
    about, seconds = measured_on(available(), sys.argv[1]), {}
    wanted = (*PYTHON, *((*libraries(), *WORKER) if about["device"] != "cpu" else ()))
    for name in wanted:
        began = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = time.perf_counter() - began
        print(f"figure vllm-loads {name} {seconds[name]:.2f} s", flush=True)
        save(Path(sys.argv[1]), about, seconds=seconds)


if __name__ == "__main__":
    main()
