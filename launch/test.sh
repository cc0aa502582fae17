#!/usr/bin/env bash
# Installs what tests need and runs the suite.
#
#   ./launch/test.sh [--quick | --long] [arguments of pytest]
#
# --quick runs unit tests but the slow ones, and a run of two ranks, a file of tests to a core; it installs nothing where .venv
# is there.
# --long adds tests/long (the long forms, each with its last record in docs). Without a GPU, tests/gpu says why it is skipped;
# with one, tests/gpu alone sees it (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
which=(--ignore=tests/long)
quick=
arguments=()
for arg in "$@"; do
    case $arg in
        --long) which=() ;;
        --quick)
            quick=1
            which=(-n auto --maxprocesses 8 --dist loadfile -m "not slow" tests/unit)
            which+=(tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical)
            ;;
        *) arguments+=("$arg") ;;
    esac
done
if [[ ! $quick || ! -x .venv/bin/pytest ]]; then
    ./launch/install.sh --dev
    # SGLang's tests say why they are skipped where it cannot be had.
    [[ $quick ]] || ./launch/install.sh --dev --sglang || echo "[test] without SGLang"
fi
exec .venv/bin/python -m pytest "${which[@]}" "${arguments[@]}"
