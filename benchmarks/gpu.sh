#!/usr/bin/env bash
# A first run on this machine's GPUs, by one command: correctness, runs over one GPU and several, then every benchmark.
#
#   ./benchmarks/gpu.sh [--short] [--quick] [--dry-run] [--small] [--only NAME[,NAME...]] [--limit SECONDS]
#                       [--results FOLDER]
#
# The stages and the report are those of benchmarks/first_gpu_run.py (--help explains the options): at most half an hour
# in all, with --short 560 seconds. One that fails does not stop the others, one that the machine cannot run is skipped
# and says why.
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3). No network is used: packages that it lacks are
# taken from the wheels in the folder WHEELS (default .whl, if there is one), and vLLM from the folder PACKED_VLLM and its
# further parts PACKED_VLLM-2 and so on (default .vllm, if there is one), which benchmarks/pack_vllm.py made, for the time
# of the run. QWEN3_30B names the folder of Qwen3-30B-A3B-Base, if it is here.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
work=$(mktemp -d) || exit 2
compiling=
trap 'kill $compiling 2>/dev/null; wait; rm -rf "$work"' EXIT
wheels=${WHEELS:-.whl} packed=${PACKED_VLLM:-.vllm} site=$work/site

with_wheels() { # puts the wheels into $site
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
}

with_vllm() { # puts the packed vLLM into $site; a part of it that fails leaves no vLLM
    local why part left end=$((SECONDS + 20))
    for part in "$packed" "$packed"-*; do
        [[ -d $part ]] || continue
        left=$((end > SECONDS ? end - SECONDS : 1))
        why=$(timeout "$left" "$PYTHON" benchmarks/pack_vllm.py --unpack "$part" "$work/vllm" 2>&1) || {
            why=$(tail -n 1 <<<"${why:-it took more than 20 s}")
            export SPMDRL_NO_VLLM="could not be unpacked from $part: $why"
            echo "vLLM $SPMDRL_NO_VLLM"
            return
        }
    done
    mkdir -p "$site" && why=$(cp -alf "$work/vllm/." "$site/" 2>&1) || {
        rm -rf "$site/vllm"
        rmdir "$site" 2>/dev/null
        export SPMDRL_NO_VLLM="could not be put into $site: $(tail -n 1 <<<"$why")"
        echo "vLLM $SPMDRL_NO_VLLM"
        return
    }
    # Importing its thousands of files takes half as long when they are compiled; meanwhile others look at the machine.
    "$PYTHON" -m compileall -q -j 0 "$site" >/dev/null 2>&1 &
    compiling=$!
}

on_top() { # an environment on top of $PYTHON's own with what is in $site; programs that stages start see it too
    "$PYTHON" -m venv --without-pip "$work/venv" || return
    "$PYTHON" - "$work/venv" "$site" <<'PYTHON' || return
import sys
from pathlib import Path
own = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
(target,) = Path(sys.argv[1]).glob("lib/python3*/site-packages")
(target / "base.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in [sys.argv[2], *own]))
PYTHON
    PYTHON=$work/venv/bin/python
}

missing() { # names of what the program imports and $PYTHON lacks
    "$PYTHON" -c '
from importlib.util import find_spec
names = "torch transformers safetensors numpy tyro docstring_parser typeguard rich yaml xxhash psutil filelock pytest"
print(*(n for n in names.split() if not find_spec(n)))'
}

case " $* " in
*" --dry-run "* | *" --help "* | *" -h "*) ;;
*)
    if compgen -G "$wheels/*.whl" >/dev/null; then
        with_wheels || { echo "the wheels in $wheels could not be installed"; exit 2; }
    fi
    if [[ -d $packed ]]; then
        with_vllm
    else
        export SPMDRL_NO_VLLM="is not installed for this device, and there is no folder $packed with a packed one"
    fi
    if [[ -d $site ]]; then
        on_top || { echo "no environment could be made on top of $PYTHON"; exit 2; }
    fi
    lacking=$(missing)
    [[ -n $lacking ]] && echo "missing: $lacking; what needs them will fail. Put their wheels in $wheels (WHEELS=FOLDER)"
    ;;
esac
SPMDRL_SETUP_SECONDS=$SECONDS "$PYTHON" benchmarks/first_gpu_run.py "$@"
