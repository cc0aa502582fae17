"""The Triton kernels without a GPU: kernels/tests in Triton's interpreter, and compiled for GPUs that are not here.

In processes of their own: whether Triton interprets is decided when it is imported, once for all.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")

COMPILE = """
import sys
from itertools import product
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spmdrl_kernels import triton_rows as rows

ARGUMENTS = dict(
    logits="*{0}", row_stride="i32", columns="i32", targets="*i64", scales="*{1}", state="*{1}", state_stride="i32",
    lses="*{1}", entropies="*{1}", grad_logps="*{1}", grad_entropies="*{1}", out="*{2}", out_stride="i32",
)
TARGETS = [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
VARIANTS = [
    ("bf16", "fp32", "bf16", None), ("bf16", "fp32", "bf16", 30.0), ("fp32", "fp32", "bf16", None),
    ("fp64", "fp64", "fp64", 30.0),
]
for target, (narrow, wide, out, softcap) in product(TARGETS, VARIANTS):
    for kernel, block in ((rows._stats_kernel, rows.STATS_BLOCK), (rows._gradient_kernel, rows.GRADIENT_BLOCK)):
        constants = dict(SOFTCAP=softcap, SECOND=1, FP64=wide == "fp64", BLOCK=block)
        constants |= {} if softcap else dict(scales=None, grad_entropies=None)
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: text.format(narrow, wide, out) for name, text in ARGUMENTS.items()}
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        built = triton.compile(ASTSource(kernel, signature, constants), target=target, options={"num_warps": 8})
        code = built.asm["cubin" if target.backend == "cuda" else "hsaco"]
        print(target.backend, target.arch, kernel.__name__, narrow, softcap, len(code) > 1000)
"""


def run(tmp_path, *arguments, **environment):
    paths = [str(ROOT), str(ROOT / "kernels")]
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = {**given, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernel_triton_in_the_interpreter(tmp_path):
    out = run(
        tmp_path,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "kernels/tests/test_triton.py",
        CUDA_VISIBLE_DEVICES="",
    )
    assert " passed" in out and "skipped" not in out, out


def test_kernel_triton_compiles_for_nvidia_and_amd(tmp_path):
    """Both targets' compilers come with the triton package; that the code runs is for tests/gpu to say."""
    lines = run(tmp_path, "-c", COMPILE).splitlines()
    assert len(lines) == 16 and all(line.endswith("True") for line in lines), lines
