"""Tells tests whether the installed engines can run on a CPU; builds for GPUs cannot."""

from importlib.util import find_spec
from pathlib import Path

from spmdrl.config.engines import sglang_python, vllm_wants_gpu

ROOT = Path(__file__).resolve().parents[1]


def no_vllm() -> str:
    """Returns the reason why vLLM cannot run on a CPU here; empty if it can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    return "vLLM here is its CUDA build: tests/gpu" if vllm_wants_gpu() else ""


def no_sglang() -> str:
    """Returns the reason why SGLang cannot run on a CPU here (launch/install.sh chose its build); empty if it can."""
    if sglang_python() is None:
        return "SGLang is not installed: ./launch/install.sh --sglang"
    side = ROOT / ".venv" / ".spmdrl" / "side"
    return "SGLang here is its CUDA build" if side.is_file() and side.read_text().strip() == "gpu" else ""
