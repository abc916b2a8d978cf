"""What must hold at every order of the scheduler, at every pause of it, and over a whole history."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gyre.ledger import events as ev
from gyre.ledger.state import RunState
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

from .world import SchedulerProc, Sim


class Laws:
    """Watches one history. Use as `Sim(..., watch=laws.order, calm=laws.calm)`, then `laws.whole(state)`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.low = 0
        self.sim: Sim | None = None

    # ---- at each order, before it is folded ----

    def order(self, sim: Sim, state: RunState, event: Any) -> None:
        self.sim = sim
        check = getattr(self, "_" + type(event).__name__, None)
        if check is not None:
            check(sim, state, event)

    def _world(self, sim: Sim, state: RunState) -> World:
        return World(state, self.settings, sim.dead(), {})

    def _BurstOpened(self, sim: Sim, state: RunState, event: ev.BurstOpened) -> None:
        plans = [plan for plan in event.groups if plan.purpose == "train"]
        bound = (self.settings.lead_steps + self.settings.steps_per_burst) * self.settings.groups_per_step
        assert len(state.outstanding) + len(plans) <= bound
        assert state.planned + len(plans) <= self.settings.steps * self.settings.groups_per_step
        assert event.burst == max(state.bursts, default=0) + 1
        assert event.version == min(event.burst - 1, self.settings.bursts)
        self.low = state.waterlevel + sum(plan.executions for plan in event.groups)

    def _Dispatched(self, sim: Sim, state: RunState, event: ev.Dispatched) -> None:
        for dispatch in event.executions:
            execution = state.executions[dispatch.execution]
            assert not execution.terminal(), f"{dispatch} is dispatched again, and it has ended"
            assert dispatch.attempt == execution.last() + 1
            assert sum(a.finished is not None for a in execution.attempts.values()) < self.settings.attempts
        running = sum(
            1
            for name in state.open
            for attempt in state.executions[name].attempts.values()
            if (attempt.worker, attempt.incarnation) == (event.worker, event.incarnation) and attempt.finished is None
        )
        assert running + len(event.executions) <= sim.slots

    def _Consumed(self, sim: Sim, state: RunState, event: ev.Consumed) -> None:
        group = state.groups[event.group]
        assert group.plan.purpose == "train"
        assert event.group not in state.consumed
        assert state.group_terminal(event.group)
        assert event.void == (len(state.graded(event.group)) < self.settings.min_graded)
        phi, mu = self.settings.lead_steps, self.settings.steps_per_burst
        assert event.step <= (group.burst - 1) * mu + phi + mu
        assert self.settings.burst_of(event.step) - 1 - group.version <= -(-phi // mu)

    def _Granted(self, sim: Sim, state: RunState, event: ev.Granted) -> None:
        lineage = state.lineages[event.lineage]
        world = self._world(sim, state)
        assert event.grant == state.granted + 1
        assert (event.lineage, event.step) == (max(state.lineages), lineage.step() + 1)
        assert event.incarnation == state.incarnation(event.cell)
        assert (event.cell, event.incarnation) not in world.fenced
        found = state.cell(event.cell)
        assert found is not None
        assert found.training == (event.lineage, event.step)
        assert set(event.microsteps) <= set(state.steps[event.step].microsteps)
        assert not world.merged & set(event.microsteps)
        for other in state.steps[event.step].grants:
            if other.lineage == event.lineage and set(other.microsteps) & set(event.microsteps):
                assert other.grant in world.lost

    def _TrainOrdered(self, sim: Sim, state: RunState, event: ev.TrainOrdered) -> None:
        world = self._world(sim, state)
        before = world.role_order(event.cell)
        others = [cell for cell in self.settings.cells if cell != event.cell]
        if isinstance(before, ev.TrainOrdered):
            return  # no switch: the next step, or the next lineage
        assert all(world.settled(cell) for cell in others if world.alive(cell)), "one switch at a time"
        assert not any(state.routes.get(name) == event.cell for name in state.open)
        for name in state.open:
            for attempt in state.executions[name].attempts.values():
                running = attempt.finished is None and attempt.worker not in world.dead
                if running and attempt.incarnation == state.incarnation(attempt.worker):
                    said = state.acknowledged.get(attempt.worker, {}).get(attempt.incarnation, (0, -1))
                    assert said >= state.routed
        if self.settings.mode == "async":
            assert event.cell in self.settings.cells[: self.settings.training_cells]
            return
        serving = [cell for cell in others if world.alive(cell) and not world.training(cell)]
        room = self.settings.cell_room * len(serving) if self.settings.mode == "elastic" else 0
        assert state.waterlevel <= room
        earlier = self.settings.cells[: self.settings.cells.index(event.cell)]
        assert all(world.training(cell) for cell in earlier if world.alive(cell)), "training cells are a prefix"

    def _ServeOrdered(self, sim: Sim, state: RunState, event: ev.ServeOrdered) -> None:
        world = self._world(sim, state)
        before = world.role_order(event.cell)
        if self.settings.mode == "async":
            assert event.cell not in self.settings.cells[: self.settings.training_cells]
        if not isinstance(before, ev.TrainOrdered) or before.lineage != event.lineage:
            return  # an update of weights, or a lineage that is over
        later = self.settings.cells[self.settings.cells.index(event.cell) + 1 :]
        assert not any(world.training(cell) for cell in later), "satellites go back in reverse order"
        assert not world.unfinished(event.cell)

    def _CommitOrdered(self, sim: Sim, state: RunState, event: ev.CommitOrdered) -> None:
        lineage = state.lineages[event.lineage]
        core = state.cells[lineage.cell][lineage.incarnation]
        own = [
            m for d in core.done.values() if (d.lineage, d.step) == (event.lineage, event.step) for m in d.microsteps
        ]
        merged = own + [m for found in lineage.merged if found.step == event.step for m in found.microsteps]
        packed = state.steps[event.step].packed
        assert packed is not None
        assert sorted(merged) == sorted(event.microsteps) == sorted(packed.microsteps)
        assert event.step == lineage.step() + 1

    # ---- when the scheduler has nothing more to say ----

    def calm(self, sim: Sim, world: World) -> None:
        state = world.state
        assert state.waterlevel <= self.low or not state.bursts
        self.low = state.waterlevel
        able = [cell for cell in self.settings.cells if world.will_serve(cell)]
        if able:
            assert all(state.routes.get(name) in able for name in state.open)

    # ---- over the whole history ----

    def whole(self, state: RunState) -> None:
        settings = self.settings
        steps = range(1, settings.steps + 1)
        assert state.ended == ev.RunEnded(state="finished")
        assert not state.open
        trained = [name for name, group in state.groups.items() if group.plan.purpose == "train"]
        assert sorted(state.consumed) == sorted(trained)
        assert [len(state.steps[step].consumed) for step in steps] == [settings.groups_per_step] * settings.steps
        assert all(state.steps[step].filled and state.steps[step].packed for step in steps)
        self._overtaking(state)
        for lineage in state.lineages.values():
            first = lineage.opened.step
            assert list(lineage.committed) == list(range(first + 1, first + 1 + len(lineage.committed)))
        assert [step for step, _ in state.history().items()][-1:] == [settings.steps] or (
            state.lineages[max(state.lineages)].opened.step == settings.steps
        )
        tally = Counter(execution.verdict() for execution in state.executions.values())
        assert (state.tally.graded, state.tally.excluded) == (tally["graded"], tally["excluded"])
        assert set(state.routes) <= {n for n, e in state.executions.items() if e.purpose == "eval"}

    def _overtaking(self, state: RunState) -> None:
        consumed = [c.group for step in sorted(state.steps) for c in state.steps[step].consumed]
        orders = [state.groups[name].order for name in consumed]
        for position, order in enumerate(orders):
            overtaken = sum(1 for other in orders[:position] if other > order)
            assert overtaken == state.groups[consumed[position]].overtaken <= self.settings.max_overtake


def scheduler_state(sim: Sim) -> RunState:
    """What the live scheduler knows at the end."""
    proc = sim.procs["scheduler"]
    assert isinstance(proc, SchedulerProc)
    return proc.state
