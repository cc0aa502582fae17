#!/usr/bin/env bash
# Installs the packages that tests need, and runs the suite.
#
#   ./launch/test.sh [--quick | --long] [arguments of pytest]
#
# Without paths, the script runs three pytests with the same arguments:
# - tests that depend on the clock or on the machine's memory, one by one;
# - in parallel, at the lowest priority, tests/contract, tests/plans and tests/unit; their output is shown at the end;
# - then all other tests, which start ranks, engines and jobs, with two cores for each worker.
# With paths of tests, or with an option that needs a single report or order of tests (such as --junitxml or --pdb, see
# below), the script runs one pytest.
# --quick runs the unit tests that are not slow, and a run of two ranks; each core runs one file of tests at a time. If
# .venv exists, nothing is installed.
# --long adds tests/long at the end: long runs, whose last results are in docs. Without a GPU, tests/gpu is skipped with
# the reason; with a GPU, only tests/gpu can use it (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# pytest-xdist runs the files in the order of the command line.
by_file=(--dist loadfile --no-loadscope-reorder)
spread=(-n auto --maxprocesses 8 "${by_file[@]}")
beside=(tests/contract tests/plans tests/unit)
workers=$(($(nproc) < 4 ? 2 : $(nproc) < 16 ? $(nproc) / 2 : 8))
# These tests measure times, run jobs that must end within seconds of a fault, or limit a program's time and memory.
alone=(
    tests/sandbox tests/gpu tests/ranks/test_checkpoints.py
    tests/e2e/test_{engine_faults,faults,job_kills,kills,preemption,slurm}.py
    tests/unit/test_{code_tests,env_mcp,env_pool,env_search,judge,lock,preflight,reward_forms,rewards,rollout}.py
    tests/unit/test_{sglang_process,signs_of_life}.py
)
which=(--ignore=tests/long)
quick= long= one= stop= value=
arguments=()
for arg in "$@"; do
    case $arg in
        --long) which=() long=1 ;;
        --quick) quick=1 ;;
        *) arguments+=("$arg") ;;
    esac
    # A word after an option with a value is that value, even if a file has this name.
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
    # Options of one letter may be combined, as in -xq. -s needs one pytest, as workers do not show a test's output.
    if [[ $arg =~ ^-[qvlsx]+$ && $arg == *s* ]]; then one=1; fi
    if [[ $arg =~ ^-[qvlsx]+$ && $arg == *x* ]]; then stop=1; fi
done
if [[ ! $quick || ! -x .venv/bin/pytest ]]; then
    ./launch/install.sh --dev
    # If SGLang cannot be installed, its tests are skipped with the reason.
    [[ $quick ]] || ./launch/install.sh --dev --sglang || echo "[test] continuing without SGLang"
    [[ $quick ]] || ./launch/install.sh --dev --gyms || echo "[test] continuing without skyrl-gym and TextArena"
fi
if [[ $quick ]]; then
    which=("${spread[@]}" -m "not slow" tests/unit)
    which+=(tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical)
    one=1
fi
if [[ $one ]]; then
    exec .venv/bin/python -m pytest "${which[@]}" "${arguments[@]}"
fi

NO_TESTS=5 # pytest's exit code if no test was selected, for example by -k
suite=$NO_TESTS

join() { # join CODE NAME: merges the exit code of one pytest into that of the suite
    echo "[test] $2: exit code $1 after $SECONDS s"
    # 2 means Ctrl-C; 3 and 4 mean errors that the next part would repeat.
    if [[ $1 -ge 2 && $1 -le 4 || $1 == 1 && $stop ]]; then exit "$1"; fi
    # A part without tests is a failure only if no other part has tests.
    if [[ $suite != 1 && $1 != "$NO_TESTS" ]]; then suite=$1; fi
}

part() { # part NAME PATH_OR_OPTION...: runs one pytest
    local code=0
    .venv/bin/python -m pytest "${@:2}" "${arguments[@]}" || code=$?
    join "$code" "$1"
}

skipped=("${alone[@]/#/--ignore=}")
log=$(mktemp)
# These tests wait for cores, so their timeout is longer.
nice -n 19 .venv/bin/python -m pytest --timeout 1200 "${beside[@]}" "${skipped[@]}" "${arguments[@]}" >"$log" 2>&1 &
low=$!
# Ctrl-C does not reach a background process.
trap 'if kill "$low" 2>/dev/null; then cat "$log"; fi; rm -f "$log"' EXIT
part "tests that measure time" "${alone[@]}"
code=0
wait "$low" || code=$?
cat "$log"
join "$code" "${beside[*]}"
part "all other tests" -n "$workers" "${by_file[@]}" --ignore=tests/long "${beside[@]/#/--ignore=}" "${skipped[@]}"
if [[ $long ]]; then part tests/long tests/long; fi
exit "$suite"
