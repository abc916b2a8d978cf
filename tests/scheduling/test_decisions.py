"""The decisions one by one, on states that are told by their lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.ledger.training_stats import statistics_of
from gyre.scheduling import admission, custody, microsteps, roles, routing
from gyre.scheduling.decide import decide
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

from .settings import make

OPENED = ev.Opened(pid=1, pid_start=1.0, host="h", code="c")
M0, M1 = "step-000001/1-00000", "step-000001/1-00001"


class Told:
    """A state, and more lines."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        self.state = RunState()
        self.tell("scheduler", OPENED)

    def tell(self, writer: str, *events: ev.Event, incarnation: int = 1) -> Told:
        for event in events:
            n = self.numbers[writer, incarnation] = self.numbers.get((writer, incarnation), -1) + 1
            fold(self.state, Line(writer, incarnation, n, 1.0, event))
        return self

    def accept(self, *writers: str) -> Told:
        for writer in writers:
            self.tell(writer, OPENED)
            self.tell("scheduler", ev.Accepted(writer=writer, incarnation=1))
        return self

    def world(self, settings: Settings, dead: Iterable[str] = (), waiting: float = 0.0) -> World:
        return World(self.state, settings, frozenset(dead), dict.fromkeys(settings.cells, waiting))


def serving(cells: int = 2) -> Told:
    """Cells that serve version 0, a worker that is ready; cell-0 is the core of lineage 1."""
    names = [f"cell-{i}" for i in range(cells)]
    told = Told().accept("processor", "worker-0", *names)
    told.tell("worker-0", ev.WorkerReady(slots=64))
    for name in names:
        told.tell(name, ev.CellEntered(state="ready"))
    told.tell("scheduler", ev.LineageOrdered(cell="cell-0", incarnation=1, lineage=1))
    told.tell("cell-0", ev.LineageOpened(lineage=1, step=0, version=0, weight_version="w0", manifest="m0"))
    for name in names:
        serve(told, name)
    return told


def serve(told: Told, cell: str, weights: str = "w0", lineage: int = 1, incarnation: int = 1) -> None:
    order = ev.ServeOrdered(
        cell=cell, incarnation=incarnation, lineage=lineage, step=0, version=0, weight_version=weights, manifest="m0"
    )
    told.tell("scheduler", order)
    said = ev.Serving(lineage=lineage, version=0, weight_version=weights)
    told.tell(cell, said, ev.CellEntered(state="rollout"), incarnation=incarnation)


def burst(told: Told, groups: int, executions: int = 2) -> Told:
    plans = [ev.GroupPlan(f"g{i:05d}", "a", executions) for i in range(groups)]
    return told.tell("scheduler", ev.BurstOpened(burst=1, lineage=1, version=0, groups=plans))


def run(told: Told, name: str, outcome: ev.Outcome | None = "graded", attempt: int = 1, reason: str = "") -> None:
    told.tell(
        "scheduler", ev.Dispatched(worker="worker-0", incarnation=1, executions=[ev.Dispatch(name, attempt, "a")])
    )
    if outcome is not None:
        told.tell("worker-0", ev.Finished(execution=name, attempt=attempt, outcome=outcome, reason=reason, reward=1.0))


def train(told: Told, *cells: str, step: int = 1) -> None:
    for cell in cells:
        told.tell("scheduler", ev.TrainOrdered(cell=cell, incarnation=1, lineage=1, step=step, manifest="m0"))
        told.tell(cell, ev.ServingEnded(), ev.CellEntered(state="training", lineage=1, step=step))


def in_training() -> Told:
    """Everything of step 1 is consumed and packed in two micro-steps; both cells train."""
    told = burst(serving(), 2)
    for group in ("g00000", "g00001"):
        for index in range(2):
            run(told, f"{group}-{index:02d}")
        told.tell("scheduler", ev.Consumed(step=1, group=group))
    told.tell("scheduler", ev.StepFilled(step=1))
    for name in (M0, M1):
        told.tell("processor", ev.MicroStepReady(step=1, microstep=name, digest="d", tokens=1, targets=1, samples=1))
    told.tell("processor", packed([M0, M1]))
    train(told, "cell-0", "cell-1")
    return told


def packed(names: list[str]) -> ev.Packed:
    return ev.Packed(step=1, microsteps=names, executions=4, tokens_sampled=0, tokens_trained=0, tokens_dropped={})


def grant(told: Told, number: int, cell: str, name: str, done: bool = True) -> None:
    about = {"grant": number, "lineage": 1, "step": 1, "microsteps": [name]}
    told.tell("scheduler", ev.Granted(cell=cell, incarnation=1, **about))
    if done:
        told.tell(cell, ev.Done(**about))


def offer(told: Told, number: int, names: list[str]) -> None:
    told.tell("scheduler", ev.OfferOrdered(cell="cell-1", incarnation=1, lineage=1, step=1))
    told.tell("cell-1", ev.Offered(lineage=1, step=1, number=number, microsteps=names, manifest="g"))


ABOUT: Any = {"lineage": 1, "step": 1, "source": "cell-1", "source_incarnation": 1}


# ---- custody ----


def test_a_new_incarnation_is_accepted_with_a_cut_of_all_before() -> None:
    told = Told().accept("worker-0").tell("worker-0", ev.WorkerReady(slots=1)).tell("worker-0", OPENED, incarnation=2)
    assert custody.accept(told.world(make())) == [ev.Accepted(writer="worker-0", incarnation=2, cut={1: 1})]


def test_the_first_cell_opens_a_lineage_once_for_each_incarnation() -> None:
    told = Told().accept("cell-0", "cell-1").tell("cell-0", ev.CellEntered(state="ready"))
    order = ev.LineageOrdered(cell="cell-0", incarnation=1, lineage=1)
    assert custody.open_lineage(told.world(make())) == [order]
    assert custody.open_lineage(told.tell("scheduler", order).world(make())) == []
    told.tell("cell-0", OPENED, incarnation=2)
    told.tell("scheduler", ev.Accepted(writer="cell-0", incarnation=2, cut={1: 1}))
    told.tell("cell-0", ev.CellEntered(state="ready"), incarnation=2)
    assert custody.open_lineage(told.world(make())) == [ev.LineageOrdered(cell="cell-0", incarnation=2, lineage=2)]


def test_a_satellite_that_is_lost_with_gradients_is_fenced_once() -> None:
    told = in_training()
    grant(told, 1, "cell-1", M0)
    assert custody.fence(told.world(make())) == []
    dead = told.world(make(), dead=["cell-1"])
    order = ev.FenceOrdered(cell="cell-0", incarnation=1, lineage=1, source="cell-1", source_incarnation=1)
    assert custody.fence(dead) == [order]
    told.tell("scheduler", order)
    assert custody.fence(told.world(make(), dead=["cell-1"])) == []
    assert told.world(make(), dead=["cell-1"]).pending == [M1], "until the core has said so"
    told.tell("cell-0", ev.Fenced(lineage=1, source="cell-1", source_incarnation=1))
    assert told.world(make()).pending == [M0, M1]


def test_a_fenced_incarnation_that_comes_back_gets_nothing_and_restarts() -> None:
    told = in_training()
    grant(told, 1, "cell-1", M0)
    told.tell("cell-0", ev.Fenced(lineage=1, source="cell-1", source_incarnation=1))
    world = told.world(make())
    assert world.alive("cell-1")
    for order in microsteps.grant(world):
        assert isinstance(order, ev.Granted)
        assert order.cell == "cell-0"
    assert [(o.cell, o.incarnation) for o in custody.restart(world) if isinstance(o, ev.RestartOrdered)] == [
        ("cell-1", 1)
    ]


def test_a_cell_that_misses_the_deadline_of_its_phase_restarts_once() -> None:
    told = serving()
    told.tell("scheduler", ev.TrainOrdered(cell="cell-0", incarnation=1, lineage=1, step=1, manifest="m0"))
    told.tell("cell-0", ev.CellEntered(state="draining"))
    assert custody.restart(told.world(make(), waiting=19.0)) == []
    order = ev.RestartOrdered(cell="cell-0", incarnation=1, reason="draining passed its deadline")
    assert custody.restart(told.world(make(), waiting=21.0)) == [order]
    assert custody.restart(told.tell("scheduler", order).world(make(), waiting=21.0)) == []


def test_a_core_that_waits_for_executions_that_nobody_serves_starts_again() -> None:
    told = burst(serving(), 2)
    run(told, "g00000-00")
    run(told, "g00000-01")
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"))
    train(told, "cell-0")
    grant(told, 1, "cell-0", M0)
    alone = told.world(make(), dead=["cell-1"], waiting=21.0)
    assert [type(order) for order in custody.restart(alone)] == [ev.RestartOrdered]
    assert custody.restart(told.world(make(), dead=["cell-1"], waiting=1.0)) == []
    assert custody.restart(told.world(make(), waiting=21.0)) == []


# ---- admission ----


def test_a_burst_opens_with_lead_and_burst_groups_and_never_more_than_needed() -> None:
    settings = make(groups_per_step=2, lead_steps=1, steps=1)
    (opened,) = admission.open_burst(serving().world(settings))
    assert isinstance(opened, ev.BurstOpened)
    assert [plan.group for plan in opened.groups] == ["g00000", "g00001"]
    (opened,) = admission.open_burst(serving().world(make(groups_per_step=2, lead_steps=1, steps=9)))
    assert isinstance(opened, ev.BurstOpened)
    assert len(opened.groups) == 4


def test_tasks_come_in_a_permutation_for_each_epoch() -> None:
    world = serving().world(make(tasks=("a", "b", "c", "d")))
    epochs = [[admission.task_of(world, epoch * 4 + i) for i in range(4)] for epoch in range(20)]
    assert all(sorted(epoch) == ["a", "b", "c", "d"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5


def test_a_retry_is_dispatched_again_until_its_attempts_are_used_up() -> None:
    told = burst(serving(), 1, executions=1)
    run(told, "g00000-00", "retry", 1)
    (again,) = admission.dispatch(told.world(make(attempts=2)))
    assert isinstance(again, ev.Dispatched)
    assert again.executions == [ev.Dispatch("g00000-00", 2, "a")]
    run(told, "g00000-00", "retry", 2, reason="it broke")
    excluded = ev.Excluded(execution="g00000-00", reason="attempts used up (it broke)")
    assert admission.dispatch(told.world(make(attempts=2))) == [excluded]


def test_what_a_lost_worker_ran_is_dispatched_again_and_what_it_ended_is_not() -> None:
    told = burst(serving(), 1).accept("worker-1").tell("worker-1", ev.WorkerReady(slots=8))
    run(told, "g00000-00")
    run(told, "g00000-01", None)
    settings = make(workers=("worker-0", "worker-1"))
    assert admission.dispatch(told.world(settings)) == []
    (again,) = admission.dispatch(told.world(settings, dead=["worker-0"]))
    assert isinstance(again, ev.Dispatched)
    assert (again.worker, again.executions) == ("worker-1", [ev.Dispatch("g00000-01", 2, "a")])


@pytest.mark.parametrize("reason", ["image_unavailable: gone", "environment_unhealthy", "grader_failed: no reward"])
def test_a_task_whose_environment_or_grader_fails_in_two_groups_is_set_aside(reason: str) -> None:
    told = burst(serving(), 2, executions=1)
    for group in ("g00000", "g00001"):
        assert admission.set_aside(told.world(make())) == []
        run(told, f"{group}-00", "excluded", reason=reason)
        told.tell("scheduler", ev.Consumed(step=1, group=group, void=True))
    assert [o.task for o in admission.set_aside(told.world(make())) if isinstance(o, ev.TaskSetAside)] == ["a"]


def test_words_of_a_detail_set_no_task_aside() -> None:
    told = burst(serving(), 2, executions=2)
    for group in ("g00000", "g00001"):
        run(told, f"{group}-00", "excluded", reason="no_model_call: the image of the environment was there")
        told.tell(
            "scheduler", ev.Excluded(execution=f"{group}-01", reason="attempts used up (sandbox_failed: /images)")
        )
        told.tell("scheduler", ev.Consumed(step=1, group=group, void=True))
    assert admission.set_aside(told.world(make())) == []


def test_a_task_whose_executions_fail_by_themselves_is_not_set_aside() -> None:
    told = burst(serving(), 2, executions=2)
    for group in ("g00000", "g00001"):
        run(told, f"{group}-00", "excluded", reason="grader_failed")
        run(told, f"{group}-01", "excluded", reason="overall_timeout")
        told.tell("scheduler", ev.Consumed(step=1, group=group, void=True))
    assert admission.set_aside(told.world(make())) == []


def test_the_last_evaluation_has_a_burst_of_its_own_and_the_last_weights() -> None:
    """With steps that are no multiple of mu: the boundary is the last step."""
    settings = make(steps=3, steps_per_burst=2, eval_every=1, eval_tasks=("x",))
    told = serving()
    for number, groups in ((1, range(4)), (2, range(4, 6))):
        plans = [ev.GroupPlan(f"g{i:05d}", "a", 0) for i in groups]
        told.tell("scheduler", ev.BurstOpened(burst=number, lineage=1, version=number - 1, groups=plans))
    for step in (1, 2, 3):
        told.tell("scheduler", *(ev.Consumed(step=step, group=f"g{2 * step - i:05d}") for i in (2, 1)))
        names: Any = {"version": settings.version(step), "weight_version": f"w{step}", "manifest": f"m{step}"}
        told.tell("cell-0", ev.Committed(lineage=1, step=step, checkpointed=True, **names))
    (opened,) = admission.open_burst(told.world(settings))
    assert isinstance(opened, ev.BurstOpened)
    assert [(plan.purpose, plan.task) for plan in opened.groups] == [("eval", "x")]
    told.tell("scheduler", opened)
    refresh = {o.cell: o.weight_version for o in decide_until(told, settings) if isinstance(o, ev.ServeOrdered)}
    assert refresh == {"cell-0": "w3", "cell-1": "w3"}


def decide_until(told: Told, settings: Settings) -> list[ev.Event]:
    said: list[ev.Event] = []
    while orders := decide(told.world(settings)):
        told.tell("scheduler", *orders)
        said += orders
    return said


# ---- routing and roles ----


def test_new_executions_are_routed_by_load_the_longest_serving_first() -> None:
    told = burst(serving(3), 2)
    (routed,) = routing.route(told.world(make(3)))
    assert isinstance(routed, ev.Routed)
    assert routed.routes == {"g00000-00": "cell-2", "g00000-01": "cell-1", "g00001-00": "cell-0", "g00001-01": "cell-2"}


def test_a_cell_leaves_rollout_after_its_executions_were_moved_and_acknowledged() -> None:
    """w = 3 <= C_R - C_e = 4, and a group is ready."""
    told = burst(serving(), 2)
    told.tell("scheduler", *routing.route(told.world(make())))
    run(told, "g00000-00")
    run(told, "g00000-01")
    for name in ("g00001-00", "g00001-01"):
        run(told, name, None)
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"))
    (moved,) = roles.switch(told.world(make()))
    assert isinstance(moved, ev.Routed)
    assert set(moved.routes.values()) == {"cell-1"}
    told.tell("scheduler", moved)
    assert roles.switch(told.world(make())) == [], "the worker has not said that it knows"
    told.tell("worker-0", ev.RoutesAcknowledged(epoch=1, n=told.state.routed[1]))
    (order,) = roles.switch(told.world(make()))
    assert isinstance(order, ev.TrainOrdered)
    assert (order.cell, order.step, order.manifest) == ("cell-0", 1, "m0")


def test_no_cell_leaves_while_the_others_cannot_carry_the_rest() -> None:
    told = burst(serving(), 2)
    run(told, "g00000-00")
    run(told, "g00000-01")
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"))
    assert told.state.waterlevel == 2
    assert roles.switch(told.world(make(cell_room=1))) == []
    assert roles.switch(told.world(make(cell_room=2, mode="colocate"))) == []


def test_colocate_leaves_at_zero() -> None:
    told = burst(serving(), 1)
    run(told, "g00000-00")
    run(told, "g00000-01")
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"))
    (order,) = roles.switch(told.world(make(mode="colocate")))
    assert isinstance(order, ev.TrainOrdered)


def test_async_cells_that_only_train_never_serve() -> None:
    settings = make(3, mode="async", training_cells=1)
    told = Told().accept("worker-0", "cell-0", "cell-1", "cell-2").tell("cell-0", ev.CellEntered(state="ready"))
    told.tell("scheduler", ev.LineageOrdered(cell="cell-0", incarnation=1, lineage=1))
    told.tell("cell-0", ev.LineageOpened(lineage=1, step=0, version=0, weight_version="w0", manifest="m0"))
    burst(told, 1)
    orders = decide_until(told, settings)
    assert [o.cell for o in orders if isinstance(o, ev.TrainOrdered)] == ["cell-0"]
    assert not [o for o in orders if isinstance(o, ev.Routed | ev.ServeOrdered)], "nobody serves yet"


def test_satellites_come_back_when_cells_are_lost() -> None:
    """Three cells; two train, the third dies with work on it: the satellite merges, then serves."""
    settings = make(3, cell_room=8)
    told = burst(serving(3), 3)
    run(told, "g00000-00")
    run(told, "g00000-01")
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"))
    told.tell("processor", ev.MicroStepReady(step=1, microstep=M0, digest="d", tokens=1, targets=1, samples=1))
    train(told, "cell-0", "cell-1")
    grant(told, 1, "cell-1", M0)
    assert microsteps.offer(told.world(settings)) == []
    lost = told.world(settings, dead=["cell-2"])
    assert microsteps.offer(lost) == [ev.OfferOrdered(cell="cell-1", incarnation=1, lineage=1, step=1)]
    assert roles.switch(lost) == [], "its gradients first"
    offer(told, 1, [M0])
    told.tell("cell-0", ev.Merged(number=1, microsteps=[M0], **ABOUT))
    (order,) = roles.switch(told.world(settings, dead=["cell-2"]))
    assert isinstance(order, ev.ServeOrdered)
    assert order.cell == "cell-1"


def test_training_cells_of_a_lost_lineage_serve_while_the_new_core_does() -> None:
    told = in_training()
    told.tell("cell-0", OPENED, incarnation=2)
    told.tell("scheduler", ev.Accepted(writer="cell-0", incarnation=2, cut={1: told.state.seen["cell-0"][1]}))
    told.tell("cell-0", ev.CellEntered(state="ready"), incarnation=2)
    told.tell(
        "cell-0",
        ev.LineageOpened(lineage=2, step=0, version=0, weight_version="x0", manifest="n0"),
        incarnation=2,
    )
    serve(told, "cell-0", "x0", lineage=2, incarnation=2)
    (order,) = roles.switch(told.world(make()))
    assert isinstance(order, ev.ServeOrdered)
    assert (order.cell, order.lineage, order.manifest) == ("cell-1", 2, "n0")


def test_a_redone_step_of_an_earlier_burst_is_trained() -> None:
    """The core fell back behind the newest burst's boundary: its cells stay in training until that is reached."""
    settings = make(steps=9)
    told = serving()
    for number in (1, 2, 3):
        told.tell("scheduler", ev.BurstOpened(burst=number, lineage=1, version=number - 1, groups=[]))
    train(told, "cell-0", step=1)
    assert not told.world(settings).returning("cell-0")
    told.tell(
        "cell-0",
        ev.Committed(lineage=1, step=1, version=1, weight_version="w1", manifest="m1", checkpointed=True),
    )
    assert told.world(settings).returning("cell-0")


# ---- micro-steps ----


def test_bundles_go_to_the_cell_with_the_fewest_one_ahead() -> None:
    told = in_training()
    granted = [o for o in decide_until(told, make()) if isinstance(o, ev.Granted)]
    assert [(o.grant, o.cell, o.microsteps) for o in granted] == [(1, "cell-0", [M0]), (2, "cell-1", [M1])]


def test_a_refused_contribution_is_granted_again_even_to_the_same_cell() -> None:
    told = in_training()
    grant(told, 1, "cell-0", M0)
    grant(told, 2, "cell-1", M1)
    offer(told, 1, [M1])
    told.tell("cell-0", ev.Refused(number=1, reason="pull failed", **ABOUT))
    assert told.world(make()).pending == [M1]
    grant(told, 3, "cell-1", M1)
    world = told.world(make())
    assert world.pending == [], "grant 3 holds it: only grant 2 was refused"
    assert world.unmerged(told.state.lineages[1], "cell-1") == [M1]
    offer(told, 2, [M1])
    told.tell("cell-0", ev.Merged(number=2, microsteps=[M1], **ABOUT))
    (order,) = microsteps.commit(told.world(make()))
    assert isinstance(order, ev.CommitOrdered)
    assert order.microsteps == [M0, M1]


def test_an_offer_is_handed_to_the_core_once() -> None:
    told = in_training()
    grant(told, 1, "cell-1", M0)
    offer(told, 1, [M0])
    (order,) = microsteps.merge(told.world(make()))
    assert isinstance(order, ev.MergeOrdered)
    assert (order.source, order.number, order.microsteps) == ("cell-1", 1, [M0])
    assert microsteps.merge(told.tell("scheduler", order).world(make())) == []


def test_a_step_commits_only_when_its_packed_set_is_merged_and_only_once() -> None:
    told = in_training()
    grant(told, 1, "cell-0", M0)
    assert microsteps.commit(told.world(make())) == []
    grant(told, 2, "cell-0", M1)
    (order,) = microsteps.commit(told.world(make()))
    assert isinstance(order, ev.CommitOrdered)
    assert (order.step, order.executions, order.checkpoint, order.version) == (1, 4, True, 1)
    assert microsteps.commit(told.tell("scheduler", order).world(make())) == []


def test_a_step_without_micro_steps_is_committed_in_training_too() -> None:
    """On devices the core's tensors are elsewhere during rollout."""
    told = burst(serving(), 1, executions=1)
    run(told, "g00000-00")
    told.tell("scheduler", ev.Consumed(step=1, group="g00000"), ev.StepFilled(step=1))
    told.tell("processor", packed([]))
    assert microsteps.commit(told.world(make())) == []
    (order,) = roles.switch(told.world(make()))
    assert isinstance(order, ev.TrainOrdered)
    assert order.cell == "cell-0"
    train(told, "cell-0")
    assert [type(order) for order in microsteps.commit(told.world(make()))] == [ev.CommitOrdered]
    assert roles.switch(told.world(make())) == [], "a satellite has nothing to join for"


# ---- the end ----


def test_a_cancelled_run_stops_and_a_resumed_one_goes_on() -> None:
    told = serving().tell("control", ev.CancelRequested())
    stop, ended = decide(told.world(make()))
    assert (stop, ended) == (
        ev.StopOrdered(reason="cancelled"),
        ev.RunEnded(state="cancelled", reason="gyre cancel"),
    )
    told.tell("scheduler", stop, ended)
    assert decide(told.world(make())) == []
    told.tell("control", ev.ResumeRequested(), incarnation=2).tell("scheduler", OPENED, incarnation=2)
    assert told.state.ended is None
    assert decide(told.world(make())) != []


def test_a_run_whose_trainer_and_engine_come_apart_stops_after_the_step() -> None:
    told = serving()
    told.tell("scheduler", ev.Granted(grant=1, cell="cell-0", incarnation=1, lineage=1, step=1, microsteps=[M0]))
    stats = statistics_of([20, 20], [3e-3, -4e-3])
    told.tell("cell-0", ev.Done(grant=1, lineage=1, step=1, microsteps=[M0], stats=stats))
    strict, lax = make(steps=9, difference_limit=3.5e-3), make(steps=9, difference_limit=3.6e-3)
    assert not any(isinstance(order, ev.RunEnded) for order in decide(told.world(strict)))
    told.tell(
        "cell-0", ev.Committed(lineage=1, step=1, version=1, weight_version="w1", manifest="m1", checkpointed=True)
    )
    stop, ended = decide(told.world(strict))
    assert isinstance(stop, ev.StopOrdered)
    assert isinstance(ended, ev.RunEnded)
    assert ended.state == "failed"
    assert ended.reason.startswith(
        "step 1: trainer and engine differ by 0.00354 for samples of 16-63 targets, over obj"
    )
    for settings in (lax, make(steps=9)):
        assert not any(isinstance(order, ev.RunEnded) for order in decide(told.world(settings)))
