"""Judges the records of all ranks (`stub_nccl.py`) by NCCL's rules; every finding names a rank and a line.

1. Every rank of a communicator enters every split of it, in one order, and those that get a communicator of it are its
   ranks. Making a group of the host touches no communicator.
2. Ranks of a communicator begin the same collectives on it, in one order, with arguments that fit.
3. Sends and receives between two ranks are as many, in one order, of equal sizes.
4. There is one order of everything that no rank contradicts, the making of a communicator of its `own` at its ranks'
   first use of it included. Two ranks that begin A and B in different orders may each wait for the other: NCCL asks
   for one order over all communicators
   (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html).
5. On each rank one thread begins all of them.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from tests.ranks.stub_nccl import RECEIVES, SENDS, Event, Record

MOST = 5
"""Findings of one kind that are reported."""


@dataclass(frozen=True)
class Counts:
    """Communicators of NCCL on one rank."""

    shared: int
    """Communicators over more than one rank."""
    alone: int
    """Communicators of this rank only."""


def counts(records: list[Record]) -> list[Counts]:
    """Communicators of each rank; those that Megatron makes apart and nobody uses take no memory."""
    used = [{e.comm for e in r.events} for r in records]
    kinds = ("default", "split")
    sizes = [
        [len(c.ranks) for c in r.comms.values() if c.kind in kinds or (c.kind == "own" and c.name in some)]
        for r, some in zip(records, used, strict=True)
    ]
    return [Counts(sum(n > 1 for n in row), sum(n == 1 for n in row)) for row in sizes]


def told(event: Event | None, rank: int) -> str:
    """Describes one rank's event in a line."""
    if event is None:
        return f"  rank {rank}: nothing more"
    if event.op == "split":
        how = f"as one of {list(event.members)}" if event.members is not None else "without a part"
        return f"  rank {rank}: {event.place} split for group {event.child}, {how}"
    other = f" with rank {event.peer}" if event.peer >= 0 else ""
    sizes = f" {event.sends} -> {event.receives}" if event.sends else ""
    return f"  rank {rank}: {event.place} {event.op}{other} {event.same}{sizes}"


def _split(turn: list[tuple[int, Event]]) -> str:
    """Reason why ranks cannot all enter this split. Ranks without a record are left out."""
    present = {rank for rank, _ in turn}
    colours = defaultdict(set)
    for rank, event in turn:
        if event.members is not None:
            colours[event.members].add(rank)
    for members, found in colours.items():
        if set(members) & present != found:
            return f"ranks {sorted(found)} of {list(members)} enter the split that makes their communicator"
    if any("(host," in event.child for _, event in turn):
        return "a group of the host is made by a split that its own ranks do not enter: see apart_from_default()"
    return ""


def _collective(turn: list[tuple[int, Event]]) -> str:
    """Reason why the ranks' arguments of one collective do not fit."""
    if len({(e.op, e.same) for _, e in turn}) > 1:
        return "other collectives or arguments"
    for i, (_, sender) in enumerate(turn):
        for j, (_, receiver) in enumerate(turn):
            if sender.sends and sender.sends[j] != receiver.receives[i]:
                return f"the rank at place {i} sends {sender.sends[j]} elements to that at {j}, which expects another"
    return ""


def sequences(records: list[Record]) -> list[str]:
    """Checks rules 1 and 2."""
    found, present = [], {r.rank for r in records}
    for comm in sorted({name for r in records for name in r.comms}):
        members = {r.rank: r for r in records if comm in r.comms}
        kinds, ranks = ({getattr(r.comms[comm], what) for r in members.values()} for what in ("kind", "ranks"))
        if kinds == {"outside"}:
            continue
        if len(kinds) > 1 or len(ranks) > 1 or set(members) != set(next(iter(ranks))) & present:
            found.append(f"group {comm}: ranks do not agree on what it is: {[r.comms[comm] for r in members.values()]}")
            continue
        rows = [[e for e in r.events if e.comm == comm and e.op not in SENDS + RECEIVES] for r in members.values()]
        for turn, events in enumerate(zip_longest(*rows)):
            at = list(zip(members, events, strict=True))
            if None in events:
                why = "not all come"
            elif any(e.op == "split" for e in events):
                why = _split(at) if all(e.op == "split" for e in events) else "other collectives or arguments"
            else:
                why = _collective(at)
            if why:
                lines = "\n".join(told(e, n) for n, e in at[:MOST])
                found.append(f"group {comm} of ranks {list(members)}, collective {turn}: {why}\n{lines}")
                break
    return found


def pairs(records: list[Record]) -> list[str]:
    """Checks rule 3."""
    found = []
    for (comm, source, target), sent, received in _pairs(records):
        for turn, (out, into) in enumerate(zip_longest(sent, received)):
            if out is None or into is None or out.same != into.same:
                head = f"group {comm}, message {turn} from rank {source} to rank {target}"
                found.append(f"{head}:\n{told(out, source)}\n{told(into, target)}")
                break
    return found


def _pairs(records: list[Record]):
    ways = defaultdict(lambda: ([], []))
    for record in records:
        for event in record.events:
            if event.op in SENDS:
                ways[event.comm, record.rank, event.peer][0].append(event)
            elif event.op in RECEIVES:
                ways[event.comm, event.peer, record.rank][1].append(event)
    return [(way, *both) for way, both in sorted(ways.items())]


def order(records: list[Record]) -> list[str]:
    """Checks rule 4, over the device's communicators; reports a ring of ranks that wait for each other."""
    launches: dict[int, list[list[tuple]]] = {}
    events: dict[tuple, dict[int, Event]] = defaultdict(dict)
    need: dict[tuple, int] = {}
    for record in records:
        turns: Counter = Counter()
        mine: dict[int, list[tuple]] = {}
        for event in record.events:
            comm, n = record.comms[event.comm], record.rank
            if comm.kind == "host":
                continue
            if comm.kind == "own" and comm.name not in turns:
                turns[comm.name] = 1
                key = comm.name, "made"
                events[key][n], need[key] = event, len(comm.ranks)
                mine[-event.launch] = [key]
            way: tuple = (comm.name, "all")
            if event.op in SENDS + RECEIVES:
                way = (comm.name, n, event.peer) if event.op in SENDS else (comm.name, event.peer, n)
            key = (*way, turns[way])
            turns[way] += 1
            events[key][n] = event
            mine.setdefault(event.launch, []).append(key)
        launches[record.rank] = list(mine.values())
    heads, there = dict.fromkeys(launches, 0), defaultdict(set)
    while True:
        waiting = [(n, row[heads[n]]) for n, row in launches.items() if heads[n] < len(row)]
        for n, keys in waiting:
            for key in keys:
                there[key].add(n)
        free = [n for n, keys in waiting if all(len(there[k]) == need.get(k, len(events[k])) for k in keys)]
        for n in free:
            heads[n] += 1
        if not free:
            break
    lines = [f"{told(events[keys[0]][n], n)} on group {keys[0][0]}" for n, keys in waiting]
    return ["ranks wait for each other:\n" + "\n".join(lines)] if lines else []


def threads(records: list[Record]) -> list[str]:
    """Checks rule 5."""
    found = []
    for record in records:
        first: dict[str, Event] = {}
        for event in record.events:
            if record.comms[event.comm].kind != "host":
                first.setdefault(event.thread, event)
        if len(first) > 1:
            lines = (f"{told(event, record.rank)} in {thread}" for thread, event in first.items())
            found.append("collectives of several threads:\n" + "\n".join(lines))
    return found


def judge(records: list[Record]) -> list[str]:
    """Violations of NCCL's rules by the ranks; empty where there are none."""
    found = []
    for rule in (sequences, pairs, order, threads):
        some = rule(records)
        found += some[:MOST] + ([f"... and {len(some) - MOST} more"] if len(some) > MOST else [])
    return found
