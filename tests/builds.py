"""Installed packages as tests need to know them: engines that run on a CPU, where a build for GPUs cannot."""

from importlib.util import find_spec
from pathlib import Path

from spmdrl.config.engines import sglang_python, vllm_wants_gpu

ROOT = Path(__file__).resolve().parents[1]


def no_vllm() -> str:
    """Reason why vLLM cannot run on a CPU here; empty where it can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    return "vLLM here is its CUDA build: tests/gpu" if vllm_wants_gpu() else ""


def no_sglang() -> str:
    """Reason why SGLang cannot run on a CPU here (launch/install.sh takes the build for .venv); empty where it can."""
    if sglang_python() is None:
        return "SGLang is not installed: ./launch/install.sh --sglang"
    side = ROOT / ".venv" / ".spmdrl" / "side"
    return "SGLang here is its CUDA build" if side.is_file() and side.read_text().strip() == "gpu" else ""
