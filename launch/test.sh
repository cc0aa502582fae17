#!/usr/bin/env bash
# Installs what tests need and runs the suite.
#
#   ./launch/test.sh [--quick | --long] [arguments of pytest]
#
# --quick runs unit tests but the slow ones, and a run of two ranks; it installs nothing where .venv is there.
# --long adds tests/long (the long forms, each with its last record in docs). Without a GPU, tests/gpu says why it is skipped;
# with one, tests/gpu alone sees it (tests/conftest.py).
# Tests of one process run side by side, a file to a core; jobs of several ranks follow, one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
long=(--ignore=tests/long)
quick= some=
arguments=()
for arg in "$@"; do
    case $arg in
        --long) long=() ;;
        --quick) quick=1 ;;
        *)
            arguments+=("$arg")
            [[ $arg == -* || ! -e ${arg%%::*} ]] || some=1
            ;;
    esac
done
if [[ ! $quick || ! -x .venv/bin/pytest ]]; then
    ./launch/install.sh --dev
    # SGLang's tests say why they are skipped where it cannot be had.
    [[ $quick ]] || ./launch/install.sh --dev --sglang || echo "[test] without SGLang"
fi
pytest=(.venv/bin/python -m pytest "${arguments[@]}")
beside=(-n auto --maxprocesses 8 --dist loadfile)
if [[ $quick ]]; then
    exec "${pytest[@]}" "${beside[@]}" -m "not slow" tests/unit tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical
elif [[ $some ]]; then
    exec "${pytest[@]}"
fi
status=0
"${pytest[@]}" "${beside[@]}" tests/contract tests/unit || status=$?
"${pytest[@]}" "${long[@]}" --ignore=tests/contract --ignore=tests/unit || status=$?
exit $status
