"""The interface between nodes is chosen by the way to the first one, and is never a loopback."""

import os

import pytest

from spmdrl.spmd.network import NAMES, OUTSIDE, choose_interface, interface_with, source_of


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch):
    for name, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node-a"}.items():
        monkeypatch.setenv(name, value)
    for name in NAMES:
        # This restores the variables after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


BY_ADDRESS = {"10.0.0.4": "ib0", "192.168.1.4": "eth0"}.get


def by(**own: str):
    """Gives this node's own address on the way to `node-a` (here node_a) or out; there is no other way."""

    def source(address: str) -> str:
        found = own.get("out" if address == OUTSIDE else address.replace("-", "_"))
        if found is None:
            raise OSError("no route")
        return found

    return source


def test_the_interface_towards_the_first_node_is_taken_for_both_libraries():
    told = choose_interface(by(node_a="10.0.0.4", out="192.168.1.4"), BY_ADDRESS)
    assert told == "network: ib0 (10.0.0.4), towards node-a"
    assert [os.environ[name] for name in NAMES] == ["ib0", "ib0"]


def test_a_first_node_that_calls_itself_127_0_1_1_takes_the_way_out():
    assert (
        choose_interface(by(node_a="127.0.1.1", out="192.168.1.4"), BY_ADDRESS)
        == "network: eth0 (192.168.1.4), towards node-a"
    )


def test_a_users_own_choice_and_a_single_node_stay(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5")
    assert choose_interface(by(), BY_ADDRESS) == "network: ens5 (GLOO_SOCKET_IFNAME)"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ens5"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert choose_interface(by(), BY_ADDRESS) == ""


def test_bad_network_whose_ways_lead_back_names_the_variables():
    with pytest.raises(ValueError, match="leads from .* to node-a .*set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"):
        choose_interface(by(node_a="127.0.0.1"), BY_ADDRESS)
    assert choose_interface(by(), BY_ADDRESS) == "", "IPv6 alone: the libraries choose"


def test_real_interfaces_are_found_by_their_address():
    assert source_of("127.0.0.1") == "127.0.0.1" and interface_with("127.0.0.1") == "lo"
    assert interface_with("203.0.113.77") is None
