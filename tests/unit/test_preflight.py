"""Nodes of a job: which pairs are measured, which node is to blame, which are taken; and reaching the first one."""

import itertools
import json
import socket

import pytest

from spmdrl.tools.hosts import Hosts, carried
from spmdrl.tools.preflight import (
    ALL,
    FIRST,
    SECOND,
    TooFewError,
    choose,
    look_at,
    parse_rounds,
    port_of,
    rounds_of,
    second_look,
    show_rounds,
    states,
    unfit,
)
from spmdrl.tools.reach import problem

FAST = {"all_reduce": 100.0, "all_to_all": 20.0, "clock": 0.01, "error": "", "network": "", "round": 0}
SLOW = FAST | {"all_reduce": 1.0}
GONE = FAST | {"all_reduce": 0.0, "all_to_all": 0.0, "error": "a rank did not answer within 25 s"}
FLOORS = (50.0, 10.0)


def named(n: int) -> list[str]:
    return [f"node{i}" for i in range(n)]


class Cluster:
    """Stands in for the doctor on all nodes: a pair with a slow node is slow, one with a dead node fails."""

    def __init__(self, slow=(), dead=(), failing=(), links=(), gpus=None):
        self.slow, self.dead, self.failing, self.links = set(slow), set(dead), set(failing), set(map(frozenset, links))
        self.gpus = gpus or {}
        self.looks: list[tuple[list[str], list, bool]] = []

    def __call__(self, hosts, rounds, only_pairs, seconds):
        assert 0 < seconds <= FIRST
        self.looks.append((list(hosts), parse_rounds(rounds), only_pairs))
        found = {}
        for host in hosts:
            if host in self.dead:
                continue
            pairs = []
            for pair in itertools.chain(*parse_rounds(rounds)):
                if host in pair:
                    both = set(pair)
                    kind = GONE if both & self.dead else SLOW if both & self.slow or both in self.links else FAST
                    pairs.append(kind | {"with": (both - {host}).pop()})
            bad = {"name": "open files", "level": "fail", "state": "64", "fix": "more"}
            findings = [bad] if host in self.failing else []
            found[host] = {"gpus": self.gpus.get(host, 8), "findings": findings, "pairs": pairs}
        return found


def pick(hosts, need, cluster, dead=None) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return choose(hosts, need, cluster, FLOORS, said.append, dead or {}), said


@pytest.mark.parametrize("n", range(1, 40))
def test_rounds_pair_every_node_with_neighbours_and_never_twice_at_once(n):
    hosts = named(n)
    rounds = rounds_of(hosts)
    assert parse_rounds(show_rounds(rounds)) == rounds and len(rounds) <= (3 if n == 3 else 2)
    for pairs in rounds:
        taken = list(itertools.chain(*pairs))
        assert len(taken) == len(set(taken))
    all_pairs = list(itertools.chain(*rounds))
    assert len({frozenset(pair) for pair in all_pairs}) == len(all_pairs)
    assert {host for pair in all_pairs for host in pair} == (set(hosts) if n > 1 else set())
    for a, b in all_pairs:
        assert (hosts.index(a) - hosts.index(b)) % n in (1, n - 1)
    text = show_rounds(rounds)
    ports = [port_of(20000, text, i, pair) for i, pairs in enumerate(rounds) for pair in pairs]
    assert len(set(ports)) == len(ports) and all(20000 < port < 21000 for port in ports)


@pytest.mark.parametrize("kind", ["slow", "dead", "failing"])
@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_every_set_of_bad_nodes_is_found_exactly(n, kind):
    """Wherever two neighbours are good; a node without a good neighbour is measured again, beside one that has one."""
    hosts, found = named(n), 0
    for size in range(n - 1):
        for bad in itertools.combinations(hosts, size):
            good = [host for host in hosts if host not in bad]
            if not any(set(pair) <= set(good) for pair in itertools.chain(*rounds_of(hosts))):
                continue
            cluster = Cluster(**{kind: bad})
            took, said = pick(hosts, len(good), cluster)
            assert took == good, (bad, said)
            assert sorted(line.split()[2].rstrip(":") for line in said if line.startswith("bad node")) == sorted(bad)
            assert len(cluster.looks) <= 2
            with pytest.raises(TooFewError):
                pick(hosts, len(good) + 1, Cluster(**{kind: bad}))
            found += 1
    assert found > n


def test_two_nodes_that_are_slow_together_are_both_named():
    with pytest.raises(TooFewError) as error:
        pick(named(2), 1, Cluster(slow=["node1"]))
    told = str(error.value)
    assert told.startswith("1 node is needed and 0 of 2 are good: node0 (with node1: all-reduce 1.00 GB/s, floor 50)")
    assert "sbatch --exclude=node0,node1" in told and "FLOOR_ALL_REDUCE" in told and "PREFLIGHT=0" in told


def test_the_way_out_is_that_of_the_place_where_hosts_come_from():
    told = []
    for slurm in (True, False):
        with pytest.raises(TooFewError) as error:
            choose(named(3), 3, Cluster(failing=["node1"]), FLOORS, told.append, {}, slurm)
        told.append(str(error.value))
    with_slurm, without = [line for line in told if "are needed" in line]
    assert "sbatch --exclude=node1" in with_slurm and "HOSTS" not in with_slurm
    assert "sbatch" not in without and "out of HOSTS and name others, or lower NODES" in without


def test_a_slow_link_between_good_nodes_is_told_and_both_stay():
    took, said = pick(named(4), 4, Cluster(links=[("node1", "node2")]))
    assert took == named(4)
    assert said[0].startswith("slow between node1 and node2: all-reduce 1.00 GB/s, floor 50; each is fast enough")


def test_one_node_has_no_pairs_and_dead_ones_are_not_asked():
    cluster = Cluster()
    assert pick(["a", "b", "c"], 1, cluster, {"a": "SLURM reports down", "c": "no answer"})[0] == ["b"]
    assert cluster.looks == [(["b"], [], False)]
    cluster = Cluster()
    with pytest.raises(TooFewError, match=r"3 nodes are needed and 2 of 3 are good: a \(SLURM reports down\)"):
        pick(["a", "b", "c"], 3, cluster, {"a": "SLURM reports down"})
    assert cluster.looks == [], "it is known before anything runs"


@pytest.mark.parametrize(
    ("gpus", "bad"),
    [({"node1": 7}, "node1"), ({"node0": 0, "node1": 8, "node2": 8}, "node0"), ({"node3": 16}, "node3")],
)
def test_a_node_with_another_number_of_gpus_is_left_out(gpus, bad):
    took, said = pick(named(4), 3, Cluster(gpus=gpus))
    assert took == [host for host in named(4) if host != bad]
    assert any(f"bad node {bad}: {gpus[bad]} GPUs, but most nodes have 8" in line for line in said)


def test_of_two_nodes_the_one_with_fewer_gpus_is_bad():
    reports = Cluster(gpus={"node0": 4})(named(2), "", False, 1.0)
    assert list(unfit(named(2), reports)) == ["node0"]


def test_suspects_meet_good_nodes_one_at_a_time():
    rounds = second_look(["s1", "s2", "s3"], ["g1", "g2"])
    assert rounds == [[("g1", "s1"), ("g2", "s2")], [("g1", "s3")]]
    assert second_look(["s1"], []) == []
    assert second_look(["s1", "s2"], []) == [[("s2", "s1")]]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_pairs_that_fail_once_are_measured_again(n):
    """Where all pairs failed, no node is known to be good, and one meeting may have failed by chance."""

    class Hiccup(Cluster):
        def __call__(self, *asked):
            found = super().__call__(*asked)
            if len(self.looks) == 1:
                for report in found.values():
                    report["pairs"] = [GONE | {"with": pair["with"]} for pair in report["pairs"]]
            return found

    cluster = Hiccup()
    took, said = pick(named(n), n, cluster)
    assert took == named(n) and len(cluster.looks) == 2 and not any("bad node" in line for line in said)
    (_, first, _), (_, again, only_pairs) = cluster.looks
    assert only_pairs and {frozenset(p) for r in again for p in r} == {frozenset(p) for r in first for p in r}
    ports = [{port_of(20000, show_rounds(x), i, p) for i, r in enumerate(x) for p in r} for x in (first, again)]
    assert not ports[0] & ports[1], "a port that the first look left open is not met"


def test_looks_fit_into_two_minutes():
    assert ALL < 120 and FIRST < ALL and SECOND < ALL - FIRST + 20


@pytest.mark.slow
def test_reports_come_by_files_and_broken_words_are_no_report(tmp_path):
    class Writes(Hosts):
        def on(self, hosts, words, seconds, output):
            folder = words[words.index("--reports") + 1]
            for host in hosts[:-1]:
                with open(f"{folder}/{host}.json", "w") as file:
                    json.dump({"nodes": [{"gpus": 0, "findings": [], "pairs": []}]}, file)

    said: list[str] = []
    found = look_at(Writes(), tmp_path, 1, said.append)(["a", "b"], "a/b", False, 5.0)
    assert list(found) == ["a"] and said[0].startswith("1 of 2 nodes answered in ")


def test_states_are_not_known_without_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert states(["a"]) == {}


def test_first_node_that_refuses_is_alive_and_one_without_a_name_is_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert problem("127.0.0.1", port) == "", "nothing listens yet"
        taken.listen()
        assert problem("127.0.0.1", port) == ""
    assert problem("no-such-host.invalid", port, tries=1).startswith("the name has no address")


def test_hosts_get_what_libraries_read_and_nothing_of_another_job():
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "NPROC": "2", "TORCHELASTIC_RUN_ID": "1", "RANK": "3", "HOSTS": "a"}
    assert carried(given) == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "NPROC": "2"}
