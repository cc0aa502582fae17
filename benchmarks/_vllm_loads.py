"""Loads vLLM and its compiled libraries, and writes the seconds of each part as JSON.

    python -m benchmarks._vllm_loads FILE

A library that does not load ends the program with its error. The CPU build has none of the libraries in CUDA.
"""

import importlib
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks._about import available, measured_on, save

PYTHON = ("vllm", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2")
CUDA = ("vllm._C", "vllm._moe_C", "vllm.cumem_allocator", "vllm.v1.worker.gpu_worker")


def main() -> None:
    about, seconds = measured_on(available(), sys.argv[1]), {}
    wanted = (*PYTHON, *(CUDA if about["device"] != "cpu" else ()))
    for name in wanted:
        began = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = time.perf_counter() - began
        print(f"figure vllm-loads {name} {seconds[name]:.2f} s", flush=True)
        save(Path(sys.argv[1]), about, seconds=seconds)
    flash = [name for name in ("_vllm_fa2_C", "_vllm_fa3_C") if find_spec(f"vllm.vllm_flash_attn.{name}")]
    print(f"figure vllm-loads flash attention: {', '.join(flash) or 'none'}")


if __name__ == "__main__":
    main()
