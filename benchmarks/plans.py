"""Plans jobs from 1 to 1,024 GPUs and published layouts, and measures the time and memory of planning.

    python benchmarks/plans.py [--quick] [--only NAME ...] [--json FILE] [--docs]

The jobs are in the first table of docs/scale.md, and the published layouts in tests/golden/plan/anchors.json. Each plan
runs in a separate process, `python -m spmdrl.plan`. Its seconds and memory include its child processes: the sum of
their resident memory is sampled every tenth of a second, and shared pages count for each process. `--docs` updates the
tables of docs/scale.md; cells of other plans stay unchanged. `--quick` plans two small jobs. If a job cannot be
planned, the reason is printed, and the exit code is 1.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks._about import measured_on, save  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "scale.md"
ANCHORS = ROOT / "tests" / "golden" / "plan" / "anchors.json"
QUICK = (
    "--config configs/gsm8k_grpo.yaml --world 1 --gpu h100",
    "--config configs/gsm8k_grpo.yaml --world 8 --gpu h100",
)
TARGET = "--config configs/dapo_671b.yaml --world 512 --gpu h100"
SECONDS, MEMORY_GIB = 60.0, 4.0
"""Maximum time and memory to plan 671 G parameters on 512 GPUs."""
LIMIT = 900.0
GIB = 1 << 30


def tables(text: str) -> dict[str, list[list[str]]]:
    """Return the cells of the tables between the markers of a page, without header rows."""
    found = {}
    for name, body in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", text, re.S):
        rows = [line.strip().strip("|").split(" | ") for line in body.strip().splitlines()[2:]]
        found[name] = [[cell.strip() for cell in row] for row in rows]
    return found


def jobs() -> dict[str, str]:
    """Return the command-line words of each plan by its name: jobs by their flags, layouts by their names."""
    made = {flags: flags for row in tables(DOCS.read_text())["jobs"] if (flags := row[2].strip("`"))}
    for anchor in json.loads(ANCHORS.read_text())["anchors"]:
        words = ["--config", anchor["config"], "--world", str(anchor["gpus"]), "--gpu", anchor["gpu"]]
        made[anchor["name"]] = shlex.join([*words, *anchor["flags"]])
    return made


def planned(words: str) -> dict[str, Any]:
    """Plan a job; return its facts with `seconds` and `memory_gib` of planning, or with the reason in `skipped`."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "plan.json", Path(folder) / "log"
        command = [sys.executable, "-m", "spmdrl.plan", *shlex.split(words), "--json", str(out), "--no-nearest"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        began, most = time.monotonic(), 0
        with log.open("w") as console:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path},
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None:
                most = max(most, resident(process.pid))
                if time.monotonic() - began > LIMIT:
                    # Kill the process and its children.
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.1)
        seconds = time.monotonic() - began
        if not out.exists():
            lines = [line for line in log.read_text().splitlines() if line.strip()] or [f"ended: {process.returncode}"]
            return {"skipped": " ".join(lines[:3] if process.returncode == 2 else lines[-1:])[:300]}
        return json.loads(out.read_text()) | {"planning_seconds": seconds, "planning_gib": most / GIB}


def resident(pid: int) -> int:
    """Return the bytes of resident memory of a process and its descendants."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except (OSError, IndexError):
            continue  # The process has ended.
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def device_bytes(facts: dict[str, Any]) -> int:
    """Return the peak bytes on the device of the rank with the highest peak."""
    return max(sum(rows.values()) for kind in facts["kinds"] for rows in kind["device_bytes"].values())


def cells(facts: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return cells of the tables: GiB on the device, free GiB, bytes on the host, and seconds of a step."""
    step = facts["least_seconds"]
    return (
        f"{device_bytes(facts) / GIB:.1f}",
        f"{facts['spare_bytes'] / GIB:.1f}",
        f"{facts['host_bytes_of_node'] / GIB:,.0f}",
        f"{step:,.0f}" if step >= 10 else f"{step:.2g}",
    )


def filled(text: str, found: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page with updated cells of the plans in `found`."""

    def row(line: str) -> str:
        parts = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if parts[0].strip("`") in found:
            facts = found[parts[0].strip("`")]
            device, free, _, _ = cells(facts)
            parts[2:5] = device, free, f"{facts['host_bytes_of_node'] / 1e9:,.0f}"
        elif len(parts) > 6 and parts[2].strip("`") in found:
            parts[3:7] = cells(found[parts[2].strip("`")])
        else:
            return line
        return "| " + " | ".join(parts).rstrip() + " |"

    def table(match: re.Match) -> str:
        return "\n".join(row(line) for line in match[0].split("\n"))

    return re.sub(r"<!-- table: (?:jobs|anchors) -->\n.*?<!-- end -->", table, text, flags=re.S)


def main() -> None:
    """Plan the jobs, print the table and the targets, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small jobs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="words that a plan's name holds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--docs", action="store_true", help="fill the tables of docs/scale.md")
    own = parser.parse_args()
    about = measured_on("cpu", own.json)
    found: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    print(f"{'device GiB':>10} {'free GiB':>9} {'host GiB':>9} {'step s':>8} {'plan s':>7} {'plan GiB':>8}  job")
    for name, words in jobs().items():
        if (own.quick and name not in QUICK) or (own.only and not any(word in name for word in own.only)):
            continue
        facts = planned(words)
        if "skipped" in facts:
            skipped[name] = facts["skipped"]
            print(f"{'skipped':>10} {name}: {facts['skipped']}", flush=True)
            continue
        found[name] = facts
        device, free, host, step = cells(facts)
        took = f"{facts['planning_seconds']:>7.1f} {facts['planning_gib']:>8.2f}"
        print(f"{device:>10} {free:>9} {host:>9} {step:>8} {took}  {name}", flush=True)
    if target := found.get(TARGET):
        seconds, memory = target["planning_seconds"], target["planning_gib"]
        for what, value, most in (("seconds", seconds, SECONDS), ("gib", memory, MEMORY_GIB)):
            print(f"target plan-671b-{what} {value:.1f} <={most:g} {'ok' if value <= most else 'miss'}")
    save(own.json, about, plans=found, skipped=skipped)
    if own.docs:
        DOCS.write_text(filled(DOCS.read_text(), found))
    if skipped:
        sys.exit(f"{len(skipped)} of {len(found) + len(skipped)} jobs could not be planned")


if __name__ == "__main__":
    main()
