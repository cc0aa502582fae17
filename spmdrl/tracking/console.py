"""Shows a run on rank 0's console: a live panel on a terminal, otherwise one line per step.

Model text is shown without markup and control characters, so that a completion can neither colour the screen nor move
the cursor.
"""

import atexit
import contextlib
import math
import os
import pdb
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spmdrl.config.dump import redact_text

LABELS = {
    "logp_diff/mean": "|dlogp|",
    "tokens/s": "tok/s",
    "eval/score": "score",
    "grad_norm": "grad",
    "data/epoch": "epoch",
    "calibration/error": "calib",
    "rewards/margin": "margin",
}
"""Maps metric names to console labels. Other metrics are labelled with the part of their name before the first `/`."""
SAMPLES_EVERY = 10
_BARS = "▁▂▃▄▅▆▇█"


class Console:
    """A run's console output, for rank 0 only; `finish` (or `close`) releases the terminal."""

    def __init__(
        self,
        kind: str = "auto",
        total_steps: int = 0,
        first_step: int = 0,
        stream: TextIO | None = None,
        columns: Sequence[str] = (),
        phases: Sequence[str] = (),
    ) -> None:
        """Show a run of `total_steps` steps on a stream, by default stdout.

        kind: `live`, `plain`, or `auto` (`live` if the stream is a terminal, otherwise `plain`). first_step: number of
        steps finished before a resume. columns: metrics to show; evaluation metrics appear after the first evaluation.
        phases: the phases of a step, in order; other phases are shown after them.
        """
        if kind not in ("auto", "live", "plain"):
            raise ValueError(f"--tracking.console {kind}: must be auto, live or plain")
        self._stream = sys.stdout if stream is None else stream
        with contextlib.suppress(AttributeError, ValueError):
            self._stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an ASCII locale must not end a run
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.total_steps, self.columns, self.phases = total_steps, columns, phases
        self._metrics: dict[str, float] = {}
        self._curves: dict[str, deque[float]] = {name: deque(maxlen=400) for name in columns}
        self._samples: Sequence[Mapping[str, Any]] = ()
        self._phase, self._phase_since = "start", time.monotonic()
        self._next_samples = first_step
        self._live: Live | None = None
        if kind == "live" or (kind == "auto" and terminal):
            self._start_live(first_step)

    def _start_live(self, first_step: int) -> None:
        screen = rich.console.Console(file=self._stream, force_terminal=True, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("", total=self.total_steps, completed=first_step)
        self._live = Live(console=screen, get_renderable=self._panel, refresh_per_second=4, transient=False)
        self._live.start()
        atexit.register(self.close)
        # A breakpoint on rank 0 needs the terminal, so the panel closes and the run continues with plain lines.
        self._breakpointhook = sys.breakpointhook

        def breakpoint_without_panel(*args: Any, **kwargs: Any) -> Any:
            self.close()
            plain = self._breakpointhook is sys.__breakpointhook__
            if plain and os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace"):
                # By default, pdb would stop in this function, so pass it the frame of the user's breakpoint.
                return pdb.Pdb().set_trace(sys._getframe(1))
            return self._breakpointhook(*args, **kwargs)

        sys.breakpointhook = breakpoint_without_panel

    @property
    def is_live(self) -> bool:
        """True while the panel is on the screen."""
        return self._live is not None

    def phase(self, name: str) -> None:
        """Show `name` as the current phase in the panel; "" means that no phase is in progress."""
        self._phase, self._phase_since = name, time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Show a finished step (step numbers start at 1). A metric without a value is shown as `-`.

        samples: dicts with `prompt`, `completion` and `reward`.
        """
        self._metrics = dict(metrics)
        for name, curve in self._curves.items():
            if name in metrics and math.isfinite(metrics[name]):
                curve.append(metrics[name])
        self._samples = samples or self._samples
        if self._live is not None:
            self._progress.update(self._task, completed=step)
            self._live.refresh()
            return
        self._print(plain_line(step, self.total_steps, metrics, self.columns, self.phases))
        if samples and step >= self._next_samples:
            self._next_samples = (step // SAMPLES_EVERY + 1) * SAMPLES_EVERY
            for sample in samples:
                prompt, completion = clean(sample.get("prompt", ""), 48), clean(sample.get("completion", ""), 64)
                self._print(f"  {number(sample.get('reward')):>6}  {prompt} -> {completion}")

    def note(self, text: str) -> None:
        """Show a line above the panel, or between the lines of steps."""
        text = redact_text(text)
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            self._print(text)

    def finish(self, lines: Sequence[str] = ()) -> None:
        """Leave the last panel on the screen and write closing lines under it."""
        self.close()
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Release the terminal; later output is shown as plain lines. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            sys.breakpointhook = self._breakpointhook
            atexit.unregister(self.close)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _panel(self) -> RenderableType:
        numbers = Table.grid(padding=(0, 2))
        for name in self.columns:
            curve = self._curves[name]
            if name.startswith("eval/") and not curve:
                continue
            value = self._metrics.get(name, curve[-1] if curve else None)
            numbers.add_row(Text(label(name), "dim"), Text(number(value, name), "bold"), Text(sparkline(curve), "cyan"))
        columns = Table.grid(padding=(0, 4))
        columns.add_row(numbers, self._phase_table())
        parts: list[RenderableType] = [self._progress, columns]
        if self._samples:
            samples = Table(box=None, expand=True, header_style="dim")
            samples.add_column("prompt", ratio=2, no_wrap=True)
            samples.add_column("completion", ratio=3, no_wrap=True)
            samples.add_column("reward", justify="right", width=7)
            for sample in self._samples:
                prompt, completion = clean(sample.get("prompt", ""), 80), clean(sample.get("completion", ""), 160)
                samples.add_row(Text(prompt), Text(completion), number(sample.get("reward")))
            parts.append(samples)
        running = f"{self._phase} {time.monotonic() - self._phase_since:.1f}s" if self._phase else ""
        return Panel(Group(*parts), title="spmdrl", subtitle=Text(running), border_style="dim")

    def _phase_table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        times = phase_times(self._metrics, self.phases)
        whole = self._metrics.get("time/step") or sum(times.values()) or 1.0
        for name, seconds in times.items():
            share = min(1.0, max(0.0, seconds / whole))
            style = "bold yellow" if name == self._phase else "dim"
            table.add_row(Text(name, style), Text("█" * round(20 * share) or "▏", "green"), Text(f"{seconds:.2f}s"))
        return table


def label(metric: str) -> str:
    """Return the short name of a metric for the console."""
    return LABELS.get(metric, metric.partition("/")[0])


def plain_line(
    step: int, total_steps: int, metrics: Mapping[str, float], columns: Sequence[str], phases: Sequence[str]
) -> str:
    """Return a step as a line: `step 12/60 reward 0.61 kl 0.0012 ... time 0.8s (rollout .3 logp .0 update .4)`."""
    words = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for name in columns:
        if name.startswith("eval/") and name not in metrics:
            continue
        words.append(f"{label(name)} {number(metrics.get(name), name):<7}")
    if "time/step" in metrics:
        words.append(f"time {metrics['time/step']:.1f}s")
    times = phase_times(metrics, phases)
    if times:
        # Seconds are shown without a leading zero (.3, 12.3) to shorten the line.
        shown = [f"{name} {f'{seconds:.1f}'.removeprefix('0')}" for name, seconds in times.items()]
        words.append(f"({' '.join(shown)})")
    return " ".join(words)


def phase_times(metrics: Mapping[str, float], phases: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each phase: first `phases` in their order, then other phases. The step time is omitted."""
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    times.pop("step", None)
    return {name: times[name] for name in [*phases, *times] if name in times}


def number(value: float | None, name: str = "") -> str:
    """Format a metric with three significant digits, a rate (`name` ends in `/s`) as a whole number, None as `-`."""
    if value is None:
        return "-"
    return f"{value:.0f}" if name.endswith("/s") else f"{value:.3g}"


def sparkline(values: Sequence[float] | deque[float], width: int = 40) -> str:
    """Return a curve as one line of text; each character stands for the mean of an equal share of the values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def clean(text: Any, width: int) -> str:
    """Return model text on one line of at most `width` characters. Newlines become ⏎, control characters become ·."""
    text = str(text)
    # The text is cut before it is cleaned, because a completion may be long and only its ends are shown.
    if len(text) > width:
        head = (width - 1) * 2 // 3
        text = text[:head] + "…" + text[len(text) - (width - 1 - head) :]
    text = text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")
    return "".join(char if char.isprintable() else "·" for char in text)
