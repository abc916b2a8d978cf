"""Switches are what lies between rollout and training; an update of weights is none."""

from __future__ import annotations

from gyre.ledger.state import CellIncarnation
from gyre.views.switches import switches_of

HISTORY = [
    ("starting", 5.0, 100.0),
    ("ready", 1.0, 101.0),
    ("resuming", 0.5, 101.5),
    ("rollout", 10.0, 111.5),
    ("resuming", 0.25, 111.75),
    ("rollout", 4.0, 115.75),
    ("draining", 0.5, 116.25),
    ("releasing", 0.25, 116.5),
    ("joining", 1.0, 117.5),
    ("training", 3.0, 120.5),
    ("joining", 0.5, 121.0),
    ("training", 2.0, 123.0),
    ("leaving", 0.125, 123.125),
    ("resuming", 1.0, 124.125),
]


def test_phases_and_ends_of_both_switches() -> None:
    cell = CellIncarnation(state="rollout", t=124.125, history=HISTORY)
    forward, back = switches_of(cell, incarnation=2)
    assert (forward.to, forward.at, forward.seconds) == ("training", 117.5, 1.75)
    assert forward.phases == {"draining": 0.5, "releasing": 0.25, "joining": 1.0}
    assert (back.to, back.at, back.incarnation) == ("rollout", 124.125, 2)
    assert back.phases == {"leaving": 0.125, "resuming": 1.0}


def test_a_switch_that_is_under_way_is_not_counted() -> None:
    cell = CellIncarnation(state="joining", t=116.5, history=HISTORY[:8])
    assert switches_of(cell, incarnation=1) == []


def test_an_update_of_weights_is_no_switch() -> None:
    cell = CellIncarnation(state="rollout", t=111.75, history=HISTORY[:5])
    assert switches_of(cell, incarnation=1) == []
