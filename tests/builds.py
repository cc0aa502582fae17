"""Installed packages, as tests ask: which engines run on a CPU, where a build for GPUs cannot; how old torch is."""

from importlib.util import find_spec
from pathlib import Path

import torch

from spmdrl.config.engines import sglang_python, vllm_wants_gpu

ROOT = Path(__file__).resolve().parents[1]


def no_vllm() -> str:
    """Why vLLM cannot run on a CPU here; empty where it can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    return "vLLM here is its CUDA build: tests/gpu" if vllm_wants_gpu() else ""


def no_sglang() -> str:
    """The same of SGLang, which launch/install.sh takes for the side that .venv is of."""
    if sglang_python() is None:
        return "SGLang is not installed: ./launch/install.sh --sglang"
    side = ROOT / ".venv" / ".spmdrl" / "side"
    return "SGLang here is its CUDA build" if side.is_file() and side.read_text().strip() == "gpu" else ""


def older_torch() -> bool:
    """Torch before 2.13, whose kernels for a CPU round otherwise: some bounds are wider there."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def short_vectors() -> bool:
    """A CPU without AVX-512: float32 sums run over vectors half as long and round otherwise."""
    return torch.backends.cpu.get_cpu_capability() != "AVX512"
