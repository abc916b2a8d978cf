"""The fold, line by line: which lines count, and what they mean whichever comes first."""

from __future__ import annotations

from itertools import permutations

import pytest

from gyre.ledger import events as ev
from gyre.ledger.fold import fold_all
from gyre.ledger.tail import Line


def said(writer: str, incarnation: int, *events: ev.Event) -> list[Line]:
    return [Line(writer, incarnation, n, 1.0, event) for n, event in enumerate(events)]


OPENED = ev.Opened(pid=1, pid_start=1.0, host="h", code="c")
BURST = ev.BurstOpened(burst=1, lineage=1, version=0, groups=[ev.GroupPlan("g00000", "t", 1)])
FIRST = ev.Dispatched(worker="worker-0", incarnation=1, executions=[ev.Dispatch("g00000-00", 1, "t")])
SECOND = ev.Dispatched(worker="worker-1", incarnation=1, executions=[ev.Dispatch("g00000-00", 2, "t")])
END_1 = ev.Finished(
    execution="g00000-00", attempt=1, outcome="graded", reason="finished", reward=0.25, tokens_sampled=3
)
END_2 = ev.Finished(
    execution="g00000-00",
    attempt=2,
    outcome="graded",
    reason="harness_timeout: step two",
    reward=0.75,
    tokens_sampled=4,
)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_only_the_newest_attempt_ends_an_execution(order: tuple[int, ...]) -> None:
    """An attempt that was given up for lost and ends after all does not change the outcome that was consumed."""
    journals = [
        said("scheduler", 1, OPENED, BURST, FIRST, SECOND),
        said("worker-0", 1, OPENED, END_1),
        said("worker-1", 1, OPENED, END_2),
    ]
    state = fold_all([line for index in order for line in journals[index]])
    assert state.executions["g00000-00"].outcome() == END_2
    assert state.open == set()
    assert (state.tally.graded, state.tally.excluded, state.tally.tokens_sampled) == (1, 0, 7)
    assert state.tally.ends == {"finished": 1, "harness_timeout": 1}


def test_a_lost_attempt_that_ends_leaves_its_execution_open() -> None:
    scheduler, worker = said("scheduler", 1, OPENED, BURST, FIRST, SECOND), said("worker-0", 1, OPENED, END_1)
    for lines in ([*scheduler, *worker], [*worker, *scheduler], [*scheduler[:3], *worker, *scheduler[3:]]):
        assert fold_all(lines).open == {"g00000-00"}
        assert fold_all(lines).executions["g00000-00"].verdict() is None


def test_an_incarnation_that_was_never_seen_never_counts() -> None:
    """Incarnation 1 opened its journal and wrote nothing before 2 was accepted."""
    accepted = ev.Accepted(writer="cell-0", incarnation=2, cut={})
    late = said("cell-0", 1, OPENED, ev.CellEntered(state="ready"))
    lines = [*said("scheduler", 1, OPENED, accepted), *said("cell-0", 2, OPENED)]
    whole = fold_all(lines)
    assert 1 not in whole.cells.get("cell-0", {})
    assert fold_all([*lines, *late]) == fold_all([*late, *lines]) == whole


def test_a_scheduler_that_was_cut_accepts_nobody() -> None:
    """Its successor cuts it at n = 1: what it accepted after that, and cut too short, counts again."""
    old = said(
        "scheduler", 1, OPENED, ev.Accepted(writer="scheduler", incarnation=1),
        ev.Accepted(writer="cell-0", incarnation=2, cut={1: 0}),
    )  # fmt: skip
    new = said(
        "scheduler", 2, OPENED, ev.Accepted(writer="scheduler", incarnation=2, cut={1: 1}),
        ev.Accepted(writer="cell-0", incarnation=2, cut={1: 1}),
    )  # fmt: skip
    cell = said("cell-0", 1, OPENED, ev.CellEntered(state="ready"))
    for order in ([*old, *cell, *new], [*cell, *new, *old], [*new, *old, *cell], [*old, *new, *cell]):
        state = fold_all(order)
        assert state.cuts == {"scheduler": {1: 1}, "cell-0": {1: 1}}
        assert state.cells["cell-0"][1].state == "ready"
        assert state.seen["scheduler"] == {1: 1, 2: 2}


def test_a_refused_bundle_that_is_granted_again_is_not_lost() -> None:
    """A contribution holds grants, not names: the same micro-steps under a new grant are another addition."""

    def done(grant: int) -> ev.Done:
        return ev.Done(grant=grant, lineage=1, step=1, microsteps=["m"])

    def offered(number: int) -> ev.Offered:
        return ev.Offered(lineage=1, step=1, number=number, microsteps=["m"], manifest="x")

    state = fold_all(said("cell-1", 1, OPENED, done(1), offered(1), done(2), offered(2)))
    offers = state.cells["cell-1"][1].offers
    assert [offer.grants for offer in offers.values()] == [[1], [2]]


def test_the_newest_word_of_the_command_line_holds() -> None:
    cancel, resume = said("control", 1, OPENED, ev.CancelRequested()), said("control", 2, OPENED, ev.ResumeRequested())
    assert fold_all(cancel).cancel == 1
    assert fold_all([*cancel, *resume]).cancel == 0
    assert fold_all([*resume, *cancel]).cancel == 0
