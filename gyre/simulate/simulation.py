"""One simulated run: discrete events around the fold and the decisions that the daemon runs.

Owns simulated time. Every fact and every order is a journal line of the real vocabulary, folded by the real fold; the
scheduler's decisions are those of `scheduling/`. Invariant: the same workload, jobs, plan and seed give the same lines.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.orders import CELL_ORDERS
from gyre.ledger.state import RunState, execution_names
from gyre.scheduling.decide import DECISIONS
from gyre.scheduling.decider import Decider, Decision
from gyre.scheduling.settings import Settings
from gyre.simulate.cell import SimulatedCell, Surroundings
from gyre.simulate.jobs import Job, Jobs
from gyre.simulate.packing import Packing
from gyre.simulate.policies import START_RULES
from gyre.simulate.rollout import Ended, Rollout
from gyre.simulate.turns import TurnRollout
from gyre.simulate.workload import Workload

WORKER = "worker-0"
PHASE_TIMEOUT = 600.0
MANY = 1 << 30
ANSWERS = (ev.Merged, ev.Refused)
TOKENS = 1000.0
"""Tokens sampled for each cell-second of training: only their proportions matter."""


class Line(NamedTuple):
    """A journal line, as the fold reads it; `t` is simulated seconds."""

    writer: str
    incarnation: int
    n: int
    t: float
    event: Any


@dataclass(frozen=True)
class Plan:
    """How the cells are used. `split`: cells that train, in async. `streaming`: groups are packed as they come."""

    mode: str = "elastic"
    split: int = 1
    streaming: bool = True
    probing: bool = False
    """Waiting executions start by the rule `probe` of policies.py."""
    decisions: tuple[Decision, ...] = DECISIONS


class Simulation:
    """`run()` to the end, then read its fields. `keep`: keep all lines (for a ledger, or a comparison)."""

    def __init__(self, workload: Workload, jobs: Jobs, plan: Plan, seed: int = 0, keep: bool = False) -> None:
        self.workload, self.jobs, self.plan = workload, jobs, plan
        self.settings = settings_of(workload, plan)
        self.state = RunState()
        self.decider = Decider(self.state, self.settings, plan.decisions)
        self.lines: list[Line] | None = [] if keep else None
        self.now = 0.0
        self._acts = 0
        self.decisions = 0
        self.timed_out = 0
        self.executions = 0
        self.lost_work = 0.0
        """Training that deadlines have cut off."""
        self.levels: list[tuple[float, int]] = []
        """(time, waterlevel) whenever it changes."""
        self.staleness: list[int] = []
        self.lag: list[int] = []
        """Of each group that was trained: in versions, and in optimizer steps."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.lines_said: dict[tuple[str, int], int] = {}
        """(writer, incarnation) -> how many lines."""
        self._news = False
        self._job: dict[str, Job] = {}
        self._work: dict[str, float] = {}
        self._number: dict[str, int] = {}
        self._since: dict[str, tuple[object, float]] = {}
        self._dead: set[str] = set()
        self._worker = 1
        """The worker's incarnation."""
        self._down = False
        """Is the whole job preempted?"""
        self.preemptions = 0
        rule = START_RULES["probe" if plan.probing else "order"]
        cells = self.settings.cells
        self._turns = TurnRollout(workload.cells, workload.turns, cells, rule, seed) if workload.turns.seconds else None
        self.rollout = self._turns or Rollout(workload.cells, cells, rule, self._alarm)
        self.packing = Packing(workload.training.microstep, plan.streaming)
        around = Surroundings(
            say=self.say,
            later=self.later,
            now=lambda: self.now,
            serve=self._serve,
            open=self._open,
            seconds_of=lambda name: self.packing.seconds[name],
            newest=self._newest,
        )
        self.cells = {
            name: SimulatedCell(name, workload.cells, workload.training, around) for name in self.settings.cells
        }
        self._dice = random.Random(f"{seed}/failures")

    # ---- time ----

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self.now + seconds, act)

    def _at(self, t: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (t, self._order, act))

    def run(self) -> Simulation:
        """Raises RuntimeError when nothing can happen any more before the last step: the policy has deadlocked."""
        self._start()
        while self.state.ended is None:
            self._decide()
            if self.state.ended is not None:
                break
            if self._turns is not None and self._take_turns(self._turns):
                continue
            if not self._queue:
                raise RuntimeError(f"deadlock at {self.now:.0f} s: {self._where()}")
            self.now = self._queue[0][0]
            while self._queue and self._queue[0][0] <= self.now:
                self._acts += 1
                heapq.heappop(self._queue)[2]()
        return self

    def _take_turns(self, turns: TurnRollout) -> bool:
        """Turns up to the next event of another kind. Has an execution ended before it?"""
        self.now, ended = turns.run(self._queue[0][0] if self._queue else math.inf)
        for each in ended:
            self._finished(each, each.running.job.timed_out)
        if ended:
            self._admit()
        return bool(ended)

    @property
    def events(self) -> int:
        """Taken from the queue: ends of phases, micro-steps, executions, deadlines, and of generations and tools."""
        return self._acts + (self._turns.events if self._turns is not None else 0)

    @property
    def calls(self) -> int:
        return self._turns.calls if self._turns is not None else 0

    @property
    def seconds(self) -> float:
        """Until the last step was committed."""
        lineage = self.state.reign()
        return max(lineage.t_committed.values()) if lineage is not None and lineage.t_committed else self.now

    # ---- the ledger ----

    def say(self, writer: str, incarnation: int, event: ev.Event) -> int:
        n = self.lines_said.get((writer, incarnation), 0)
        self.lines_said[writer, incarnation] = n + 1
        line = Line(writer, incarnation, n, self.now, event)
        fold(self.state, line)
        self.decider.folded(writer, event)
        self._news = True
        if self.lines is not None:
            self.lines.append(line)
        if isinstance(event, ANSWERS):
            cell = self.cells[event.source]
            if cell.incarnation == event.source_incarnation:
                self._order_cell(event.source, event.source_incarnation, event)
        return n

    def _decide(self) -> None:
        if not self._news:
            return
        self._news = False
        while orders := self.decider.decide():
            self.decisions += len(orders)
            for order in orders:
                n = self.say("scheduler", 1, order)
                self._carry_out(order, n)
            if self.decider.waiting:  # what was ordered just now has not waited at all: measure again
                self.decider.look(frozenset(self._dead), self._waiting())
        self._news = False

    def _carry_out(self, order: ev.Event, n: int) -> None:
        """What an order sets going. Orders act after the ledger's latency."""
        if isinstance(order, CELL_ORDERS):
            self._order_cell(order.cell, order.incarnation, order)
        elif isinstance(order, ev.Dispatched):
            self._soon(lambda: self._dispatch(order))
        elif isinstance(order, ev.Routed):
            self._soon(lambda: self._route(order, n))
        elif isinstance(order, ev.BurstOpened):
            self._plan(order)
        elif isinstance(order, ev.Consumed):
            self._soon(lambda: self._consume(order))
        elif isinstance(order, ev.StepFilled):
            self._soon(lambda: self._end_step(order.step))
        elif isinstance(order, ev.RestartOrdered):
            self._soon(lambda: self._lose(order.cell, order.incarnation))

    def _soon(self, act: Callable[[], None]) -> None:
        self.later(self.workload.cells.latency, act)

    def _order_cell(self, name: str, incarnation: int, order: ev.Event) -> None:
        def deliver() -> None:
            cell = self.cells[name]
            if cell.incarnation == incarnation and name not in self._dead:
                cell.obey(order)

        self._soon(deliver)

    def _start(self) -> None:
        self.say("scheduler", 1, ev.Opened(pid=1, pid_start=0.0, host="simulated", code=""))
        self.say("scheduler", 1, ev.Accepted(writer="scheduler", incarnation=1))
        self._start_worker()
        self._next_preemption()
        for cell in self.cells.values():
            cell.start()
            self._next_loss(cell.name)

    def _start_worker(self) -> None:
        self._work_said(ev.Opened(pid=1, pid_start=0.0, host="simulated", code=""))
        self._work_said(ev.WorkerReady(slots=MANY))

    def _work_said(self, event: ev.Event) -> None:
        self.say(WORKER, self._worker, event)

    # ---- executions ----

    def _plan(self, burst: ev.BurstOpened) -> None:
        for plan in burst.groups:
            number = self._number[plan.group] = len(self._number)
            self.rollout.plan(plan.group, burst.burst, plan.executions)
            for name, job in zip(execution_names(plan), self.jobs.group(number), strict=True):
                self._job[name] = job
        self.levels.append((self.now, self.state.waterlevel))

    def _dispatch(self, order: ev.Dispatched) -> None:
        if order.incarnation != self._worker or self._down:
            return
        for each in order.executions:
            group = self.state.executions[each.execution].group
            self.rollout.dispatch(each.execution, each.attempt, group, self._job[each.execution])
        self._admit()

    def _admit(self) -> None:
        for begun in self.rollout.admit(self.now):
            self._work_said(ev.Started(execution=begun.name, attempt=begun.attempt))
            if self.workload.executions.timeout_clock == "wall":
                name, attempt = begun.name, begun.attempt
                self.later(self.workload.executions.timeout, lambda n=name, a=attempt: self._deadline(n, a))  # type: ignore[misc]

    def _route(self, order: ev.Routed, n: int) -> None:
        for name, cell in order.routes.items():
            if name in self.state.open:
                self.rollout.route(name, cell, self.now)
        self._work_said(ev.RoutesAcknowledged(epoch=1, n=n))

    def _serve(self, cell: str, serving: bool) -> None:
        self.rollout.serve(cell, serving, self.now)

    def _open(self, cell: str, is_open: bool) -> None:
        self.rollout.open(cell, is_open, self.now)
        self._admit()

    def _alarm(self, at: float, cell: str, stamp: int) -> None:
        self._at(at, lambda: self._due(cell, stamp))

    def _due(self, cell: str, stamp: int) -> None:
        ended = self.rollout.due(cell, stamp, self.now)
        for each in ended:
            self._finished(each, each.running.job.timed_out)
        if ended:
            self._admit()

    def _deadline(self, name: str, attempt: int) -> None:
        ended = self.rollout.deadline(name, attempt, self.now)
        if ended is not None:
            self._finished(ended, True)
            self._admit()

    def _finished(self, ended: Ended, timed_out: bool) -> None:
        name, job = ended.running.name, ended.running.job
        work = job.work * ended.share**self.workload.training.exponent if job.graded else 0.0
        self.executions += 1
        self.timed_out += timed_out
        self.lost_work += job.work - work if job.graded else 0.0
        self._work[name] = work
        self._work_said(
            ev.Finished(
                execution=name,
                attempt=ended.running.attempt,
                outcome="graded" if job.graded else "excluded",
                reward=0.0 if job.graded else None,
                timed_out=timed_out,
                tokens_sampled=round(TOKENS * work),
                seconds=ended.seconds,
            ),
        )
        self.levels.append((self.now, self.state.waterlevel))

    # ---- the processor ----

    def _consume(self, order: ev.Consumed) -> None:
        group = self.state.groups[order.group]
        names = list(execution_names(group.plan))
        self.rollout.consumed(order.group)
        works = [self._work.pop(name, 0.0) for name in names]
        for name in names:
            self._job.pop(name, None)
        if not order.void:
            trained = self.settings.burst_of(order.step) - 1
            self.staleness.append(trained - group.version)
            self.lag.append(order.step - 1 - group.version * self.settings.steps_per_burst)
            self._announce(order.step, self.packing.add(order.step, works))

    def _announce(self, step: int, names: list[str]) -> None:
        for name in names:
            event = ev.MicroStepReady(step=step, microstep=name, digest="", tokens=0, targets=0, samples=0)
            self.say("processor", 1, event)

    def _end_step(self, step: int) -> None:
        self._announce(step, self.packing.end(step))
        found = self.state.steps[step]
        executions = sum(len(self.state.graded(c.group)) for c in found.consumed if not c.void)
        self.say(
            "processor",
            1,
            ev.Packed(
                step=step,
                microsteps=list(found.microsteps),
                executions=executions,
                tokens_sampled=0,
                tokens_trained=0,
                tokens_dropped={},
            ),
        )

    # ---- losses ----

    def _newest(self) -> tuple[int, int, str]:
        kept = [(step, commit) for step, (_, commit) in self.state.history().items() if commit.checkpointed]
        if not kept:
            return 0, 0, "0.0-0000000000000000"
        step, commit = kept[-1]
        return step, commit.version, commit.weight_version

    def _next_loss(self, name: str) -> None:
        if self.workload.failures.between > 0.0:
            incarnation = self.cells[name].incarnation
            self.later(
                self._dice.expovariate(1.0 / self.workload.failures.between), lambda: self._lose(name, incarnation)
            )

    def _lose(self, name: str, incarnation: int) -> None:
        cell = self.cells[name]
        if cell.incarnation != incarnation or name in self._dead:
            return
        cell.fail()
        self._dead.add(name)
        self._look()
        self.later(self.workload.failures.restart, lambda: self._back(name))
        self.later(PHASE_TIMEOUT + 1.0, self._look)

    def _next_preemption(self) -> None:
        if self.workload.failures.preemption > 0.0:
            self.later(self._dice.expovariate(1.0 / self.workload.failures.preemption), self._preempt)

    def _preempt(self) -> None:
        self.preemptions += 1
        self._down = True
        for name in self.settings.cells:
            if name not in self._dead:
                self.cells[name].fail()
                self._dead.add(name)
        self.rollout.clear(self.now)
        self._look()
        self.later(self.workload.failures.requeue, self._requeued)

    def _requeued(self) -> None:
        self._down = False
        self._worker += 1
        self._start_worker()
        for name in sorted(self._dead):
            self._back(name)
        self._next_preemption()

    def _back(self, name: str) -> None:
        if self._down or name not in self._dead:
            return
        self._dead.discard(name)
        self.cells[name].start()
        self._look()
        self._next_loss(name)
        self.later(PHASE_TIMEOUT + 1.0, self._look)

    def _look(self) -> None:
        """The scheduler's clock: who is dead, and how long each cell has been in its state."""
        self.decider.look(frozenset(self._dead), self._waiting())
        self._news = True

    def _waiting(self) -> dict[str, float]:
        for name in self.settings.cells:
            found = self.state.cell(name)
            moment = (self.state.roles.get(name), found and (found.state, found.serving, found.training))
            if name not in self._since or self._since[name][0] != moment:
                self._since[name] = (moment, self.now)
        return {name: self.now - at for name, (_, at) in self._since.items()}

    def _where(self) -> str:
        cells = ", ".join(f"{name} {cell.state}" for name, cell in self.cells.items())
        return f"step {self.decider.world().step}, {self.state.waterlevel} executions open, {cells}"


def settings_of(workload: Workload, plan: Plan) -> Settings:
    schedule, cells, group = workload.schedule, workload.cells, workload.group
    return Settings(
        seed=0,
        mode=plan.mode,
        executions=group.executions,
        groups_per_step=group.groups_per_step,
        min_graded=group.min_graded,
        steps=workload.steps,
        steps_per_burst=schedule.steps_per_burst,
        lead_steps=schedule.lead_steps,
        max_overtake=schedule.max_overtake,
        cell_room=max(1, round(schedule.room * cells.executions_per_cell)),
        training_cells=plan.split,
        cells=tuple(f"cell-{index}" for index in range(cells.count)),
        workers=(WORKER,),
        attempts=MANY,
        microsteps_per_grant=workload.training.microsteps_per_grant,
        checkpoint_every=1,
        phase_timeout=PHASE_TIMEOUT,
        tasks=tuple(f"task-{index}" for index in range(16)),
    )
