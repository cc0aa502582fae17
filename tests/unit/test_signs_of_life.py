"""Knowledge of a rank about others, and its last words: heartbeats, requests to leave, a start in a used store."""

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from spmdrl.checkpoint import files
from spmdrl.checkpoint.background import Saver
from spmdrl.health import exit_message as words
from spmdrl.health import heartbeat, overview
from spmdrl.health.exit_message import lost_steps, resume
from spmdrl.health.heartbeat import Heartbeat
from spmdrl.health.preempt import ECHO, Preemption, Request
from spmdrl.health.status import IdleClock, rank_status, tick
from spmdrl.spmd.mesh import own_names


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    for name in ("step", "done", "count", "side_count", "saved"):
        monkeypatch.setattr(rank_status, name, getattr(rank_status, name))


def hearts(store, size=2) -> list[Heartbeat]:
    return [Heartbeat(store, rank, size, 30.0, lambda idle: None) for rank in range(size)]


# ── heartbeats ───────────────────────────────────────────────────────────────


def test_heart_hears_again_after_the_store_was_slow(store, monkeypatch):
    """One answer that does not come is no reason to be deaf for the rest of the run."""
    (heart,) = hearts(store, 1)
    told = heart._publish

    def slow(*_):
        raise RuntimeError("wait timeout after 5000ms")

    monkeypatch.setattr(heart, "_publish", slow)
    for times in range(1, 7):
        heart._beat("a.py:1", 0.0)
        pause = heart.again_at - time.monotonic()
        assert heart.store_silent and pause == pytest.approx(min(5.0 * 2 ** (times - 1), 60.0), abs=1.0)
    monkeypatch.setattr(heart, "_publish", told)
    heart._beat("a.py:2", 0.0)
    assert not heart.store_silent and heart.beats()[0]["place"] == "a.py:2"


def test_heart_asks_again_by_itself(store, monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "RETRY", 0.02)
    (heart,) = hearts(store, 1)
    told, fails = heart._publish, [True, True]

    def sometimes(*args):
        if fails:
            fails.pop()
            raise RuntimeError("wait timeout after 5000ms")
        told(*args)

    monkeypatch.setattr(heart, "_publish", sometimes)
    heart.start()
    until = time.monotonic() + 20
    while not heart.beats() and time.monotonic() < until:
        time.sleep(0.02)
    heart.ended.set()
    heart.join(10)
    assert not fails and heart.beats()[0]["count"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_heart_times_others_by_no_clock_of_theirs(store, monkeypatch, skew):
    """Clocks of two machines differ by an hour: a rank that beats is not missing, and one that does not is."""
    monkeypatch.setattr(overview, "STALE", 0.5)
    mine, other = hearts(store)
    now = time.time
    mine._beat("a.py:1", time.monotonic())
    monkeypatch.setattr(heartbeat.time, "time", lambda: now() + skew)
    other._beat("b.py:2", time.monotonic() - 7)
    monkeypatch.setattr(heartbeat.time, "time", now)
    mine._beat("a.py:1", time.monotonic())
    assert mine.missing().endswith("at b.py:2 for 7 s"), mine.missing()
    for _ in range(4):
        time.sleep(0.2)
        mine._beat("a.py:1", time.monotonic())
    assert mine.missing().startswith("rank 1 has sent no heartbeat for 1 s, since phase start at b.py:2"), (
        mine.missing()
    )


# ── requests to leave ────────────────────────────────────────────────────────


def test_preemption_counts_the_grace_from_when_it_heard():
    """The signal came at a rank whose clock is an hour behind."""
    late = threading.Event()
    preemption = Preemption()
    preemption.on_grace_over = late.set
    assert preemption.accept(Request("SIGUSR1", 1, time.time() - 3600, 1.0))
    assert not preemption.sampling_over and not late.is_set()
    assert not preemption.accept(Request("SIGTERM", 0, time.time(), 99.0)), "the first one counts"
    time.sleep(0.6)
    assert preemption.sampling_over and not late.is_set()
    assert late.wait(5)


@pytest.mark.parametrize(
    ("signals", "seconds", "agent", "again"),
    [
        (("SIGTERM", "SIGTERM"), ECHO - 0.5, True, [False, False]),
        (("SIGTERM", "SIGTERM", "SIGTERM"), 0.1, True, [False, False, True]),
        (("SIGTERM", "SIGTERM"), ECHO + 0.5, True, [False, True]),
        (("SIGTERM", "SIGTERM"), 0.1, False, [False, True]),
        (("SIGINT", "SIGINT"), 0.1, True, [False, False]),
        (("SIGINT", "SIGINT", "SIGINT"), 0.1, True, [False, False, True]),
        (("SIGINT", "SIGINT"), 0.1, False, [False, True]),
        (("SIGUSR1", "SIGUSR1"), 0.1, True, [False, True]),
        (("SIGUSR1", "SIGTERM"), 0.1, True, [False, True]),
        (("SIGUSR1", "SIGUSR1"), ECHO - 0.5, "USR1 too", [False, False]),
        (("SIGUSR1", "SIGUSR1", "SIGUSR1"), 0.1, "USR1 too", [False, False, True]),
        (("SIGUSR1", "SIGUSR1"), ECHO + 0.5, "USR1 too", [False, True]),
        (("SIGUSR1", "SIGTERM"), 0.1, "USR1 too", [False, True]),
    ],
)
def test_preemption_a_signal_to_the_whole_job_is_one(monkeypatch, signals, seconds, agent, again):
    now = [100.0]
    monkeypatch.setattr("spmdrl.health.preempt.time.monotonic", lambda: now[0])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    if agent == "USR1 too":
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    preemption, said = Preemption(), []
    for name in signals:
        said.append(preemption.is_repeat(signal.Signals[name]))
        now[0] += seconds
    assert said == again


# ── last words ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("step", "done", "saved", "lost"),
    [
        (4, 3, 3, "step 4 is lost"),
        (4, 3, 0, "steps 1 to 4 are lost"),
        (4, 4, 4, "no step is lost"),
        (4, 4, 2, "steps 3 to 4 are lost"),
    ],
)
def test_last_words_count_what_is_lost(monkeypatch, step, done, saved, lost):
    rank_status.step, rank_status.done, rank_status.saved = step, done, lambda: saved
    assert lost_steps() == lost


@pytest.mark.slow
def test_last_words_wait_for_no_disk():
    rank_status.step, rank_status.saved = 3, lambda: time.sleep(60) or 2
    began = time.monotonic()
    assert resume() == "The same command resumes from the newest checkpoint"
    assert lost_steps() == "steps after the newest checkpoint are lost" and time.monotonic() - began < 10
    rank_status.saved = lambda: 2
    assert resume() == "The same command resumes from step 2"


# ── signs of life ────────────────────────────────────────────────────────────


def test_signs_of_other_threads_are_not_the_main_ones():
    clock = IdleClock(10.0)
    thread = threading.Thread(target=tick)
    beside = rank_status.side_count
    clock.look()
    time.sleep(0.05)
    thread.start()
    thread.join()
    assert rank_status.side_count == beside + 1 and clock.look() > 0.04
    tick()
    assert clock.look() == 0.0


@pytest.mark.parametrize("field", ["count", "side_count"])
def test_signs_of_a_library_are_the_files_it_writes(tmp_path, monkeypatch, field):
    """The writer is the main thread, or the thread of `--checkpoint.background`."""
    monkeypatch.setattr(files, "MEASURE_EVERY", 0.05)
    added = []

    def write():
        with files.growth_is_progress(tmp_path / "step"):
            time.sleep(0.3)
            before = getattr(rank_status, field)
            (tmp_path / "step").mkdir()
            (tmp_path / "step" / "x").write_bytes(b"x")
            time.sleep(0.3)
            added.append(getattr(rank_status, field) - before)
            time.sleep(0.3)
            added.append(getattr(rank_status, field) - before)

    if field == "count":
        write()
    else:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert added == [1, 1], "without growth it counts as hanging"


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_signs_of_the_background_are_passed_on_while_it_is_waited_for(works):
    saver, ended = Saver.__new__(Saver), threading.Event()

    def write() -> None:
        while not ended.wait(0.1):
            if works:
                tick()

    saver._thread, saver._error, saver._seconds = threading.Thread(target=write, daemon=True), None, 0.0
    saver._thread.start()
    threading.Timer(2.5, ended.set).start()
    count = rank_status.count
    saver.finish()
    assert (rank_status.count >= count + 2) if works else (rank_status.count == count)


# ── a start in a store with leftovers ────────────────────────────────────────


def join(store, ranks, size=3, seconds=20.0) -> dict[int, object]:
    """Starts the ranks of one start; each gets the number of ranks in the shared store, or the error."""
    found: dict[int, object] = {}

    def rank(number: int) -> None:
        try:
            own = own_names(store.clone(), number, size, timedelta(seconds=seconds))
            own.add("ranks", 1)
            own.set(f"rank/{number}", "")
            own.wait([f"rank/{r}" for r in range(size)], timedelta(seconds=5))
            found[number] = own.add("ranks", 0)
        except RuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_restart_finds_nothing_of_the_start_before(store):
    """The same holds after a start that ended before all ranks had come."""
    for order in ([0, 1, 2], [2, 1, 0]):
        assert join(store, order) == {0: 3, 1: 3, 2: 3}
    early = join(store, [1, 0], seconds=0.5)
    assert "2 of 3 ranks came" in str(early[0])
    late = join(store, [2], seconds=0.5)
    assert "rank 0 did not answer" in str(late[2])
    for order in ([1, 2, 0], [0, 2, 1]):
        assert join(store, order) == {0: 3, 1: 3, 2: 3}


@pytest.mark.slow
def test_words_of_errors_ask_no_heart_for_long(monkeypatch):
    class Hanging:
        def missing(self):
            time.sleep(60)

        lost = missing

    monkeypatch.setattr(words, "heartbeats", [Hanging()])
    began = time.monotonic()
    assert "its position is unknown" in words.advice(RuntimeError("Timed out waiting 8000ms"))
    assert "another rank ended; see its log" in words.advice(RuntimeError("Connection reset by peer"))
    assert time.monotonic() - began < 10


def test_a_failed_allocation_of_the_device_table_says_where_the_run_resumes(monkeypatch):
    from spmdrl.policy.grad_guard import NonFiniteError
    from spmdrl.session.device_table import NoRoomError

    monkeypatch.setattr(rank_status, "saved", lambda: 120)
    line = words.failure_line(NoRoomError("no room for training. Flags that would help most: --policy.offload host"))
    assert line.endswith("--policy.offload host; The same command resumes from step 120")
    assert words.failure_line(NonFiniteError("lower --optimizer.lr")).endswith("lower --optimizer.lr")
