"""The packed vLLM is imported under the Python and torch of the machine for which it is packed, without a GPU.

    python benchmarks/pack_vllm.py
    PACK_PYTHON=/path/to/python3.12 ./launch/test.sh --long tests/long/test_pack_vllm.py

PACK_PYTHON names an interpreter of Python 3.12 with torch 2.11.0 and transformers, without packages that a usual
machine for PyTorch lacks. The driver's libraries are replaced by small ones made here, which report one H100; their
other functions fail. Libraries load with every symbol resolved, and no kernel runs.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import pack_vllm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PACK_PYTHON", "")
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)1; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned n) { strncpy(s, "NVIDIA H100 80GB HBM3", n); return 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { strncpy(s, "GPU-0", n); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = m[1] = 80ull << 30; m[2] = 0; return 0; }
const char *nvmlErrorString(int r) { return "no driver"; }
"""
# torch reports the GPU that NVML reports; without one, Triton would count as missing.
GPU = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda *a: (9, 0)"
CHECK = f"{GPU}; from benchmarks.pack_vllm import check; wrong = check(); print(*wrong, sep=chr(10)); assert not wrong"
CONFIG = f"""{GPU}
import json, sys
from transformers import Qwen2Config
from vllm.engine.arg_utils import EngineArgs
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
Qwen2Config(num_key_value_heads=2, architectures=["Qwen2ForCausalLM"], **sizes).save_pretrained(sys.argv[1])
config = EngineArgs(
    model=sys.argv[1], dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, enable_sleep_mode=True,
    distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs", max_model_len=128,
    **json.loads(sys.argv[2]),
).create_engine_config()
print("second runner:", config.use_v2_model_runner)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if not PYTHON or not (ROOT / ".vllm").exists():
        pytest.skip("PACK_PYTHON or the folder .vllm is missing; the first lines of this file say how to make them")
    place = tmp_path_factory.mktemp("packed")
    site, driver = place / "site", place / "driver"
    unpacking = [PYTHON, "benchmarks/pack_vllm.py", "--unpack", ".vllm", str(site)]
    done = subprocess.run(unpacking, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith(f"export PYTHONPATH={site}\n"), done.stdout + done.stderr
    libraries = [str(site / path) for path in pack_vllm.LIBRARIES.values()]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    calls = sorted(set(re.findall(r" (cu[A-Z]\w+)", symbols.stdout)))
    assert "cuMemCreate" in calls
    driver.mkdir()
    for name, source in {
        "cuda": "".join(f"int {c}(void) {{ return 100; }}\n" for c in calls),
        "nvidia-ml": NVML,
    }.items():
        library = ["-shared", "-fPIC", "-w", f"-Wl,-soname,lib{name}.so.1", "-o", str(driver / f"lib{name}.so.1")]
        subprocess.run(["gcc", "-x", "c", "-", *library], input=source, text=True, check=True)
    environment = os.environ | {
        "PYTHONPATH": f"{site}:{ROOT}",
        "LD_LIBRARY_PATH": str(driver),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def run(*words: str) -> str:
        done = subprocess.run([PYTHON, *words], env=environment, cwd=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def test_versions_are_those_of_the_pack(run):
    text = "import sys, torch; print(*sys.version_info[:2], torch.__version__)"
    assert run("-c", text).startswith(f"{pack_vllm.PYTHON.replace('.', ' ')} {pack_vllm.TORCH}")


def test_every_module_that_the_engine_imports_is_there(run):
    assert f"modules of vLLM {pack_vllm.VLLM}" in run("-c", CHECK)


@pytest.mark.parametrize(
    "more",
    [{}, {"quantization": "fp8"}, {"enable_lora": True, "max_lora_rank": 8}, {"enforce_eager": True}],
    ids=str,
)
def test_the_engine_is_configured_for_an_h100(run, tmp_path, more):
    assert "second runner: True" in run("-c", CONFIG, str(tmp_path), json.dumps(more))
