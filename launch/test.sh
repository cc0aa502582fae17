#!/usr/bin/env bash
# Installs what tests need and runs the suite.
#
#   ./launch/test.sh [--long] [arguments of pytest]
#
# --long adds tests/long (the long forms, each with its last record in docs). Without a GPU, tests/gpu says why it is skipped;
# with one, tests/gpu alone sees it (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/install.sh --dev
# SGLang's tests say why they are skipped where it cannot be had.
./launch/install.sh --dev --sglang || echo "[test] without SGLang"
long=(--ignore=tests/long)
arguments=()
for arg in "$@"; do
    if [[ $arg == --long ]]; then long=(); else arguments+=("$arg"); fi
done
exec .venv/bin/python -m pytest "${long[@]}" "${arguments[@]}"
