"""Which published weights the core goes on holding."""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.processes.leases import keep_manifests

CORE, SATELLITE = "cell-0", "cell-1"


class Ledger:
    """A state that is told events."""

    def __init__(self) -> None:
        self.state = RunState()
        self._n: dict[tuple[str, int], int] = {}

    def say(self, writer: str, event: ev.Event, incarnation: int = 1) -> None:
        n = self._n[writer, incarnation] = self._n.get((writer, incarnation), -1) + 1
        fold(self.state, Line(writer, incarnation, n, 0.0, event))

    def commit(self, step: int) -> None:
        self.say(
            CORE,
            ev.Committed(
                lineage=1, step=step, version=step, weight_version=f"1.{step}-x", manifest=f"w{step}", checkpointed=True
            ),
        )

    def serve(self, cell: str, step: int, incarnation: int = 1) -> None:
        self.say(
            "scheduler",
            ev.ServeOrdered(
                cell=cell,
                incarnation=incarnation,
                lineage=1,
                step=step,
                version=step,
                weight_version=f"1.{step}-x",
                manifest=f"w{step}",
            ),
        )


def opened() -> Ledger:
    ledger = Ledger()
    for cell in (CORE, SATELLITE):
        ledger.say(cell, ev.Opened(pid=1, pid_start=1.0, host="h", code="0"))
        ledger.say("scheduler", ev.Accepted(writer=cell, incarnation=1))
    ledger.say(CORE, ev.LineageOpened(lineage=1, step=0, version=0, weight_version="1.0-x", manifest="w0"))
    return ledger


def test_before_a_lineage_only_the_newest() -> None:
    assert keep_manifests(RunState(), CORE, "w5", 0) == ["w5"]


def test_what_an_order_names_is_kept_until_a_newer_order() -> None:
    ledger = opened()
    ledger.serve(SATELLITE, 0)
    ledger.commit(1)
    assert keep_manifests(ledger.state, CORE, "w1", boundary=1) == ["w0", "w1"]
    ledger.serve(SATELLITE, 1)
    assert keep_manifests(ledger.state, CORE, "w1", boundary=1) == ["w1"]


def test_what_rollout_is_to_serve_is_kept_within_a_burst() -> None:
    ledger = opened()
    for step in (1, 2, 3):
        ledger.commit(step)
    assert keep_manifests(ledger.state, CORE, "w3", boundary=2) == ["w2", "w3"]


def test_the_lease_of_an_incarnation_that_is_gone_is_free() -> None:
    ledger = opened()
    ledger.serve(SATELLITE, 0)
    ledger.commit(1)
    ledger.say(SATELLITE, ev.Opened(pid=2, pid_start=2.0, host="h", code="0"), incarnation=2)
    ledger.say("scheduler", ev.Accepted(writer=SATELLITE, incarnation=2, cut={1: 0}))
    assert keep_manifests(ledger.state, CORE, "w1", boundary=1) == ["w1"]


def test_the_cores_own_order_holds_nothing_and_other_lineages_are_not_ours() -> None:
    ledger = opened()
    ledger.serve(CORE, 0)
    ledger.commit(1)
    assert keep_manifests(ledger.state, CORE, "w1", boundary=1) == ["w1"]
    ledger.say(
        "scheduler",
        ev.TrainOrdered(cell=SATELLITE, incarnation=1, lineage=0, step=1, manifest="a-dead-core's"),
    )
    assert keep_manifests(ledger.state, CORE, "w1", boundary=1) == ["w1"]
