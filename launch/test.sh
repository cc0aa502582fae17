#!/usr/bin/env bash
# Installs what tests need and runs the suite.
#
#   ./launch/test.sh [--quick | --long] [arguments of pytest]
#
# Without paths it runs three pytests with the same arguments: tests that depend on the clock or the machine's memory, one
# by one; beside them, at the lowest priority, tests/contract, tests/plans and tests/unit, whose output is shown when they
# are done; then all others, which start their own ranks, engines and jobs, with two cores for each worker. With paths of
# tests, or options for one report or one order of all tests (--junitxml, --lf, --pdb and the like, see below), it runs one
# plain pytest.
# --quick runs unit tests but the slow ones, and a run of two ranks, a file of tests to a core; it installs nothing
# where .venv is there.
# --long adds tests/long at the end (the long forms, each with its last record in docs). Without a GPU, tests/gpu says why it is
# skipped; with one, tests/gpu alone sees it (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Files in the order of the command line.
by_file=(--dist loadfile --no-loadscope-reorder)
spread=(-n auto --maxprocesses 8 "${by_file[@]}")
beside=(tests/contract tests/plans tests/unit)
workers=$(($(nproc) < 4 ? 2 : $(nproc) < 16 ? $(nproc) / 2 : 8))
# Jobs that have to end within seconds of a fault, programs with limits of time and memory, measured times.
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
    [[ $quick ]] || ./launch/install.sh --dev --gyms || echo "[test] without skyrl-gym and TextArena"
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
suite=$NO_TESTS

join() { # join CODE NAME: the exit code of a pytest joins that of the suite
    echo "[test] $2: exit code $1 after $SECONDS s"
    # 2 is Ctrl-C, 3 and 4 are mistakes that the next part would repeat.
    if [[ $1 -ge 2 && $1 -le 4 || $1 == 1 && $stop ]]; then exit "$1"; fi
    # A part without tests is a failure only where no other has any.
    if [[ $suite != 1 && $1 != "$NO_TESTS" ]]; then suite=$1; fi
}

part() { # part NAME PATH_OR_OPTION...: one pytest
    local code=0
    .venv/bin/python -m pytest "${@:2}" "${arguments[@]}" || code=$?
    join "$code" "$1"
}

skipped=("${alone[@]/#/--ignore=}")
log=$(mktemp)
# A test that waits for a core has more time than elsewhere.
nice -n 19 .venv/bin/python -m pytest --timeout 1200 "${beside[@]}" "${skipped[@]}" "${arguments[@]}" >"$log" 2>&1 &
low=$!
# Ctrl-C does not reach a background process.
trap 'if kill "$low" 2>/dev/null; then cat "$log"; fi; rm -f "$log"' EXIT
part "tests by the clock" "${alone[@]}"
code=0
wait "$low" || code=$?
cat "$log"
join "$code" "${beside[*]}"
part "all others" -n "$workers" "${by_file[@]}" --ignore=tests/long "${beside[@]/#/--ignore=}" "${skipped[@]}"
if [[ $long ]]; then part tests/long tests/long; fi
exit "$suite"
