"""Writes a run's metrics, samples and console output on rank 0."""

import json
import logging
from pathlib import Path

from spmdrl.config.dump import to_dict
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.world import World
from spmdrl.tracking.trackers import cut_lines, open_trackers, set_aside

log = logging.getLogger("spmdrl")


class Journal:
    """Writes a run's metrics and samples. Ranks other than 0 only write one line per step to their log file."""

    def __init__(self, session: Session, start_step: int):
        self.console, self.trackers, self.samples = session.console, [], None
        self.first = session.world.is_first
        if self.first:
            cfg, folder = session.cfg, session.folder
            samples = folder / "samples.jsonl"
            if not start_step:
                _begin_anew(session, [folder / "metrics.jsonl", samples])
            names, project = cfg.tracking.trackers, cfg.tracking.project
            self.trackers = open_trackers(names, folder, project, cfg.run.name, to_dict(cfg), start_step + 1)
            if samples.exists() and samples.stat().st_size:
                cut_lines(samples, start_step + 1)
            self.samples = open(samples, "a", encoding="utf-8")  # noqa: SIM115 (see `close`)

    def step(self, step: int, values: dict[str, float], rows: list[dict]) -> None:
        """Log a completed step (1-based). values: metrics, equal on all ranks. rows: samples of the step."""
        self.rows(rows)
        if self.console:
            self.console.step(step, values, rows)
        self.numbers(step, values)
        # The metrics are equal on all ranks, so only rank 0 logs them.
        text = json.dumps({k: round(v, 6) for k, v in values.items()}) if self.first else "is done"
        log.info("step %d %s", step, text)

    def rows(self, rows: list[dict]) -> None:
        """Append samples to `samples.jsonl`."""
        if self.samples:
            self.samples.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.samples.flush()

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Log metrics of a step to all trackers, which merge consecutive calls for the same step."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close the trackers and the samples file."""
        for tracker in self.trackers:
            tracker.close()
        if self.samples:
            self.samples.close()


def _begin_anew(session: Session, files: list[Path]) -> None:
    """On rank 0, rename files left in this folder by an earlier run without a checkpoint, and print a note."""
    steps = f"{session.folder} contains metrics of an earlier run without a checkpoint to continue from"
    metrics = files[0].exists() and files[0].stat().st_size
    held = [path for path in files if metrics and path.exists() and path.stat().st_size]
    if held:
        session.note(f"{steps}: this run begins at step 1; the old files are now {', '.join(map(set_aside, held))}")


def merge_roles(values: dict[str, float], world: World) -> dict[str, float]:
    """Merge the metrics of training, scoring and sampling ranks into one dict. Collective under split placement.

    values: this rank's metrics, equal on all ranks of a role. If several roles have a metric of the same name, the
    training ranks take precedence, then the sampling ranks. Memory metrics use the maximum instead.
    """
    if not world.roles.split:
        return values
    texts = all_gather_text(json.dumps(values), world.host_group)
    out: dict[str, float] = {}
    for ranks in (world.roles.scorers, world.roles.samplers, world.roles.trainers):
        theirs = json.loads(texts[ranks[0]])
        memory = {k: max(v, out.get(k, 0.0)) for k, v in theirs.items() if k.startswith("memory/")}
        out |= theirs | memory
    return out
