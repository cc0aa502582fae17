#!/usr/bin/env bash
# Installs what tests need and runs the suite.
#
#   ./launch/test.sh [--quick | --long] [arguments of pytest]
#
# Without paths it runs two pytests, which get the same arguments: tests/contract, tests/plans and tests/unit, a file of
# tests to a core, then the rest one by one, because its tests start ranks and engines of their own. Paths of tests, and
# options that ask for one report or one order of all tests (--junitxml, --lf, --pdb and the like, see below), make it
# one plain pytest.
# --quick runs unit tests but the slow ones, and a run of two ranks, a file of tests to a core; it installs nothing
# where .venv is there.
# --long adds tests/long (the long forms, each with its last record in docs). Without a GPU, tests/gpu says why it is
# skipped; with one, tests/gpu alone sees it (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Files in the order of the command line, so that the few long ones of tests/contract do not come last.
spread=(-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
first=(tests/contract tests/plans tests/unit)
which=(--ignore=tests/long)
quick= one= stop= value=
arguments=()
for arg in "$@"; do
    case $arg in
        --long) which=() ;;
        --quick) quick=1 ;;
        *) arguments+=("$arg") ;;
    esac
    # The word after such an option is its value, even if a file has its name.
    if [[ ! $value && $arg != -* && -e ${arg%%::*} ]]; then one=1; fi
    case $arg in
        -k | -m | -p | -o | -c | -W | -r | --maxfail | --durations | --durations-min | --timeout | --tb | --ignore | \
            --deselect)
            value=1 ;;
        *) value= ;;
    esac
    case $arg in
        --junit* | --report-log* | --lf | --last-failed | --ff | --failed-first | --nf | --new-first | --sw* | \
            --stepwise* | --pdb* | --trace | --co | --collect-only | --fixtures* | --markers | --help | -h | \
            --version | --cache* | \
            -n* | --numprocesses* | --dist*)
            one=1 ;;
        -x | --exitfirst | --maxfail*) stop=1 ;;
    esac
    # Letters may stand together: -xq. Workers do not show what a test prints (-s).
    if [[ $arg =~ ^-[qvlsx]+$ && $arg == *s* ]]; then one=1; fi
    if [[ $arg =~ ^-[qvlsx]+$ && $arg == *x* ]]; then stop=1; fi
done
if [[ ! $quick || ! -x .venv/bin/pytest ]]; then
    ./launch/install.sh --dev
    # SGLang's tests say why they are skipped where it cannot be had.
    [[ $quick ]] || ./launch/install.sh --dev --sglang || echo "[test] without SGLang"
fi
if [[ $quick ]]; then
    which=("${spread[@]}" -m "not slow" tests/unit)
    which+=(tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical)
    one=1
fi
if [[ $one ]]; then
    exec .venv/bin/python -m pytest "${which[@]}" "${arguments[@]}"
fi

NO_TESTS=5 # pytest's exit code where nothing was chosen, as by -k
code=0
.venv/bin/python -m pytest "${spread[@]}" "${first[@]}" "${arguments[@]}" || code=$?
echo "[test] ${first[*]}: exit code $code after $SECONDS s"
# 2 is Ctrl-C, 3 and 4 are mistakes that the second run would repeat.
if [[ $code -ge 2 && $code -le 4 || $code == 1 && $stop ]]; then
    exit "$code"
fi
rest=0
.venv/bin/python -m pytest "${which[@]}" "${first[@]/#/--ignore=}" "${arguments[@]}" || rest=$?
if [[ $code == 1 ]]; then
    echo "[test] ${first[*]}: failed, see above" >&2
    exit 1
fi
# A part without tests is a failure only where the other has none either.
if [[ $rest == "$NO_TESTS" ]]; then
    exit "$code"
fi
exit "$rest"
