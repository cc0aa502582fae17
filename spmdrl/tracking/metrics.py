"""Numbers of one step, gathered on every rank and reduced with two collectives, and the clock of its phases.

No process group here: `Metrics.reduce` is given the all_reduce to use.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MOST_MAXIMA = 62
"""Maxima travel in a tensor of fixed size, together with the digest of the names."""

AllReduce = Callable[[torch.Tensor, str], object]
"""`all_reduce(tensor, op)`, op "sum" or "max", in place; its return value is not used."""


class Metrics:
    """Weighted means, sums and maxima of named numbers.

    Every rank must add the same names between two calls of `reduce`; a rank with nothing to say adds with weight 0 (or
    adds a sum of 0, or a maximum of -inf). Values are floats or 0-d tensors; tensors are not read before `reduce`, so
    that adding them does not wait for the device.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[str, tuple[str, float | torch.Tensor, float | torch.Tensor]] = {}

    def add(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add to a mean: the result is sum(value * weight) / sum(weight) over all calls and ranks."""
        value, weight = _double(value), _double(weight)
        # A value without weight may be nan (the mean of nothing), and 0 * nan is nan.
        if isinstance(weight, torch.Tensor):
            product = torch.where(weight == 0, torch.zeros_like(weight), value * weight)
        else:
            product = value * weight if weight else 0.0
        _, total, total_weight = self._entry(name, "mean", 0.0)
        self._entries[name] = ("mean", total + product, total_weight + weight)

    def add_sum(self, name: str, value: float | torch.Tensor) -> None:
        """Add to a sum over all calls and ranks."""
        _, total, _ = self._entry(name, "sum", 0.0)
        self._entries[name] = ("sum", total + _double(value), 0.0)

    def add_max(self, name: str, value: float | torch.Tensor) -> None:
        """Take the largest over all calls and ranks. A nan counts as inf, as a maximum over ranks may lose it."""
        _, most, _ = self._entry(name, "max", -math.inf)
        value = _double(value)
        if isinstance(value, torch.Tensor) or isinstance(most, torch.Tensor):
            value, most = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(most, dtype=torch.float64)
            device = value.device if value.device.type != "cpu" else most.device
            largest = torch.maximum(
                torch.nan_to_num(value.to(device), nan=math.inf, posinf=math.inf, neginf=-math.inf), most.to(device)
            )
        else:
            largest = max(math.inf if math.isnan(value) else value, most)
        self._entries[name] = ("max", largest, 0.0)

    def merge(self, other: "Metrics") -> None:
        """Add all of another accumulator's entries to this one."""
        for name, (kind, total, weight) in other._entries.items():
            if kind == "max":
                self.add_max(name, total)
            else:
                _, mine, my_weight = self._entry(name, kind, 0.0)
                self._entries[name] = (kind, mine + total, my_weight + weight)

    def dump(self) -> list[tuple[str, str, float, float]]:
        """(name, kind, total, weight) of all entries, read off the device, for `load`."""
        return [(name, kind, float(total), float(weight)) for name, (kind, total, weight) in self._entries.items()]

    def load(self, rows: list[tuple[str, str, float, float]]) -> None:
        """Merge entries of `dump`."""
        other = Metrics()
        other._entries = {name: (kind, total, weight) for name, kind, total, weight in rows}
        self.merge(other)

    def scale_sum(self, name: str, factor: float) -> None:
        """Multiply a sum as far as it is added up; does nothing where nothing was added."""
        if name in self._entries:
            _, total, _ = self._entry(name, "sum", 0.0)
            self._entries[name] = ("sum", total * factor, 0.0)

    def prefixed(self, prefix: str) -> "Metrics":
        """The same numbers under longer names."""
        out = Metrics()
        out._entries = {prefix + name: entry for name, entry in self._entries.items()}
        return out

    def _entry(self, name: str, kind: str, start: float) -> tuple[str, float | torch.Tensor, float | torch.Tensor]:
        entry = self._entries.get(name, (kind, start, 0.0))
        if entry[0] != kind:
            raise ValueError(f"metric {name} is a {entry[0]} on this rank; it cannot be a {kind} as well")
        return entry

    def reduce(self, all_reduce: AllReduce, device: torch.device | str = "cpu") -> dict[str, float]:
        """Results over all ranks, alike on every rank, names sorted; then start empty. Collective.

        The first all_reduce (max) has a fixed size and carries a digest of the names with the maxima; the second (sum)
        has the size of the names and runs only where the digests agree, so ranks that differ fail instead of adding one
        number to another. Means of no weight and maxima of nothing are left out.

        Args:
            all_reduce: in place over all ranks, see AllReduce.
            device: where the tensors that travel live.

        Raises:
            ValueError: on every rank, when ranks added different names; or for more than MOST_MAXIMA maxima.
        """
        entries, self._entries = self._entries, {}
        names = sorted(entries)
        maxima = [name for name in names if entries[name][0] == "max"]
        summed = [name for name in names if entries[name][0] != "max"]
        if len(maxima) > MOST_MAXIMA:
            raise ValueError(f"{len(maxima)} maxima in one step; at most {MOST_MAXIMA} fit, make some of them means")

        # 48 bits, which fp64 holds exactly. Largest and smallest digest in one maximum: equal if all ranks agree.
        text = "\n".join(f"{entries[name][0]} {name}" for name in names)
        digest = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))
        head = [digest, -digest, *(float(entries[name][1]) for name in maxima)]
        head_64 = torch.full((2 + MOST_MAXIMA,), -math.inf, dtype=torch.float64)
        head_64[: len(head)] = torch.tensor(head, dtype=torch.float64)
        head_64 = head_64.to(device)
        all_reduce(head_64, "max")
        largest = head_64.tolist()
        if largest[0] != -largest[1]:
            raise ValueError(
                f"ranks added different metrics in this step; this one added {len(names)}: {', '.join(names)}. "
                "Compare this line in logs/rank_*.log; a rank with nothing to add must add with weight 0"
            )

        results = {name: value for name, value in zip(maxima, largest[2:], strict=False) if value != -math.inf}
        if summed:
            flat = [float(part) for name in summed for part in entries[name][1:]]
            sums_2N = torch.tensor(flat, dtype=torch.float64).to(device)
            all_reduce(sums_2N, "sum")
            totals = sums_2N.tolist()
            for i, name in enumerate(summed):
                total, weight = totals[2 * i], totals[2 * i + 1]
                if entries[name][0] == "sum":
                    results[name] = total
                elif weight != 0:
                    results[name] = total / weight
        return dict(sorted(results.items()))


def _double(value: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"a metric is one number, got a tensor of shape {tuple(value.shape)}")
    return value.detach().reshape(()).double()


class Timer:
    """Seconds spent in named phases: `with timer("rollout"): ...`. Phases may nest; each counts its own full time.

    After an exception `phase` still names the phase that failed, for the last line a dying rank writes.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Start empty.

        Args:
            on_phase: called with the phase in progress whenever it changes, "" for none (a console shows it).
        """
        self.phase = ""
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._open = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's seconds under `name`."""
        outer = self.phase if self._open else ""
        self._open += 1
        self._enter(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._open -= 1
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
        self._enter(outer)

    def _enter(self, name: str) -> None:
        self.phase = name
        if self._on_phase is not None:
            self._on_phase(name)

    def flush(self) -> dict[str, float]:
        """`{"time/<phase>": seconds}` of the phases that ended since the last flush, in the order they first ended."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}
