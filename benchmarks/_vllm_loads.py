"""Loads vLLM and its compiled libraries, and writes the seconds of each part as JSON.

    python -m benchmarks._vllm_loads FILE

A library that does not load ends the program with its error. The CPU build has none of the libraries in CUDA.
"""

import importlib
import sys
import time
from pathlib import Path

from benchmarks._about import available, measured_on, save

PYTHON = ("vllm", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2")
CUDA = ("vllm._C", "vllm._moe_C", "vllm.cumem_allocator", "vllm.vllm_flash_attn", "vllm.v1.worker.gpu_worker")


def main() -> None:
    about, seconds = measured_on(available(), sys.argv[1]), {}
    wanted = (*PYTHON, *(CUDA if about["device"] != "cpu" else ()))
    for name in wanted:
        began = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = time.perf_counter() - began
        print(f"figure vllm-loads {name} {seconds[name]:.2f} s", flush=True)
        save(Path(sys.argv[1]), about, seconds=seconds)


if __name__ == "__main__":
    main()
