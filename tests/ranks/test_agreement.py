"""Law 1, always on: a rank that ran one more collective is found at the end of the step, and its line in the record."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmdrl.health import flight_record as flight
from spmdrl.health.status import rank_status
from spmdrl.spmd.agreement import Agreement, rank_ranges
from spmdrl.spmd.gloo import swap
from spmdrl.spmd.lockstep import LockstepError
from spmdrl.tools import flight as reader
from tests.ranks.harness import run_ranks


def steps(world, plant, folder):
    """Three agreements, with `plant` before the last; returns the messages and this rank's record in `folder`."""
    rank_status.folder, rank_status.job, rank_status.step = Path(folder), "a job", 3
    agree = Agreement(world, 20.0)
    x = torch.ones(3)
    said = [agree({"step": 0, "draws": 4}), agree({"step": 1, "draws": 4}, leave=world.rank == 1)]
    dist.all_reduce(x)
    # Point to point differs by design: the last rank has nothing to send.
    empty = torch.zeros(0 if world.rank == world.size - 1 else 2)
    swap(
        [empty] * world.size,
        [torch.zeros(0 if r == world.size - 1 else 2) for r in range(world.size)],
        dist.group.WORLD,
    )
    draws = 4
    if plant == "collective" and world.rank == 0:
        # It runs by itself, so that it waits for nobody.
        dist.all_reduce(x, group=world.host_group, async_op=True)  # mark: planted
    if plant == "value" and world.rank == 1:
        draws = 5
    try:
        said.append(agree({"step": 2, "draws": draws}))
    except LockstepError as error:
        flight.write(str(error))
        said.append(str(error))
    # The planted one would wait for the others for ever.
    if plant == "collective" and world.rank > 0:
        dist.all_reduce(x, group=world.host_group)  # mark: later
    return said


@pytest.mark.parametrize("size", [2, 3])
def test_lockstep_agreement_is_quiet_on_a_right_program_and_carries_the_request(size, tmp_path):
    assert run_ranks(steps, size, "", str(tmp_path)) == [[False, True, False]] * size


def test_lockstep_agreement_names_a_value_that_differs(tmp_path):
    for said in run_ranks(steps, 3, "value", str(tmp_path)):
        assert "draws is 4 on ranks 0, 2, but 5 on rank 1" in said[2], said


def test_lockstep_agreement_names_the_group_of_a_planted_collective(tmp_path):
    for said in run_ranks(steps, 3, "collective", str(tmp_path)):
        assert said[2].startswith("ranks went different ways in this step: group "), said
        assert "of ranks 0-2 has run " in said[2] and "on rank 0, but " in said[2] and "on ranks 1, 2." in said[2], said
        assert said[2].count(" collectives on rank") == 2, "one group alone"


def planted(world, folder):
    """Every rank's record after rank 0 ran a collective that the others did not."""
    rank_status.folder, rank_status.job, rank_status.step = Path(folder), "a job", 1
    x = torch.ones(3)
    dist.all_reduce(x)
    if world.rank == 0:
        dist.all_reduce(x)  # mark: planted alone
    else:
        dist.all_reduce(x)  # mark: what comes next
    flight.write("the test's")
    return True


def test_lockstep_flight_record_names_the_line_on_every_rank(tmp_path):
    """torch's recorder is on, as in a run (`session/environ.py`)."""
    run_ranks(planted, 2, str(tmp_path))
    record = json.loads((tmp_path / "flight" / "rank_00000.json").read_text())
    told = reader.report(tmp_path)
    if not any(group["last"] for group in record["groups"].values()):
        pytest.skip("torch's recorder is off in these processes: TORCH_FR_BUFFER_SIZE")
    text = Path(__file__).read_text().splitlines()
    for rank, mark in enumerate(("planted alone", "what comes next")):
        line = next(i for i, code in enumerate(text, 1) if code.endswith(f"# mark: {mark}"))
        assert f"  rank {rank}: all_reduce [[3]] at ranks/test_agreement.py:{line}" in told, told
    assert any(line.endswith("was started at different lines") for line in told), told


def record(rank: int, job: str = "b", time: float = 2.0, **rows: list[tuple]) -> dict:
    """Makes a record with groups of (number, op, sizes, place)."""
    groups = {
        name: {
            "ranks": [0, 1, 2],
            "begun": max(row[0] for row in given),
            "last": [dict(zip(("number", "op", "sizes", "place"), row, strict=True)) for row in given],
        }
        for name, given in rows.items()
    }
    here_is = {"host": "h", "phase": "update", "step": 3, "why": "why", "stack": ["a.py:1 f"], "others": {}}
    return {"job": job, "rank": rank, "time": time, "groups": groups} | here_is


def test_lockstep_reader_finds_the_first_difference_and_who_is_missing(tmp_path):
    (tmp_path / "flight").mkdir()
    right = [(7, "all_reduce", [[4]], "a.py:1"), (8, "allgather", [[2]], "a.py:2")]
    wrong = [(7, "all_reduce", [[3]], "b.py:9"), (8, "allgather", [[5]], "a.py:2")]
    short = [(7, "barrier", [], "c.py:1")]
    whole = [*short, (8, "barrier", [], "c.py:2")]
    records = [record(0, g=right, h=whole), record(1, g=wrong, h=short), record(2, job="old", time=1.0, g=right)]
    for one in records:
        (tmp_path / "flight" / f"rank_{one['rank']:05d}.json").write_text(json.dumps(one))
    told = reader.report(tmp_path)
    assert "group g of ranks 0, 1, 2: collective 7 differs" in told
    assert "  rank 0: all_reduce [[4]] at a.py:1" in told and "  rank 1: all_reduce [[3]] at b.py:9" in told
    assert any(
        line.endswith("rank 1 did not reach collective 8, which rank 0 started (barrier [] at c.py:2)") for line in told
    )
    assert "rank 2 left no record (killed, or its machine is gone): ?" in told, "its file is of an earlier start"
    assert reader.compare([record(0, g=right), record(1, g=right)]) == []
    (tmp_path / "flight" / "rank_00000.json").write_text("{")
    with pytest.raises(ValueError, match="rank_00000.json is not a flight record"):
        reader.read(tmp_path)
    with pytest.raises(ValueError, match="contains no records"):
        reader.read(tmp_path / "nowhere")


def test_ranks_are_shown_briefly():
    texts = [rank_ranges(ranks) for ranks in ([0, 1, 2, 3], [4], [0, 1], [0, 2, 4])]
    assert texts == ["0-3", "4", "0, 1", "0, 2, 4"]


def test_lockstep_reader_tells_of_any_malformed_record_in_one_message(tmp_path):
    """Each part is left out once, and replaced by each of another kind."""
    (tmp_path / "flight").mkdir()
    path = tmp_path / "flight" / "rank_00000.json"
    whole = record(0, g=[(7, "all_reduce", [[4]], "a.py:1")])
    whole["others"] = {"1": {"phase": "update", "step": 3, "place": "a.py:1", "time": 1.0, "count": 4}}
    path.write_text(json.dumps(whole))
    assert reader.read(tmp_path) == [whole] and reader.report(tmp_path)
    tried = 0
    for way in ways(whole):
        if way[-1] in ("sizes", "count"):
            continue  # rank_ranges as it is
        for change in ("left out", None, [3], {"3": 4}, "text", 3):
            changed = json.loads(json.dumps(whole))
            place = changed
            for key in way[:-1]:
                place = place[key]
            if change == "left out":
                del place[way[-1]]
            elif type(change) is type(place[way[-1]]) or (change == 3 and way[-1] == "time"):
                continue
            else:
                place[way[-1]] = change
            path.write_text(json.dumps(changed))
            tried += 1
            if change == "left out" and (isinstance(way[-1], int) or way[-1] in ("1", "g")):
                reader.report(tmp_path)  # one entry less
                continue
            with pytest.raises(ValueError, match="rank_00000.json is not a flight record: .*remove the file"):
                reader.report(tmp_path)
    assert tried > 80
    for text in ("", "[]", "3", "null", "\x00", "[" * 100000, '{"job": NaN}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="rank_00000.json is not a flight record"):
            reader.report(tmp_path)


def ways(value, before: tuple = ()) -> list[tuple]:
    """Returns the way to each part of a tree."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in pairs:
        found += [(*before, key), *(ways(inner, (*before, key)) if key != "sizes" else [])]
    return found
