#!/usr/bin/env bash
# Everything that wants one GPU, by one command: correctness of the kernels and of tests/gpu, then every benchmark.
#
#   ./benchmarks/gpu.sh [--quick] [--dry-run] [--only NAME[,NAME...]] [--limit SECONDS] [--results FOLDER]
#
# --quick    short forms
# --dry-run  print what would run, and stop
# --only     some of: tests, memory, transfer, shared_prompt, longtail, mfu, kernels (all of kernels/bench)
# --limit    seconds after which one of them is stopped (default 300)
# --results  where <name>_gpu.json, the plots <name>_gpu.png of some and the logs <name>_gpu.log go (default
#            benchmarks/results; logs to $TMPDIR)
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3). No network is used: packages that it lacks are
# taken from the wheels in the folder WHEELS (default .whl, if there is one), for the time of the run.
# One that fails does not stop the others; the exit code is 1 if any did, 2 where there is no GPU. A missed target is
# no failure: it is printed again at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

quick=() dry='' only='' limit=300 results='' failed=()
while (($#)); do
    case $1 in
    --quick) quick=(--quick) ;;
    --dry-run) dry=1 ;;
    --only) only=,${2?--only wants names},; shift ;;
    --limit) limit=${2?--limit wants seconds}; shift ;;
    --results) results=${2?--results wants a folder}; shift ;;
    *) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "benchmarks/gpu.sh"; [[ $1 == --help || $1 == -h ]] && exit 0; exit 2 ;;
    esac
    shift
done
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
logs=${results:-$work}
results=${results:-benchmarks/results}
wheels=${WHEELS:-.whl}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}

with_wheels() { # an environment on top of $PYTHON's own with what was carried; programs that tests start see it too
    local site=$work/site
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || return
    "$PYTHON" -m venv --without-pip "$work/venv" || return
    "$PYTHON" - "$work/venv" "$site" <<'EOF' || return
import sys
from pathlib import Path
own = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
(target,) = Path(sys.argv[1]).glob("lib/python3*/site-packages")
(target / "base.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in [sys.argv[2], *own]))
EOF
    PYTHON=$work/venv/bin/python
}

missing() { # names of what the program imports and $PYTHON lacks
    "$PYTHON" -c '
from importlib.util import find_spec
names = "torch transformers safetensors numpy tyro docstring_parser typeguard rich yaml xxhash psutil filelock pytest"
print(*(n for n in names.split() if not find_spec(n)))'
}

if [[ -z $dry ]]; then
    if compgen -G "$wheels/*.whl" >/dev/null; then
        with_wheels || { echo "the wheels in $wheels could not be installed"; exit 2; }
    fi
    "$PYTHON" -c '
import sys, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)
sys.exit(not torch.cuda.is_available())' || { echo "$PYTHON: torch sees no CUDA device on this machine"; exit 2; }
    "$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())'
    lacking=$(missing)
    [[ -n $lacking ]] && echo "missing: $lacking; what needs them will fail. Put their wheels in $wheels (WHEELS=FOLDER)"
    mkdir -p "$results" "$logs"
fi

wanted() { [[ -z $only || $only == *,$1,* ]]; }

run() { # run NAME COMMAND...
    local name=$1 began=$SECONDS log=$logs/${1}_gpu.log code
    shift
    if [[ -n $dry ]]; then
        echo "$name: $*"
        return
    fi
    echo "=== $name: $*"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    grep -h '^target ' "$log" >>"$work/targets"
    ((code == 124)) && echo "=== $name: stopped after $limit s (--limit)"
    ((code)) && failed+=("$name ($code)")
    echo "=== $name: exit $code, $((SECONDS - began)) s"
}

bench() { # bench NAME FILE OPTIONS...
    local name=$1 file=$2
    shift 2
    if [[ ! -f $file ]]; then
        echo "$name: skipped, there is no $file"
        return
    fi
    # Those that draw name the option in their usage.
    grep -q -e '\[--plot FILE\]' "$file" && set -- --plot "$results/${name}_gpu.png" "$@"
    run "$name" "$PYTHON" "$file" ${quick[@]+"${quick[@]}"} --json "$results/${name}_gpu.json" "$@"
}

shopt -s nullglob
if wanted tests; then
    run tests "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu tests/unit/test_kernel*.py kernels/test*/
fi
if wanted kernels; then
    files=(kernels/bench/[!_]*.py)
    ((${#files[@]})) || echo "kernels: skipped, there is no kernels/bench/*.py"
    for file in ${files[@]+"${files[@]}"}; do bench "kernels_$(basename "$file" .py)" "$file"; done
fi
for name in memory transfer shared_prompt longtail mfu; do
    if wanted "$name"; then bench "$name" "benchmarks/$name.py"; fi
done
[[ -n $dry ]] && exit 0
[[ -s $work/targets ]] && { echo "=== targets"; cat "$work/targets"; }
if ((${#failed[@]})); then
    echo "=== failed: ${failed[*]}"
    exit 1
fi
echo "=== all ran, $SECONDS s"
