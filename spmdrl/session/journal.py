"""Metrics, samples and the console of a run, all written by rank 0."""

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
    """Writes a run's numbers and samples. Other ranks hold one too, which writes to their log file only."""

    def __init__(self, session: Session, start_step: int):
        self.console, self.trackers, self.samples = session.console, [], None
        self.first = session.world.is_first
        if self.first:
            cfg, folder = session.cfg, session.folder
            samples = folder / "samples.jsonl"
            if not start_step:
                begin_anew(session, [folder / "metrics.jsonl", samples])
            names, project = cfg.tracking.trackers, cfg.tracking.project
            self.trackers = open_trackers(names, folder, project, cfg.run.name, to_dict(cfg), start_step + 1)
            if samples.exists() and samples.stat().st_size:
                cut_lines(samples, start_step + 1)
            self.samples = open(samples, "a", encoding="utf-8")  # noqa: SIM115 (see `close`)

    def step(self, step: int, values: dict[str, float], rows: list[dict]) -> None:
        """One finished step, counted from 1; values are alike on every rank, rows are samples to look at."""
        self.rows(rows)
        if self.console:
            self.console.step(step, values, rows)
        self.numbers(step, values)
        # The numbers are alike on every rank: they stand in one log.
        said = f" {json.dumps({k: round(v, 6) for k, v in values.items()})}" if self.first else " is done"
        log.info("step %d%s", step, said)

    def rows(self, rows: list[dict]) -> None:
        """Write samples to look at."""
        if self.samples:
            self.samples.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.samples.flush()

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Further numbers of a step; on the last step they join its line."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close every file."""
        for tracker in self.trackers:
            tracker.close()
        if self.samples:
            self.samples.close()


def begin_anew(session: Session, files: list[Path]) -> None:
    """Set aside what an earlier run wrote into this folder and left no checkpoint of, and say so. On the first rank."""
    steps = f"{session.folder} holds the numbers of a run without a checkpoint to go on from"
    metrics = files[0].exists() and files[0].stat().st_size
    held = [path for path in files if metrics and path.exists() and path.stat().st_size]
    if held:
        session.note(f"{steps}: this run begins at step 1, and they are now {', '.join(map(set_aside, held))}")


def merge_roles(values: dict[str, float], world: World) -> dict[str, float]:
    """Numbers of the ranks that train, score and sample together, on every rank. Collective under `split`.

    values: alike on ranks that do the same. Of a name that several have, what those say who train, else who sample;
    of memory the most.
    """
    if not world.roles.split:
        return values
    texts = all_gather_text(json.dumps(values), world.host_group)
    out: dict[str, float] = {}
    for ranks in (world.roles.scorers, world.roles.samplers, world.roles.trainers):
        said = json.loads(texts[ranks[0]])
        memory = {k: max(v, out.get(k, 0.0)) for k, v in said.items() if k.startswith("memory/")}
        out |= said | memory
    return out
