"""Metrics of one step, accumulated on every rank and reduced with two collectives, and a timer for the step's phases.

The module does not use process groups itself: `Metrics.reduce` takes the all-reduce function as an argument.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MOST_MAXIMA = 62
"""Maximum number of `add_max` names per step: a fixed-size tensor holds their values and a digest of all names."""

AllReduce = Callable[[torch.Tensor, str], object]
"""Function `all_reduce(tensor, op)` that reduces in place over ranks; `op` is "sum" or "max"."""


class Metrics:
    """Weighted means, sums and maxima of named numbers.

    Every rank must add the same names between two calls to `reduce`. A rank without a value adds any value with weight
    0 to a mean, 0 to a sum, or -inf to a maximum. Values are floats or 0-d tensors. Tensors are read only in `reduce`
    and `dump`, so adding a tensor does not wait for the device.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[str, tuple[str, float | torch.Tensor, float | torch.Tensor]] = {}

    def add(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add a value to the weighted mean `name`: sum(value * weight) / sum(weight) over all calls and ranks."""
        value, weight = _double(value), _double(weight)
        # A value with weight 0 may be nan (the mean of an empty tensor), and 0 * nan is nan.
        if isinstance(weight, torch.Tensor):
            product = torch.where(weight == 0, torch.zeros_like(weight), value * weight)
        else:
            product = value * weight if weight else 0.0
        _, total, total_weight = self._entry(name, "mean", 0.0)
        self._entries[name] = ("mean", total + product, total_weight + weight)

    def add_sum(self, name: str, value: float | torch.Tensor) -> None:
        """Add a value to the sum `name` over all calls and ranks."""
        _, total, _ = self._entry(name, "sum", 0.0)
        self._entries[name] = ("sum", total + _double(value), 0.0)

    def add_max(self, name: str, value: float | torch.Tensor) -> None:
        """Add a value to the maximum `name` over all calls and ranks.

        A nan counts as inf, because the all-reduce with "max" may ignore nan.
        """
        _, most, _ = self._entry(name, "max", -math.inf)
        value = _double(value)
        if isinstance(value, torch.Tensor) or isinstance(most, torch.Tensor):
            # A float is turned into a tensor on the other value's device by a fill, because a copy would wait for the
            # device.
            value, most = (
                x if isinstance(x, torch.Tensor) else y.new_full((), x)  # type: ignore[union-attr]
                for x, y in ((value, most), (most, value))
            )
            largest = torch.maximum(torch.nan_to_num(value, nan=math.inf, posinf=math.inf, neginf=-math.inf), most)
        else:
            largest = max(math.inf if math.isnan(value) else value, most)
        self._entries[name] = ("max", largest, 0.0)

    def merge(self, other: "Metrics") -> None:
        """Add all entries of another accumulator to this one."""
        for name, (kind, total, weight) in other._entries.items():
            if kind == "max":
                self.add_max(name, total)
            else:
                _, mine, my_weight = self._entry(name, kind, 0.0)
                self._entries[name] = (kind, mine + total, my_weight + weight)

    def dump(self) -> list[tuple[str, str, float, float]]:
        """Return all entries as rows (name, kind, total, weight), which `load` reads. This waits for the device."""
        read = iter(_read([part for _, *parts in self._entries.values() for part in parts]))
        return [(name, kind, next(read), next(read)) for name, (kind, *_) in self._entries.items()]

    def load(self, rows: list[tuple[str, str, float, float]]) -> None:
        """Add the entries that `dump` of another accumulator returned."""
        other = Metrics()
        other._entries = {name: (kind, total, weight) for name, kind, total, weight in rows}
        self.merge(other)

    def scale_sum(self, name: str, factor: float) -> None:
        """Multiply the current value of a sum by a factor; no-op if there is no such sum."""
        if name in self._entries:
            _, total, _ = self._entry(name, "sum", 0.0)
            self._entries[name] = ("sum", total * factor, 0.0)

    def prefixed(self, prefix: str) -> "Metrics":
        """Return an accumulator with the same entries and `prefix` prepended to their names."""
        out = Metrics()
        out._entries = {prefix + name: entry for name, entry in self._entries.items()}
        return out

    def _entry(self, name: str, kind: str, start: float) -> tuple[str, float | torch.Tensor, float | torch.Tensor]:
        entry = self._entries.get(name, (kind, start, 0.0))
        if entry[0] != kind:
            raise ValueError(f"metric {name} is a {entry[0]} on this rank; it cannot be a {kind} as well")
        return entry

    def reduce(self, all_reduce: AllReduce, device: torch.device | str = "cpu") -> dict[str, float]:
        """Return the results over all ranks, sorted by name, and remove all entries. Collective.

        The first all-reduce (max) has a fixed size and holds the maxima and a digest of the names. The second
        all-reduce (sum) has a size and an order that depend on the names, so it runs only if the digests agree.
        Therefore, ranks with different names fail instead of adding unrelated numbers. Means with zero total weight and
        maxima without values are omitted.

        device: device of the all-reduced tensors. Raises ValueError on every rank if ranks added different names, or
        more than MOST_MAXIMA maxima.
        """
        entries, self._entries = self._entries, {}
        names = sorted(entries)
        maxima = [name for name in names if entries[name][0] == "max"]
        summed = [name for name in names if entries[name][0] != "max"]
        if len(maxima) > MOST_MAXIMA:
            raise ValueError(f"{len(maxima)} maxima in one step; at most {MOST_MAXIMA} fit, make some of them means")

        # A digest of 48 bits is exact in fp64. Its maximum and minimum over ranks are equal if all ranks agree.
        text = "\n".join(f"{entries[name][0]} {name}" for name in names)
        digest = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))
        head = [digest, -digest, *_read([entries[name][1] for name in maxima])]
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
            flat = _read([part for name in summed for part in entries[name][1:]])
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


def _read(numbers: list[float | torch.Tensor]) -> list[float]:
    """Return numbers as floats. Tensors on a device are read together, with a single wait."""
    away = [x for x in numbers if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
    read = iter(torch.stack(away).tolist() if away else ())
    return [next(read) if isinstance(x, torch.Tensor) and x.device.type != "cpu" else float(x) for x in numbers]


def _double(value: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"a metric is one number, got a tensor of shape {tuple(value.shape)}")
    return value.detach().reshape(()).double()


class Timer:
    """Seconds spent in named phases: `with timer("rollout"): ...`.

    Phases may nest; the time of an outer phase includes the time of its inner phases. After an exception, `phase` still
    names the failed phase, and the last line of a failing rank shows it.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Start without times. on_phase: called with the new phase whenever the phase changes; "" means no phase."""
        self.phase = ""
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._open = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds that the `with` block takes to the phase `name`."""
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
        """Return `{"time/<phase>": seconds}` since the last flush, in the order in which phases first ended."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}
