"""Chooses the nodes of a job before it starts: `python -m spmdrl.tools.preflight`, for slurm/job.sh and launch/node.sh.

The doctor checks every node. Then neighbouring nodes measure all-reduce and all-to-all bandwidth, with all pairs of a
round in parallel. A node is bad if it does not answer, if a check fails, if it has a different number of GPUs than most
nodes, or if its bandwidth is below the floor with every neighbour and, in a second measurement, with a good node. The
preflight prints as many good nodes as the job needs on stdout, and bad nodes with reasons on stderr. It runs outside
the job's container, so it needs no installed packages.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from spmdrl.tools.hosts import Hosts

ALL = 115.0
"""Timeout of the whole preflight, in seconds."""
FIRST, SECOND = 90.0, 40.0
"""Timeouts of the first and second measurement, in seconds."""
SHARED = 2.0
"""Maximum delay in seconds until other nodes see a file written to a shared folder."""
DOWN = ("down", "fail", "unknown", "not_responding", "*")
"""Substrings of `sinfo` states that mean that a node cannot run a job."""

Pair = tuple[str, str]
Reports = dict[str, dict]


class TooFewError(ValueError):
    """Raised if there are fewer good nodes than the job needs."""


# ── pairs ────────────────────────────────────────────────────────────────────


def rounds_of(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return at most two rounds of neighbour pairs, or three for three nodes. A node occurs at most once per round.

    An even number of nodes forms a ring, and an odd number forms a chain. Three nodes also form a ring, because the
    middle node of a chain would be in every pair.
    """
    n = len(hosts)
    pairs = [(hosts[i], hosts[i + 1]) for i in range(n - 1)]
    rounds = [pairs[0::2], pairs[1::2]]
    if n == 3:
        rounds.append([(hosts[2], hosts[0])])
    elif n > 3 and n % 2 == 0:
        rounds[1].append((hosts[-1], hosts[0]))
    return [each for each in rounds if each]


def show_rounds(rounds: Sequence[Sequence[Pair]]) -> str:
    """Format the rounds as text for the command line: `a/b,c/d;b/c`."""
    return ";".join(",".join("/".join(pair) for pair in pairs) for pairs in rounds)


def parse_rounds(text: str) -> list[list[Pair]]:
    """Parse the rounds formatted by `show_rounds`."""
    split = [[tuple(pair.split("/")) for pair in each.split(",")] for each in text.split(";") if each]
    return [[(pair[0], pair[1]) for pair in pairs] for pairs in split]


def port_of(base: int, text: str, number: int, pair: Pair) -> int:
    """Return the port that a pair's first node listens on. Pairs use different ports, as nodes may share a machine."""
    rounds = parse_rounds(text)
    place = sum(map(len, rounds[:number])) + rounds[number].index(pair)
    # The second measurement uses different ports, because those of the first may still be in use.
    return base + 1 + (place + zlib.crc32(text.encode()) % 89) % 900


# ── evaluation ───────────────────────────────────────────────────────────────


def unfit(hosts: Sequence[str], reports: Reports) -> dict[str, str]:
    """Return the nodes that are bad for reasons other than bandwidth, with the reasons."""
    bad = {host: "no report arrived in time" for host in hosts if host not in reports}
    for host, report in reports.items():
        wrong = [each for each in report["findings"] if each["level"] == "fail"]
        if wrong:
            bad[host] = "; ".join(f"{each['name']}: {each['state']} (fix: {each['fix']})" for each in wrong)
    counts = Counter(report["gpus"] for report in reports.values())
    if len(counts) > 1:
        # If two numbers are equally common, the larger one wins.
        usual = max(counts, key=lambda number: (counts[number], number))
        for host, report in reports.items():
            if report["gpus"] != usual:
                many = "1 GPU" if report["gpus"] == 1 else f"{report['gpus']} GPUs"
                bad.setdefault(host, f"{many}, but most nodes have {usual}")
    return bad


def _below(pair: dict, floors: tuple[float, float]) -> str:
    """Return the reason why a measured pair is bad, or "" if it is good.

    floors: minimum all-reduce and all-to-all bandwidths in GB/s.
    """
    if pair["error"]:
        return pair["error"]
    named = (("all-reduce", pair["all_reduce"], floors[0]), ("all-to-all", pair["all_to_all"], floors[1]))
    return ", ".join(f"{name} {speed:.2f} GB/s, floor {floor:g}" for name, speed, floor in named if speed < floor)


def _slow(hosts: Sequence[str], reports: Reports, floors: tuple[float, float]) -> tuple[dict[str, str], list[str]]:
    """Return the nodes that are in no good pair, with reasons, and a line for each bad pair among the other nodes.

    hosts: nodes to evaluate; their pairs with other nodes are ignored.
    """
    if len(hosts) < 2:
        return {}, []
    seen: dict[frozenset, str] = {}
    for host in hosts:
        for pair in reports[host]["pairs"]:
            if pair["with"] in hosts:
                both = frozenset((host, pair["with"]))
                seen[both] = _below(pair, floors) or seen.get(both, "")
    good = {host for both, why in seen.items() if not why for host in both}
    wrong = {both: why for both, why in seen.items() if why}
    lone = {}
    for host in set(hosts) - good:
        with_others = (f"with {next(iter(both - {host}))}: {why}" for both, why in wrong.items() if host in both)
        lone[host] = next(with_others, "none of its neighbours answered")
    odd = [f"{' and '.join(sorted(both))}: {why}" for both, why in wrong.items() if both <= good]
    return {host: lone[host] for host in hosts if host in lone}, odd


def second_look(suspects: Sequence[str], clean: Sequence[str]) -> list[list[Pair]]:
    """Return rounds that pair each suspect node with a good node.

    If there is no good node, pairs of suspects are measured again with listener and client swapped, because the first
    measurement may have failed by chance.
    """
    if not clean:
        return [[(second, first) for first, second in pairs] for pairs in rounds_of(suspects)]
    parts = [suspects[at : at + len(clean)] for at in range(0, len(suspects), len(clean))]
    return [list(zip(clean, part, strict=False)) for part in parts]


# ── choice of nodes ──────────────────────────────────────────────────────────


def choose(
    hosts: Sequence[str],
    need: int,
    look: Callable[[Sequence[str], str, bool, float], Reports],
    floors: tuple[float, float],
    say: Callable[[str], None],
    dead: dict[str, str],
    slurm: bool = True,
) -> list[str]:
    """Return the first `need` good nodes, in the order of `hosts`.

    Args:
        hosts: nodes of the job, spares included.
        need: number of nodes that the job needs.
        look: function that runs the doctor on nodes and maps (nodes, rounds, only pairs, timeout in seconds) to the
            reports received.
        floors: minimum all-reduce and all-to-all bandwidths of a pair, in 1e9 bytes per second.
        say: prints a line.
        dead: nodes that are known to be down, with the reasons.
        slurm: whether the nodes were allocated by SLURM rather than named in HOSTS.

    Raises:
        TooFewError: fewer than `need` nodes are good.
    """
    began, bad = time.monotonic(), dict(dead)
    left = [host for host in hosts if host not in bad]
    _enough(hosts, need, bad, slurm)
    reports = look(left, show_rounds(rounds_of(left)), False, FIRST)
    bad |= unfit(left, reports)
    left = [host for host in left if host not in bad]
    suspects, odd = _slow(left, reports, floors)
    clean = [host for host in left if host not in suspects]
    if len(suspects) > 1 or (suspects and clean):
        say(f"second measurement of {', '.join(suspects)}")
        again = second_look(list(suspects), clean)
        seconds = min(SECOND, ALL - (time.monotonic() - began))
        taken = {host for pairs in again for pair in pairs for host in pair}
        found = look([host for host in left if host in taken], show_rounds(again), True, seconds)
        answered = [host for host in left if host in found]
        still, _ = _slow(answered, found, floors)
        suspects = {host: still.get(host, why) for host, why in suspects.items() if host in still or host not in found}
    bad |= suspects
    for line in odd:
        say(f"slow between {line}; each is fast enough with another node, so both are kept")
    for host, why in bad.items():
        say(f"bad node {host}: {why}")
    _enough(hosts, need, bad, slurm)
    measured = [pair for host in left if host in reports for pair in reports[host]["pairs"] if not pair["error"]]
    if measured:
        low = [min(pair[name] for pair in measured) for name in ("all_reduce", "all_to_all")]
        apart = max(pair["clock"] for pair in measured)
        speeds = f"all-reduce at least {low[0]:.2f} GB/s, all-to-all at least {low[1]:.2f} GB/s"
        say(f"pairs: {speeds}; clocks within {apart:.2f} s")
        for line in sorted({pair["network"] for pair in measured if pair["network"]})[:2]:
            say(line)
    return [host for host in hosts if host not in bad][:need]


def _enough(hosts: Sequence[str], need: int, bad: dict[str, str], slurm: bool) -> None:
    """Check that enough nodes are good.

    Raises:
        TooFewError: fewer than `need` nodes are good; the message suggests how to get others.
    """
    good = len(hosts) - len(bad)
    if good >= need:
        return
    names = "; ".join(f"{host} ({why})" for host, why in bad.items())
    others = "leave the bad ones out of HOSTS and name others, or lower NODES"
    if slurm:
        exclude = f"sbatch --exclude={','.join(bad)}"
        others = f"leave the bad ones out ({exclude}), or request more spares (sbatch --nodes above NODES)"
    raise TooFewError(
        f"{need} {'node is' if need == 1 else 'nodes are'} needed and {good} of {len(hosts)} are good: {names}. To "
        f"continue, {others}; "
        "FLOOR_ALL_REDUCE and FLOOR_ALL_TO_ALL lower the floors, PREFLIGHT=0 starts without these checks"
    )


def look_at(run: Hosts, folder: Path, port: int, say: Callable[[str], None]):
    """Return the `look` argument of `choose`, which runs the doctor on nodes that report to a shared folder."""

    def look(hosts: Sequence[str], rounds: str, only_pairs: bool, seconds: float) -> Reports:
        # Each call uses a new folder, because NFS clients may cache for a minute that a file does not exist.
        place = folder / f"{time.strftime('%Y%m%d-%H%M%S')}{'-again' if only_pairs else ''}"
        place.mkdir(parents=True)
        words = ["doctor", "--reports", str(place.absolute()), "--port", str(port)]
        words += ["--pairs", rounds] if rounds else []
        words += ["--only-pairs"] if only_pairs else []
        began = time.monotonic()
        run.on(hosts, words, seconds, place / "output.txt")
        found, until = {}, time.monotonic() + SHARED
        while len(found) < len(hosts):
            for host in set(os.listdir(place)) & {f"{host}.json" for host in hosts if host not in found}:
                found[host.removesuffix(".json")] = json.loads((place / host).read_text())["nodes"][0]
            if time.monotonic() > until:
                break
            time.sleep(0.2)
        say(f"{len(found)} of {len(hosts)} nodes answered in {time.monotonic() - began:.0f} s: {place}")
        return {host: found[host] for host in hosts if host in found}

    return look


def states(hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes that SLURM reports as down, with their states."""
    words = ["sinfo", "--noheader", "--Node", "--nodes", ",".join(hosts), "--format", "%N %T"]
    try:
        text = subprocess.run(words, capture_output=True, text=True, timeout=15).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split() for line in text.splitlines() if len(line.split()) == 2]
    down = {host: state for host, state in rows if any(word in state.lower() for word in DOWN)}
    return {host: f"SLURM reports {state}" for host, state in down.items() if host in hosts}


def main(argv: list[str] | None = None) -> None:
    """Print the chosen nodes on stdout, separated by spaces; exit with 1 if too few are good."""
    parser = argparse.ArgumentParser("python -m spmdrl.tools.preflight", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", required=True, help="nodes, separated by spaces or commas")
    parser.add_argument("--need", type=int, required=True, help="number of nodes that the job needs")
    parser.add_argument("--folder", type=Path, required=True, help="folder on a file system that all nodes share")
    parser.add_argument("--port", type=int, required=True, help="first of the ports that are used")
    parser.add_argument("--floors", default="0,0", help="least all-reduce and all-to-all of a pair of nodes, GB/s")
    parser.add_argument("--srun", default="", help="srun with its flags")
    parser.add_argument("--inside", default="", help="command that runs another command in a container")
    options = parser.parse_args(argv)
    hosts = list(dict.fromkeys(options.hosts.replace(",", " ").split()))

    def say(line: str) -> None:
        print(f"[preflight] {line}", file=sys.stderr, flush=True)

    run = Hosts(shlex.split(options.srun), shlex.split(options.inside))
    try:
        reduce, exchange = map(float, options.floors.split(","))
        look = look_at(run, options.folder, options.port, say)
        print(*choose(hosts, options.need, look, (reduce, exchange), say, states(hosts)))
    except (TooFewError, OSError) as error:
        say(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
