"""The report of `first_gpu_run.py`: results of stages, as JSON and Markdown. It only needs the standard library."""

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

MOST = 1 << 20
"""Largest number of bytes of a benchmark's file that goes into the report. A larger file stays beside it."""


@dataclass
class Result:
    """Result of a stage."""

    name: str
    status: str = "ok"
    """`ok`, `failed`, `skipped`; or, as long as the program has not ended, `running` or `not run`."""
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    proves: str = ""
    commands: list[str] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures by run and by name."""
    targets: list[str] = field(default_factory=list)
    """Lines of the programs that begin with `target` or `figure`."""
    tail: list[str] = field(default_factory=list)
    clocks: list[dict[str, str]] = field(default_factory=list)
    """Clocks, power and temperature of each GPU at the end of the stage."""
    results: Any = None
    """Content of the file of a benchmark."""

    def take(self, file: Path) -> None:
        """Move the content of a benchmark's file into the report; leave a file that is too large or is no JSON."""
        if not file.is_file() or file.stat().st_size > MOST:
            return
        try:
            self.results = json.loads(file.read_text())
        except ValueError:
            return
        file.unlink()


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step, so that a program that is killed leaves the last complete version."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    os.replace(part, file)


def write(base: Path, results: list[Result], facts: dict, began: datetime, seconds: float) -> None:
    """Write the report so far as JSON and as Markdown."""
    report = {"date": began.isoformat(timespec="seconds"), "seconds": round(seconds), "machine": facts}
    report["stages"] = [asdict(result) for result in results]
    write_whole(base.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
    write_whole(base.with_suffix(".md"), markdown(report, facts))


def markdown(report: dict, facts: dict) -> str:
    """Return the report as Markdown."""
    stages = report["stages"]
    names = ("ok", "failed", "skipped", "running", "not run")
    count = {status: sum(s["status"] == status for s in stages) for status in names}
    told = ", ".join(f"{number} {status}" for status, number in count.items() if number or status in names[:3])
    gpus = ", ".join(f"{g['name']} ({g['gib']} GiB, {g['capability']})" for g in facts["gpus"]) or "no GPU"
    lines = [
        f"# First run, {report['date']}",
        "",
        f"{told}, in {report['seconds']} s.",
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
        if s["clocks"]:
            lines.append("- clocks at its end: " + "; ".join(", ".join(each.values()) for each in s["clocks"]))
        block = [*s["targets"], *(["$ " + command for command in s["commands"]] if s["tail"] else []), *s["tail"]]
        lines += ["", "```", *block, "```"] if block else []
    if facts["topology"]:
        lines += ["", "## Links", "", "```", facts["topology"], "```"]
    return "\n".join(lines) + "\n"
