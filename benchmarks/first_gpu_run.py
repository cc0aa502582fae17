"""A first run on a machine's GPUs, which takes half an hour, continues after failed stages, and writes a report.

    ./benchmarks/gpu.sh [options]                 this program with the project's interpreter and missing wheels
    python benchmarks/first_gpu_run.py [options]

`--dry-run` prints the stages of `_gpu_stages.py` with their requirements and what each proves. `--short` runs those
that have a short form, the most valuable first, and ends after 560 seconds at most. If the machine does not meet the
requirements of a stage, the stage is skipped with the reason. If a stage fails, hangs, prints without end or leaves
processes behind, the others still run. A training stage trains a model and checks its metrics and logs
(`_gpu_judge.py`). The report (`_gpu_report.py`) names every stage from the beginning and is written before and after
each one, so if this program is killed, the report has what was measured and says what was not. The exit code is 0 if no
stage failed, 1 if one did, and 2 without a GPU.

This program only needs the standard library; programs that import torch run in separate processes.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._about import CLAIM, clocks  # noqa: E402
from benchmarks._gpu_judge import judge  # noqa: E402
from benchmarks._gpu_report import Result, write  # noqa: E402
from benchmarks._gpu_stages import (  # noqa: E402
    BEFORE,
    ROOT,
    STEPS,
    TOTAL,
    Command,
    Form,
    Stage,
    Training,
    chosen,
    example,
)

GRACE = 5.0
"""Seconds before the limit at which a program is signalled to end."""
LEAST = 10.0
"""A stage is not started if fewer seconds than this are left."""
MARK = "SPMDRL_STAGE"
"""Environment variable that marks all processes of a stage, since torchrun starts its ranks in separate sessions. Its
value begins with `identity` of the program that started them."""
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl that sets the signal for the end of the parent."""
SETUP = "SPMDRL_SETUP_SECONDS"
"""Environment variable with the seconds that `gpu.sh` took before it started this program."""
NO_VLLM = "SPMDRL_NO_VLLM"
"""Environment variable with the reason why `gpu.sh` could not install the packed vLLM."""
SLOWER = 4
"""Factor by which time limits are longer on a CPU."""
TAIL = 40
"""Number of last lines of the log of a failed program in the report."""
LOG = 6 << 20
"""Largest number of bytes that the programs of a stage may print."""
KEPT = 400_000
"""Number of last bytes of a stage's log that are kept, besides a quarter as many first ones."""
RESULTS = {False: Path("benchmarks/results"), True: Path("runs/first_run_cpu")}
"""Folder of the report in the repository, by the value of --small. The folder for --small is ignored by git, so that
the recorded figures are not overwritten."""


# ── processes ────────────────────────────────────────────────────────────────


def family(root: int, mark: str) -> list[int]:
    """Return the running processes of a stage: those with its mark, and children, whose mark a title may hide."""
    parents, found = {}, {root}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state == "Z":
                continue
            parents[int(entry.name)] = int(parent)
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found & set(parents))


def identity(pid: int | str) -> str:
    """Return what tells a running process from all others, later ones with its number too; else an empty text."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if fields[0] != "Z":
            return f"{os.readlink('/proc/self/ns/pid')}-{pid}-{fields[19]}"
    return ""


def orphans() -> list[int]:
    """Return the processes of stages whose program, which `kill -9` may have ended, does not run any more."""
    found, space = [], os.readlink("/proc/self/ns/pid")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            mark = next((v.partition("=")[2] for v in variables if v.startswith(f"{MARK}={space}-")), "")
            if mark and mark != os.environ.get(MARK) and identity(mark.split("-")[1]) != mark.rpartition("-")[0]:
                found.append(int(entry.name))
    return found


def end_with_parent() -> None:
    """Make the kernel kill this process when the program that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def watched(process: subprocess.Popen, log: Path, most: int, seconds: float) -> str:
    """Wait for a program; return why it failed or has to end, or an empty text. most: bytes that the log may reach."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(0.5, max(0.1, end - time.monotonic())))
            return f"exit code {code}" if code else ""
        if log.stat().st_size > most:
            return f"stopped after {LOG >> 20} MiB of output"
        if time.monotonic() >= end:
            return "stopped"


def run(words: list[str], log: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run a program and kill it with all of its processes at the limit; return why it failed, or an empty text."""
    mark = f"{identity(os.getpid())}-{secrets.token_hex(8)}"
    given = max(1.0, seconds - GRACE)
    deadline = time.monotonic() + seconds
    with open(log, "a") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | environment | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            wrong = watched(process, log, file.tell() + LOG, given)
            if wrong.startswith("stopped"):
                wrong = wrong if wrong != "stopped" else f"stopped after {given:.0f} s"
                # SIGINT lets Python programs, including torchrun's agent, exit in order.
                end([process.pid], signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(GRACE, max(0.5, deadline - time.monotonic())))
        finally:
            left = family(process.pid, mark)
            for _ in range(20):
                if not left:
                    break
                end(left, signal.SIGKILL)
                time.sleep(0.1)
                process.poll()
                left = family(process.pid, mark)
    return wrong


# ── stages ───────────────────────────────────────────────────────────────────


def taken_from(log: Path, start: int) -> list[str]:
    """Return the lines of a log from byte `start` on; if they are too long, cut their middle out of the file too."""
    with open(log, "rb") as file:
        file.seek(start)
        part = file.read()
    if len(part) > KEPT + KEPT // 4:
        cut = f"\n... {len(part) - KEPT - KEPT // 4} bytes are left out ...\n".encode()
        part = part[: KEPT // 4] + cut + part[-KEPT:]
        with open(log, "rb+") as file:
            file.truncate(start)
            file.seek(start)
            file.write(part)
    return part.decode(errors="replace").splitlines()


def run_stage(stage: Stage, form: Form, limit: float, gib: float = 1e9) -> Result:
    """Run a stage and return its result, with the reason if it cannot run. gib: memory of the smallest GPU."""
    result = Result(stage.name, limit=limit, proves=stage.proves)
    if reason := stage.lacks(form, gib):
        result.status, result.reason = "skipped", reason
        return result
    began, wrong = time.monotonic(), []
    with open(form.log, "a") as file:
        file.write(f"=== {stage.name}\n")
        start = file.tell()
    for part in stage.runs:
        words, label = part.words(stage.name, form), part.name if isinstance(part, Training) else stage.name
        result.commands.append(shlex.join(words))
        extra = dict(part.environment) if isinstance(part, Command) and form.small else {}
        if isinstance(part, Training):
            shutil.rmtree(part.folder(stage.name, form), ignore_errors=True)
        problem = run(words, form.log, limit - (time.monotonic() - began), extra)
        problems = [problem] if problem else []
        if isinstance(part, Training):
            bad, result.figures[label] = judged(stage, part, form)
            problems += bad
        wrong += [f"{label}: {each}" for each in problems]
        if time.monotonic() - began > limit - GRACE:
            break
    lines = taken_from(form.log, start)
    result.targets = [line for line in lines if line.startswith(("target ", "figure "))]
    result.take(form.file(stage.name, "json"))
    result.clocks = [] if form.small or stage.loads else clocks()
    result.seconds = time.monotonic() - began
    if wrong:
        result.status, result.reason, result.tail = "failed", "; ".join(wrong), lines[-TAIL:]
    return result


def judged(stage: Stage, part: Training, form: Form) -> tuple[list[str], dict[str, float]]:
    """Check the metrics and logs of a training stage; return its problems and its figures."""
    folder, device = part.folder(stage.name, form), "cpu" if form.small else "cuda"
    return judge(folder, STEPS, part.samplers(form), part.engine, device, part.limit)


def share(stages: list[Stage], i: int, spare: float) -> float:
    """Return the time limit of stage i. For a benchmark it includes a share of the time that earlier stages saved."""
    if stages[i].spare or not stages[i].benchmark:
        return stages[i].limit
    later = sum(stage.benchmark and not stage.spare for stage in stages[i:])
    return stages[i].limit + max(0.0, spare) / later


def look(python: str, work: Path, seconds: float) -> dict:
    """Return the facts about the machine, collected by a process that imports torch.

    Raises:
        SystemExit: the process failed; the message has the reason.
    """
    log = work / "facts.log"
    wrong = run([python, "-m", "benchmarks._gpu_facts", str(work / "facts.json")], log, seconds, {})
    if wrong:
        raise SystemExit(f"{python}: cannot collect facts about the machine, {wrong}:\n{log.read_text()[-3000:]}")
    return json.loads((work / "facts.json").read_text())


# ── the program ──────────────────────────────────────────────────────────────


def show(stages: list[Stage], form: Form) -> None:
    """Print the stages for --dry-run."""
    for stage in stages:
        for part in stage.runs:
            print(f"{stage.name}: {shlex.join(part.words(stage.name, form))}")
        when = " of what others left" if stage.spare else ""
        print(f"  needs {stage.needs}; at most {stage.limit} s{when}; {stage.proves}")
    most = sum(s.limit for s in stages if not s.spare) + BEFORE[form.short]
    print(f"{len(stages)} stages, at most {most} s; shown for {form.gpus} GPUs")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the benchmarks in their short forms")
    parser.add_argument(
        "--short", action="store_true", help=f"the short forms of the most valuable stages, {TOTAL[True]} s in all"
    )
    parser.add_argument("--dry-run", action="store_true", help="print every stage with its needs and limit, and stop")
    parser.add_argument("--only", default="", help="names or groups (tests, ranks, kernels), with commas between them")
    parser.add_argument("--limit", type=float, help="seconds of each stage, instead of its own limit")
    parser.add_argument("--results", type=Path, help="folder of the report and its pictures and, if given, of the log")
    parser.add_argument("--small", action="store_true", help="the small form of every stage, on the CPU")
    args = parser.parse_args(argv)
    if args.limit is not None and not GRACE < args.limit < math.inf:
        parser.error(f"--limit {args.limit:g}: give more than {GRACE:g} seconds, in which a stopped stage ends")
    try:
        chosen(args.only, args.short)
    except ValueError as error:
        parser.error(str(error))
    if args.results and not args.dry_run:
        try:
            args.results.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=args.results):
                pass
        except OSError as error:
            parser.error(f"--results {args.results}: nothing can be written there: {error.strerror or error}")
    return args


def prepare_environment(small: bool) -> None:
    """Set the environment variables of all programs that are started."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ[CLAIM] = "cpu" if small else "cuda"
    if small:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    # Tests hide the GPUs from subprocesses by this variable; tests/gpu needs to see them.
    os.environ.pop("SPMDRL_TESTS_GIVEN", None)


def form_of(args: argparse.Namespace, facts: dict, work: Path, folder: Path) -> Form:
    """Return the form of this run on this machine."""
    why = os.environ.get(NO_VLLM, "")
    return Form(
        args.small,
        len(facts["gpus"]),
        tuple(facts["modules"]),
        sys.executable,
        work,
        folder.resolve(),
        args.quick or args.short,
        facts["large_model"],
        args.short,
        {"vllm": why} if why and "vllm" not in facts["modules"] else {},
        # Logs go into the folder of the report only if it was asked for: the default one is kept by git.
        (folder if args.results else work).resolve() / f"first_run_{'cpu' if args.small else 'gpu'}.log",
    )


def run_all(stages: list[Stage], form: Form, facts: dict, base: Path, args: argparse.Namespace, used: float) -> int:
    """Run the stages in order, write the report before and after each, and return how many failed.

    used: seconds of the total that were used already.
    """
    began, clock = datetime.now(UTC), time.monotonic() - used
    gib, slower = min((g["gib"] for g in facts["gpus"]), default=0.0), SLOWER if form.small else 1
    results = [Result(stage.name, "not run", "the program ended before", 0, stage.limit) for stage in stages]
    report = lambda: write(base, results, facts, began, time.monotonic() - clock)  # noqa: E731
    for i, stage in enumerate(stages):
        spent = time.monotonic() - clock
        planned = BEFORE[form.short] + sum(s.limit for s in stages[:i] if not s.spare)
        limit = args.limit or share(stages, i, planned - spent / slower) * slower
        left = TOTAL[form.short] * slower - spent
        limit = min(limit, left)
        results[i] = Result(stage.name, "running", f"began after {spent:.0f} s", 0, limit, stage.proves)
        report()
        if left < LEAST and not stage.lacks(form, gib):
            results[i].status, results[i].reason = "skipped", f"no time was left: {spent:.0f} s are used"
        else:
            results[i] = run_stage(stage, form, limit, gib)
        result = results[i]
        # One that is stopped at its limit may only be slow, and the stages that need the module will tell.
        if stage.loads and result.status == "failed" and ": exit code " in result.reason:
            last = next((line for line in reversed(result.tail) if line.strip()), "")
            why = f"does not load: {result.reason}; {last}"
            form = replace(form, modules=tuple(m for m in form.modules if m != stage.loads), why={stage.loads: why})
        report()
        reason = f": {result.reason}" if result.reason else ""
        print(f"=== {stage.name}: {result.status}, {result.seconds:.0f} s{reason}", flush=True)
        for line in result.targets + result.tail:
            print(f"    {line}")
    failed = sum(result.status == "failed" for result in results)
    print(f"=== {len(results)} stages, {failed} failed, {time.monotonic() - clock:.0f} s: {base}.md")
    return failed


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    stages, folder = chosen(args.only, args.short), args.results or ROOT / RESULTS[args.small]
    if args.dry_run:
        show(stages, example(Path("WORK"), args.results or RESULTS[False], args.quick, args.short))
        return 0
    prepare_environment(args.small)
    # `timeout` and machines that are taken back send SIGTERM: the stage's processes are killed on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end(orphans(), signal.SIGKILL)
    work = Path(tempfile.mkdtemp(prefix="spmdrl_first_run_"))
    used = float(os.environ.get(SETUP, 0))
    began = time.monotonic() - used
    facts = look(sys.executable, work, max(20.0, BEFORE[args.short] - used))
    if not facts["gpus"] and not args.small:
        small = "--small runs the small form of every stage on its CPU"
        print(f"{sys.executable}: torch sees no CUDA device on this machine; {small}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    form = form_of(args, facts, work, folder)
    form.log.unlink(missing_ok=True)
    print(f"{len(facts['gpus'])} GPUs; stages over several ranks use {form.ranks}; work in {work}")
    base = folder / f"first_run_{'cpu' if args.small else 'gpu'}"
    failed = run_all(stages, form, facts, base, args, time.monotonic() - began)
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
