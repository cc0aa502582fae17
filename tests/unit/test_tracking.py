"""Tracking: numbers reduced over ranks against sums by hand, rows kept over a resume, and the screen."""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.schema import Config, TrackingConfig
from spmdrl.session.journal import Journal
from spmdrl.tracking.console import Console, clean, number, phase_times, plain_line, sparkline
from spmdrl.tracking.logs import setup_logging
from spmdrl.tracking.metrics import MOST_MAXIMA, Metrics, Timer
from spmdrl.tracking.trackers import JsonlTracker, open_trackers
from spmdrl.train import JOB

METRICS = {
    "reward/mean": 0.6123,
    "kl/mean": 0.00123,
    "entropy/mean": 0.83,
    "logp_diff/mean": 1e-6,
    "tokens/s": 5210.4,
    "time/step": 0.84,
    "time/rollout": 0.31,
    "time/update": 0.42,
    "time/logp": 0.01,
    "time/push": 0.0,
    "time/other": 12.3,
}


def alone(tensor: torch.Tensor, op: str) -> None:
    """Stands for all_reduce in a world of one."""


class Ranks:
    """Stands for all_reduce between threads: the tensors of all ranks meet, in place, and calls are counted."""

    def __init__(self, size: int):
        self.size, self.calls = size, []
        self.barrier = threading.Barrier(size, timeout=20)
        self.inbox: dict[int, torch.Tensor] = {}

    def run(self, function):
        """Runs function(rank, all_reduce) by rank; an exception takes the place of its result."""
        results = [None] * self.size

        def work(rank):
            def all_reduce(tensor, op):
                self.inbox[rank] = tensor.clone()
                self.barrier.wait()
                stacked = torch.stack([self.inbox[r] for r in range(self.size)])
                tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
                if rank == 0:
                    self.calls.append((op, tensor.dtype, tensor.numel()))
                self.barrier.wait()

            try:
                results[rank] = function(rank, all_reduce)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


# ── metrics ────────────────────────────────────────────────────────────────


def test_layout_metrics_are_weighted_over_all_ranks_in_two_collectives():
    values = [(0.1 * i, float(1 + i % 4)) for i in range(12)]
    ranks = Ranks(3)

    def work(rank, all_reduce):
        metrics = Metrics()
        # Uneven shares, and another order of names on each rank.
        mine = [values[0:7], values[7:8], values[8:12]][rank]
        names = ["reward/mean", "kl/mean"]
        for name in names if rank else reversed(names):
            for value, weight in mine:
                metrics.add(name, -value if name == "kl/mean" else value, weight)
        metrics.add_sum("tokens", torch.tensor(10 * (rank + 1)))
        metrics.add_max("longest", [5.0, -1.0, 7.0][rank])
        metrics.add_max("longest", 2)
        return metrics.reduce(all_reduce)

    results = ranks.run(work)
    mean = math.fsum(v * w for v, w in values) / math.fsum(w for _, w in values)
    assert results[0] == results[1] == results[2]
    assert list(results[0]) == ["kl/mean", "longest", "reward/mean", "tokens"]
    assert results[0]["reward/mean"] == pytest.approx(mean, rel=1e-14)
    assert results[0]["kl/mean"] == pytest.approx(-mean, rel=1e-14)
    assert (results[0]["tokens"], results[0]["longest"]) == (60.0, 7.0)
    assert [(op, dtype) for op, dtype, _ in ranks.calls] == [("max", torch.float64), ("sum", torch.float64)]
    assert ranks.calls[1][2] == 2 * 3


def test_lockstep_ranks_with_other_names_fail_on_every_rank_before_numbers_meet():
    for extra in ("c", "kind"):
        ranks = Ranks(2)

        def work(rank, all_reduce, extra=extra):
            metrics = Metrics()
            metrics.add("a", 1.0)
            if extra == "kind":
                (metrics.add if rank else metrics.add_sum)("b", 1.0)
            elif rank:
                metrics.add(extra, 1.0)
            return metrics.reduce(all_reduce)

        results = ranks.run(work)
        for rank, error in enumerate(results):
            assert isinstance(error, ValueError), error
            assert "ranks added different metrics" in str(error)
            assert ("a, c" if rank else "added 1: a.") in str(error) or extra == "kind"
        assert [op for op, _, _ in ranks.calls] == ["max"]


def test_weight_zero_takes_part_without_a_value():
    ranks = Ranks(2)

    def work(rank, all_reduce):
        metrics = Metrics()
        metrics.add("reward/mean", *[(math.nan, 0.0), (3.0, 2.0)][rank])
        metrics.add("kl/mean", torch.tensor(math.nan if rank == 0 else 5.0), torch.tensor(float(rank)))
        metrics.add("nothing", 1.0, 0.0)
        metrics.add_max("none", -math.inf)
        return metrics.reduce(all_reduce)

    assert ranks.run(work) == [{"reward/mean": 3.0, "kl/mean": 5.0}] * 2


def test_metrics_start_anew_after_reduce_and_keep_fp64():
    metrics = Metrics()
    parameter = torch.tensor(2.0, requires_grad=True)
    metrics.add("loss", parameter * 3)
    metrics.add("loss", torch.tensor([4.0], dtype=torch.bfloat16))
    metrics.add("exact", 1 + 2**-40)
    assert metrics.reduce(alone) == {"exact": 1 + 2**-40, "loss": 5.0}
    assert metrics.reduce(alone) == {}
    metrics.add_max("m", torch.tensor(1.0))
    metrics.add_max("m", 3.0)
    metrics.add_max("nan", 1.0)
    metrics.add_max("nan", math.nan)
    metrics.add_max("nan_tensor", torch.tensor(math.nan))
    assert metrics.reduce(alone) == {"m": 3.0, "nan": math.inf, "nan_tensor": math.inf}


def test_metrics_refuse_what_would_be_wrong():
    metrics = Metrics()
    metrics.add("a", 1.0)
    with pytest.raises(ValueError, match="a is a mean"):
        metrics.add_sum("a", 1.0)
    with pytest.raises(ValueError, match="shape \\(2,\\)"):
        metrics.add("b", torch.ones(2))
    for i in range(MOST_MAXIMA):
        metrics.add_max(f"m{i:02}", i)
    assert metrics.reduce(alone)["m61"] == 61.0
    for i in range(MOST_MAXIMA + 1):
        metrics.add_max(f"m{i}", i)
    with pytest.raises(ValueError, match=f"at most {MOST_MAXIMA}"):
        metrics.reduce(alone)


def test_metrics_merge_as_if_added_to_one():
    one, two, both = Metrics(), Metrics(), Metrics()
    for metrics, value, weight in ((one, 1.0, 2.0), (two, 4.0, 1.0)):
        for target in (metrics, both):
            target.add("mean", value, weight)
            target.add_sum("sum", value)
            target.add_max("max", value)
    two.add("only", 1.0)
    one.merge(two)
    assert one.reduce(alone) == both.reduce(alone) | {"only": 1.0} == {"max": 4.0, "mean": 2.0, "only": 1.0, "sum": 5.0}


def test_timer_adds_up_and_names_the_phase():
    seen: list[str] = []
    timer = Timer(seen.append)
    with timer("step"):
        for _ in range(2):
            with timer("rollout"):
                assert timer.phase == "rollout"
                time.sleep(0.01)
        assert timer.phase == "step"
    assert timer.phase == ""
    assert seen == ["step", "rollout", "step", "rollout", "step", ""]
    times = timer.flush()
    assert list(times) == ["time/rollout", "time/step"]
    assert 0.02 <= times["time/rollout"] <= times["time/step"] < 2
    assert timer.flush() == {}


def test_timer_still_names_the_phase_that_failed():
    timer = Timer()
    with pytest.raises(RuntimeError), timer("step"), timer("update"):
        raise RuntimeError
    assert timer.phase == "update"
    assert list(timer.flush()) == ["time/update", "time/step"]
    with timer("push"):
        pass
    assert timer.phase == ""


# ── trackers ───────────────────────────────────────────────────────────────


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_one_complete_line_a_step_while_open(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"reward/mean": 0.5, "bad": math.nan, "worse": math.inf, "step": 99})
    assert path.read_text().endswith("}\n")
    assert lines(path) == [{"step": 1, "reward/mean": 0.5, "bad": None, "worse": None}]
    assert path.read_text().startswith('{"step": 1, ')
    tracker.close()
    tracker.close()


def test_jsonl_joins_what_is_logged_for_the_last_step_again(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": 1})
    tracker.log(2, {"a": 2, "b": "ü"})
    tracker.log(2, {"a": 3, "eval/accuracy": 0.5})
    tracker.log(2, {"c": 1})
    tracker.log(3, {"a": 4})
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 3, "b": "ü", "eval/accuracy": 0.5, "c": 1},
        {"step": 3, "a": 4},
    ]


def test_resume_drops_the_steps_that_come_again_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, 8):
        tracker.log(step, {"run": 1})
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 8, "run"')
    tracker = JsonlTracker(path, resume_step=5)
    for step in range(5, 7):
        tracker.log(step, {"run": 2})
    tracker.close()
    assert [(line["step"], line["run"]) for line in lines(path)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


def test_a_fresh_run_keeps_the_older_file_aside(tmp_path):
    for run in (1, 2, 3, 4):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl")
        tracker.log(1, {"run": run})
        tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "run": 4}]
    for run, end in ((1, "old"), (2, "old-1"), (3, "old-2")):
        assert lines(tmp_path / f"metrics.jsonl.{end}") == [{"step": 1, "run": run}]


def test_tensorboard_events_read_back(tmp_path):
    # An older run in the same folder, a fresh one, and its continuation.
    for first, last, scale in ((1, 9, 100.0), (1, 4, 1.0), (3, 5, 10.0)):
        (tracker,) = open_trackers(["tensorboard"], tmp_path, "p", "n", {}, resume_step=first)
        for step in range(first, last + 1):
            tracker.log(step, {"step": step, "reward/mean": scale * step})
        tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]


@pytest.mark.slow
def test_wandb_works_offline_without_an_account(tmp_path):
    """wandb runs in a process with an empty home: it starts helpers and reads the account of the machine."""
    code = (
        "import sys\nfrom spmdrl.tracking.trackers import open_trackers\n"
        "for resume in (1, 3):\n"
        "    (t,) = open_trackers(['wandb'], sys.argv[1], 'project', 'name', {'run': {'steps': 3}}, resume)\n"
        "    t.log(resume + 1, {'reward/mean': 0.5, 'step': 1})\n    t.close()\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    environment |= {"HOME": str(tmp_path / "home"), "WANDB_CONFIG_DIR": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    name = (tmp_path / "wandb" / "spmdrl_id").read_text()
    written = list((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert written and all(file.stat().st_size > 0 for file in written)


def test_trackers_open_in_order_and_say_what_is_missing(tmp_path, monkeypatch):
    opened = open_trackers(["tensorboard", "jsonl", "jsonl"], tmp_path, "p", "n", {})
    assert [type(tracker).__name__ for tracker in opened] == ["TensorBoardTracker", "JsonlTracker"]
    for tracker in opened:
        tracker.close()
    for package, module in (("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=f"pip install {package}"):
            open_trackers([package], tmp_path, "p", "n", {})


# ── console ────────────────────────────────────────────────────────────────


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """Returns the written text, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


SAMPLE = {"prompt": "what is\n1+1?", "completion": "[bold red]2[/]\x1b[2J\r\nend\t!", "reward": 1.0}


def line_of(step: int, numbers: dict) -> str:
    return plain_line(step, 60, numbers, JOB.columns, JOB.phases)


def test_plain_lines_are_aligned_and_complete():
    line = line_of(12, METRICS)
    assert re.sub(" +", " ", line) == (
        "step 12/60 reward 0.612 kl 0.00123 entropy 0.83 |dlogp| 1e-06 tok/s 5210 time 0.8s "
        "(rollout .3 logp .0 update .4 push .0 other 12.3)"
    )
    other = line_of(3, METRICS | {"reward/mean": 1.0, "tokens/s": 12.0})
    assert other.startswith("step  3/60 ")
    assert [m.start() for m in re.finditer("kl|entropy|tok/s|time", other)] == [
        m.start() for m in re.finditer("kl|entropy|tok/s|time", line)
    ]
    assert "reward - " in line_of(1, {})
    assert "eval 0.5     score 0.52" in line_of(1, {"eval/accuracy": 0.5, "eval/score": 0.52})


def test_plain_console_shows_samples_now_and_then():
    stream = io.StringIO()
    console = Console("auto", total_steps=25, stream=stream, columns=JOB.columns, phases=JOB.phases)
    assert not console.is_live
    console.phase("rollout")
    for step in range(1, 26):
        console.step(step, METRICS, [SAMPLE])
    console.note("a [note]")
    console.finish(["the end"])
    shown = stream.getvalue().splitlines()
    assert [i for i, line in enumerate(shown) if "->" in line] == [1, 11, 22]
    assert [int(line.split("/")[0].split()[1]) for line in shown if line.startswith("step")] == list(range(1, 26))
    assert shown[1] == "       1  what is⏎1+1? -> [bold red]2[/]·[2J⏎end !"
    assert shown[-2:] == ["a [note]", "the end"]


def test_live_panel_shows_everything_and_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    stream, hook = Terminal(), sys.breakpointhook
    console = Console("auto", 60, 10, stream, JOB.columns, JOB.phases)
    assert console.is_live
    console.phase("update")
    for step in range(11, 14):
        console.step(step, METRICS | {"reward/mean": step / 16}, [SAMPLE])
    console.note("half [way]")
    console.finish(["the end"])
    assert not console.is_live
    text = stream.text()
    for part in ("13/60", "0.812", "0.00123", "0.83", "1e-06", "5210", "rollout", "0.42s", "update", "▁▅█"):
        assert part in text, part
    for part in ("what is⏎1+1?", "[bold red]2[/]·[2J⏎end !", "half [way]"):
        assert part in text, part
    assert "\x1b[2J" not in stream.getvalue()
    assert text.rstrip().endswith("the end")
    assert stream.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again
    assert sys.breakpointhook is hook
    console.step(14, METRICS)
    assert "step 14/60" in stream.text()


def test_a_breakpoint_takes_the_panel_away_first(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *args, **kwargs: seen.append(console.is_live))
    console = Console("live", total_steps=2, stream=Terminal())
    breakpoint()  # noqa: T100
    assert seen == [False]
    console.close()


def test_live_is_refused_nothing_and_kinds_are_checked():
    console = Console("live", total_steps=2, stream=io.StringIO())
    assert console.is_live
    console.step(1, {})
    console.close()
    with pytest.raises(ValueError, match="--tracking.console fancy"):
        Console("fancy")


def test_text_helpers():
    assert clean("abc", 5) == "abc"
    assert clean("a" * 50 + "b" * 50, 16) == "a" * 10 + "…" + "b" * 5
    assert clean("a\r\nb\tc\x07\u202ed", 20) == "a⏎b c··d"
    assert [number(None), number(0.5), number(1e-7), number(1234.6, "tokens/s"), number(1.0)] == [
        "-",
        "0.5",
        "1e-07",
        "1235",
        "1",
    ]
    assert sparkline([]) == "" and sparkline([math.nan]) == ""
    assert sparkline([2, 2, 2]) == "▄▄▄"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000), 40)) == 40 and sparkline(range(1000), 40)[-1] == "█"
    assert list(phase_times(METRICS, JOB.phases)) == ["rollout", "logp", "update", "push", "other"]


# ── logs ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", [0, 3])
def test_each_rank_logs_to_its_own_file_and_only_rank_0_to_the_console(tmp_path, capfd, monkeypatch, rank):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", os.environ.get("TRANSFORMERS_VERBOSITY", "error"))
    root = logging.getLogger()
    others = [handler for handler in root.handlers if not getattr(handler, "_spmdrl", False)]
    try:
        for folder in ("first", "second"):
            logger = setup_logging(tmp_path / folder, rank)
        logging.getLogger("spmdrl.policy").info("an info")
        logger.warning("a warning")
        logging.getLogger("someone.else").warning("theirs")
        warnings.warn("deprecated thing", UserWarning, stacklevel=1)
        text = (tmp_path / "second" / "logs" / f"rank_{rank}.log").read_text()
        for part in ("INFO spmdrl.policy: an info", "WARNING spmdrl: a warning", "WARNING someone.else: theirs"):
            assert text.count(part) == 1
        assert (tmp_path / "first" / "logs" / f"rank_{rank}.log").read_text() == ""
        out, err = capfd.readouterr()
        assert out == ""
        assert err == ("warning: a warning\n" if rank == 0 else "")
    finally:
        logging.captureWarnings(False)
        for logger in (root, logging.getLogger("spmdrl"), logging.getLogger("py.warnings")):
            for handler in [handler for handler in logger.handlers if getattr(handler, "_spmdrl", False)]:
                logger.removeHandler(handler)
                handler.close()
        logging.getLogger("spmdrl").propagate = True
    assert [handler for handler in root.handlers if handler in others] == others


def test_python_warnings_reach_the_file(tmp_path):
    """It runs in a process of its own, as pytest catches warnings itself."""
    code = (
        "import sys, warnings\nfrom spmdrl.tracking.logs import setup_logging\nsetup_logging(sys.argv[1], 1)\n"
        "warnings.warn('deprecated thing')\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "")
    assert (tmp_path / "logs" / "rank_1.log").read_text().count("deprecated thing") == 1


# ── a folder with numbers and no checkpoint ─────────────────────────────────


@pytest.mark.parametrize(("start", "rows"), [(0, 2), (0, 0), (2, 3)])
def test_what_a_run_without_a_checkpoint_left_is_set_aside_and_told(start, rows, tmp_path):
    line, said = '{"step": %d}\n', []
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("".join(line % (i + 1) for i in range(rows)))
    cfg = Config(tracking=TrackingConfig(trackers=("jsonl",)))
    session = SimpleNamespace(
        console=None, world=SimpleNamespace(is_first=True), cfg=cfg, folder=tmp_path, note=said.append
    )
    Journal(session, start).close()  # type: ignore[arg-type]
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(line % (i + 1) for i in range(start))
    assert said == (
        [
            f"{tmp_path} contains metrics of an earlier run without a checkpoint to continue from: this run "
            "begins at step 1; the old files are now metrics.jsonl.old, samples.jsonl.old"
        ]
        if rows and not start
        else []
    )
    if said:
        assert (tmp_path / "samples.jsonl.old").read_text() == '{"step": 1}\n{"step": 2}\n'
