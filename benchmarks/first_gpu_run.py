"""A first run on a machine's GPUs, which takes half an hour, continues after failed stages, and writes a report.

    ./benchmarks/gpu.sh [options]                 this program with the project's interpreter and missing wheels
    python benchmarks/first_gpu_run.py [options]

`--dry-run` prints the stages of `_gpu_stages.py` with their requirements and what each proves. If the machine does not
meet the requirements of a stage, the stage is skipped with the reason. If a stage fails, hangs or leaves processes
behind, the others still run. A training stage trains a model and checks its metrics and logs (`_gpu_judge.py`). The
report is written after every stage. The exit code is 0 if no stage failed, 1 if one did, and 2 without a GPU.

This program only needs the standard library; programs that import torch run in separate processes.
"""

import argparse
import contextlib
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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._gpu_judge import judge  # noqa: E402
from benchmarks._gpu_stages import FACTS, ROOT, STEPS, Command, Form, Stage, Training, chosen, example  # noqa: E402

GRACE = 5.0
"""Seconds before the limit at which a program is signalled to end."""
MARK = "SPMDRL_STAGE"
"""Environment variable that marks all processes of a stage, since torchrun starts its ranks in separate sessions."""
SLOWER = 4
"""Factor by which time limits are longer on a CPU."""
TAIL = 40
"""Number of last lines of the log of a failed program in the report."""
RESULTS = {False: Path("benchmarks/results"), True: Path("runs/first_run_cpu")}
"""Folder of the report in the repository, by the value of --small. The folder for --small is ignored by git, so that
the recorded figures are not overwritten."""


@dataclass
class Result:
    """Result of a stage."""

    name: str
    status: str = "ok"
    """`ok`, `failed` or `skipped`."""
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    proves: str = ""
    commands: list[str] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures by run and by name."""
    targets: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


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


def end(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def run(words: list[str], log: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run a program and kill it with all of its processes at the limit; return why it failed, or an empty text."""
    mark = secrets.token_hex(8)
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
        )
        wrong = ""
        try:
            code = process.wait(max(1.0, seconds - GRACE))
            wrong = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            wrong = f"stopped after {seconds:.0f} s"
            # SIGINT lets Python programs, including torchrun's agent, exit in order.
            end([process.pid], signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.5, deadline - time.monotonic()))
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


def run_stage(stage: Stage, form: Form, limit: float, gib: float = 1e9) -> Result:
    """Run a stage and return its result, which is the reason if it cannot run. gib: memory of the smallest GPU."""
    result = Result(stage.name, limit=limit, proves=stage.proves)
    if reason := stage.lacks(form, gib):
        result.status, result.reason = "skipped", reason
        return result
    log, began = form.work / f"{stage.name}_{'cpu' if form.small else 'gpu'}.log", time.monotonic()
    log.unlink(missing_ok=True)
    wrong: list[str] = []
    for part in stage.runs:
        words, label = part.words(stage.name, form), part.name if isinstance(part, Training) else stage.name
        result.commands.append(shlex.join(words))
        extra = dict(part.environment) if isinstance(part, Command) and form.small else {}
        if isinstance(part, Training):
            shutil.rmtree(part.folder(stage.name, form), ignore_errors=True)
        problem = run(words, log, limit - (time.monotonic() - began), extra)
        problems = [problem] if problem else []
        if isinstance(part, Training):
            bad, result.figures[label] = judged(stage, part, form)
            problems += bad
        wrong += [f"{label}: {each}" for each in problems]
        if time.monotonic() - began > limit - GRACE:
            break
    lines = log.read_text(errors="replace").splitlines()
    result.targets = [line for line in lines if line.startswith("target ")]
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
    later = sum(stage.benchmark for stage in stages[i:])
    return stages[i].limit + (max(0.0, spare) / later if stages[i].benchmark else 0.0)


def look(python: str, work: Path) -> dict:
    """Return the facts about the machine, collected by a process that imports torch.

    Raises:
        SystemExit: the process failed; the message has the reason.
    """
    log = work / "facts.log"
    wrong = run([python, "-m", "benchmarks._gpu_facts", str(work / "facts.json")], log, FACTS, {})
    if wrong:
        raise SystemExit(f"{python}: cannot collect facts about the machine, {wrong}:\n{log.read_text()[-3000:]}")
    return json.loads((work / "facts.json").read_text())


# ── the report ───────────────────────────────────────────────────────────────


def write(base: Path, results: list[Result], facts: dict, began: datetime, seconds: float) -> None:
    """Write the report so far as JSON and as Markdown."""
    report = {"date": began.isoformat(timespec="seconds"), "seconds": round(seconds), "machine": facts}
    report["stages"] = [asdict(result) for result in results]
    base.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(report, facts))


def markdown(report: dict, facts: dict) -> str:
    stages = report["stages"]
    count = {status: sum(s["status"] == status for s in stages) for status in ("ok", "failed", "skipped")}
    gpus = ", ".join(f"{g['name']} ({g['gib']} GiB, {g['capability']})" for g in facts["gpus"]) or "no GPU"
    lines = [
        f"# First run, {report['date']}",
        "",
        f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped, in {report['seconds']} s.",
        f"Machine: {facts['host']}, {facts['cpu']}; {len(facts['gpus'])} GPUs: {gpus}.",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()) + ".",
        "",
        "| stage | status | seconds (limit) | what it proves, or why not |",
        "|---|---|---|---|",
    ]
    for s in stages:
        why = (s["reason"] or s["proves"]).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {s['name']} | {s['status']} | {s['seconds']:.0f} ({s['limit']:.0f}) | {why} |")
    for s in stages:
        if not (s["figures"] or s["targets"] or s["tail"]):
            continue
        lines += ["", f"## {s['name']}", ""]
        for run_name, figures in s["figures"].items():
            lines.append(f"- {run_name}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        block = [*s["targets"], *(["$ " + command for command in s["commands"]] if s["tail"] else []), *s["tail"]]
        lines += ["", "```", *block, "```"] if block else []
    if facts["topology"]:
        lines += ["", "## Links", "", "```", facts["topology"], "```"]
    return "\n".join(lines) + "\n"


def show(stages: list[Stage], form: Form) -> None:
    """Print the stages for --dry-run."""
    for stage in stages:
        for part in stage.runs:
            print(f"{stage.name}: {shlex.join(part.words(stage.name, form))}")
        print(f"  needs {stage.needs}; at most {stage.limit} s; {stage.proves}")
    print(f"{len(stages)} stages, at most {sum(s.limit for s in stages) + FACTS} s; shown for {form.gpus} GPUs")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the benchmarks in their short forms")
    parser.add_argument("--dry-run", action="store_true", help="print every stage with its needs and limit, and stop")
    parser.add_argument("--only", default="", help="names or groups (tests, ranks, kernels), with commas between them")
    parser.add_argument("--limit", type=float, help="seconds of each stage, instead of its own limit")
    parser.add_argument(
        "--results", type=Path, help="folder of the report, the benchmarks' files and, if given, the logs"
    )
    parser.add_argument("--small", action="store_true", help="the small form of every stage, on the CPU")
    args = parser.parse_args(argv)
    if args.limit is not None and not GRACE < args.limit < math.inf:
        parser.error(f"--limit {args.limit:g}: seconds above {GRACE:g}, which a stage is given to end in")
    try:
        chosen(args.only)
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


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    stages, results_folder = chosen(args.only), args.results or ROOT / RESULTS[args.small]
    if args.dry_run:
        show(stages, example(Path("WORK"), args.results or RESULTS[False], args.quick))
        return 0
    kind = "cpu" if args.small else "gpu"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if args.small:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    # Tests hide the GPUs from subprocesses by this variable; tests/gpu needs to see them.
    os.environ.pop("SPMDRL_TESTS_GIVEN", None)
    work = Path(tempfile.mkdtemp(prefix="spmdrl_first_run_"))
    began, clock, results = datetime.now(UTC), time.monotonic(), []
    facts = look(sys.executable, work)
    if not facts["gpus"] and not args.small:
        small = "--small runs the small form of every stage on its CPU"
        print(f"{sys.executable}: torch sees no CUDA device on this machine; {small}", file=sys.stderr)
        return 2
    results_folder.mkdir(parents=True, exist_ok=True)
    form = Form(
        args.small,
        len(facts["gpus"]),
        tuple(facts["modules"]),
        sys.executable,
        work,
        results_folder.resolve(),
        args.quick,
        facts["large_model"],
    )
    gib, base = min((g["gib"] for g in facts["gpus"]), default=0.0), results_folder / f"first_run_{kind}"
    print(f"{len(facts['gpus'])} GPUs; stages over several ranks use {form.ranks}; work in {work}")
    try:
        for i, stage in enumerate(stages):
            planned = FACTS + sum(s.limit for s in stages[:i])
            limit = args.limit or share(stages, i, planned - (time.monotonic() - clock)) * (SLOWER if args.small else 1)
            result = run_stage(stage, form, limit, gib)
            results.append(result)
            write(base, results, facts, began, time.monotonic() - clock)
            reason = f": {result.reason}" if result.reason else ""
            print(f"=== {stage.name}: {result.status}, {result.seconds:.0f} s{reason}", flush=True)
            for line in result.targets + result.tail:
                print(f"    {line}")
    finally:
        if args.results:
            for log in work.glob("*.log"):
                shutil.copy(log, results_folder)
    failed = [result.name for result in results if result.status == "failed"]
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    print(f"=== {len(results)} stages, {len(failed)} failed, {time.monotonic() - clock:.0f} s: {base}.md")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
