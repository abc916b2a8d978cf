"""The further nodes of a cell: names, shares of the ranks, and where they meet."""

from __future__ import annotations

import socket

import pytest

from gyre.ledger.job import agents_of, place_of
from gyre.processes.address import address_of, meeting_socket, node_interface
from gyre.processes.parts import ranks_on
from gyre.recipe.load import load_recipe
from gyre.recipe.places import engine_nodes
from tests.chaos.harness import ROOT


def test_each_node_has_as_many_ranks_in_order() -> None:
    assert [list(ranks_on(node, 6, 3)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_an_agents_name_says_where_it_is() -> None:
    assert agents_of("cell-12", 3) == ["agent-12-1", "agent-12-2"]
    assert agents_of("cell-0", 1) == []
    assert [place_of(name) for name in ("agent-12-2", "cell-3")] == [("cell-12", 2), ("cell-3", 0)]


def test_ranks_meet_on_the_nodes_own_address_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_HOST", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert node_interface() == {"GLOO_SOCKET_IFNAME": "lo"}
    with meeting_socket() as listener:
        host, port = address_of(listener).split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port))).close()
    monkeypatch.setenv("GYRE_HOST", "192.0.2.1")  # nobody's
    assert node_interface() == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # the site's own word
    assert node_interface() == {}


def test_an_engine_lies_on_as_many_nodes_as_it_needs() -> None:
    designed = ROOT / "tests" / "recipe" / "designed.toml"

    def nodes(*settings: str) -> int:
        return engine_nodes(load_recipe(designed, settings, folders=False))

    assert [nodes(f"rollout.tensor_parallel={tensor}") for tensor in (4, 8, 16, 32)] == [1, 1, 2, 4]
    cpu = ("cells.gpus_per_node=0", "cells.nodes_per_cell=2")
    assert [nodes(*cpu, f"rollout.tensor_parallel={tensor}") for tensor in (1, 2, 4)] == [1, 2, 2]
