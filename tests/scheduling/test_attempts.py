"""The budget of attempts: what an execution does to itself counts, what the end of a job does to it does not."""

from __future__ import annotations

from typing import Literal

from hypothesis import given, strategies as st

from gyre.ledger import events as ev
from gyre.scheduling import admission
from gyre.scheduling.decide import decide
from gyre.scheduling.decider import Decider

from .settings import make
from .test_decisions import OPENED, Told

NAME = "g00000-00"
Fate = Literal["retry", "lost", "job", "cut", "scheduler"]
"""Of the attempt under way: it fails, its worker dies, its job ends with all in it (`cut`: after its worker ended it
and could not grade it), the scheduler alone dies."""


class History:
    """One execution, and what befalls its attempts."""

    def __init__(self, budget: int) -> None:
        self.settings = make(1, attempts=budget, executions=1, groups_per_step=1)
        self.told = Told().accept("worker-0").tell("worker-0", ev.WorkerReady(slots=4))
        self.worker = self.epoch = 1
        self.order(ev.BurstOpened(burst=1, lineage=1, version=0, groups=[ev.GroupPlan("g00000", "a", 1)]))

    def order(self, event: ev.Event) -> None:
        self.told.tell("scheduler", event, incarnation=self.epoch)

    def decide(self) -> list[ev.Event]:
        orders = admission.dispatch(self.told.world(self.settings))
        for order in orders:
            self.order(order)
        return orders

    def befalls(self, fate: Fate) -> None:
        if fate in ("retry", "cut"):
            last, cut = self.told.state.executions[NAME].last(), fate == "cut"
            failed = ev.Finished(execution=NAME, attempt=last, outcome="retry", reason="it broke", interrupted=cut)
            self.told.tell("worker-0", failed, incarnation=self.worker)
        if fate in ("job", "cut", "scheduler"):
            self.epoch += 1
            self.told.tell("scheduler", OPENED, incarnation=self.epoch)
        if fate in ("job", "cut", "lost"):
            self.worker += 1
            self.told.tell("worker-0", OPENED, incarnation=self.worker)
            self.order(ev.Accepted(writer="worker-0", incarnation=self.worker, cut={self.worker - 1: 9}))
            self.told.tell("worker-0", ev.WorkerReady(slots=4), incarnation=self.worker)


@given(st.integers(1, 4), st.lists(st.sampled_from(["retry", "lost", "job", "cut"]), max_size=12))
def test_an_execution_is_excluded_after_as_many_failures_of_its_own_as_it_may_have(
    budget: int, fates: list[Fate]
) -> None:
    history, failures = History(budget), 0
    for number, fate in enumerate(fates, 1):
        assert history.decide() == [dispatched(history, number)]
        assert history.decide() == [], "it is under way"
        history.befalls(fate)
        failures += fate in ("retry", "lost")
        if failures == budget:
            (excluded,) = history.decide()
            assert isinstance(excluded, ev.Excluded)
            assert history.told.state.executions[NAME].terminal()
            return
    assert history.decide() == [dispatched(history, len(fates) + 1)]


def dispatched(history: History, attempt: int) -> ev.Event:
    return ev.Dispatched(worker="worker-0", incarnation=history.worker, executions=[ev.Dispatch(NAME, attempt, "a")])


@given(st.lists(st.sampled_from(["retry", "lost", "job", "scheduler"]), max_size=12))
def test_a_scheduler_that_dies_alone_takes_no_attempt_with_it(fates: list[Fate]) -> None:
    history, attempt = History(budget=20), 1
    history.decide()
    for fate in fates:
        history.befalls(fate)
        attempt += fate != "scheduler"
        assert history.decide() == ([dispatched(history, attempt)] if fate != "scheduler" else [])


def leaving(grade: bool) -> tuple[History, list[ev.Event]]:
    """The job of an execution that is under way is about to end; what the scheduler says to it."""
    history = History(budget=1)
    history.settings = make(1, executions=1, groups_per_step=1, grade_interrupted=grade)
    history.decide()
    history.told.tell("control", ev.CancelRequested(leaving=True))
    orders = decide(history.told.world(history.settings))
    assert Decider(history.told.state, history.settings).decide() == orders, "the daemon's short cuts change nothing"
    return history, orders


STOP = [ev.StopOrdered(reason="cancelled"), ev.RunEnded(state="cancelled", reason="its job ends")]


def test_the_end_of_a_job_waits_for_what_is_graded_as_it_stands_and_dispatches_nothing() -> None:
    assert leaving(grade=False)[1] == STOP
    history, orders = leaving(grade=True)
    assert orders == []
    history.befalls("retry")
    assert decide(history.told.world(history.settings)) == STOP


def test_a_user_who_cancels_meanwhile_does_not_wait() -> None:
    history, _ = leaving(grade=True)
    history.told.tell("control", ev.CancelRequested(), incarnation=2)
    stop, end = decide(history.told.world(history.settings))
    assert (stop, end) == (STOP[0], ev.RunEnded(state="cancelled", reason="gyre cancel"))


def test_the_end_of_a_job_does_not_wait_for_a_worker_that_is_gone() -> None:
    history, _ = leaving(grade=True)
    world = history.told.world(history.settings, dead=["worker-0"])
    assert decide(world) == STOP
