"""The fold: journal lines in, `RunState` out.

Owns the meaning of every event. Invariant: the result is the same for every interleaving of the journals that keeps
each writer's order. A line beyond its writer's cut never counts; when a cut arrives after such a line was folded,
`LateCut` tells the reader to fold again from the start with the cuts known (`fold_all` does just that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from gyre.ledger import events as ev
from gyre.ledger.state import (
    Acceptance,
    Attempt,
    Burst,
    CellIncarnation,
    Contribution,
    Execution,
    Group,
    Lineage,
    RunState,
    Step,
    execution_names,
)


class Line(Protocol):
    @property
    def writer(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def t(self) -> float: ...
    @property
    def event(self) -> Any: ...


class LateCut(Exception):
    """Lines that do not count were folded before that was known: fold again, from `afresh(state)`."""


def counts(state: RunState, line: Line) -> bool:
    """Is this line news that counts? No beyond its writer's cut, and no when it was folded before."""
    if line.n <= state.seen.get(line.writer, _NONE).get(line.incarnation, -1):
        return False
    return line.n <= _last_counted(state, line.writer, line.incarnation, line.n)


_NONE: dict[int, int] = {}


def _last_counted(state: RunState, writer: str, incarnation: int, otherwise: int) -> int:
    if incarnation >= state.accepted.get(writer, 0):
        return otherwise
    return state.cuts.get(writer, _NONE).get(incarnation, -1)


def fold(state: RunState, line: Line) -> bool:
    """Fold one line into `state`, if it counts. Raises LateCut, and leaves `state` fit for `afresh` only."""
    if not counts(state, line):
        return False
    seen = state.seen.get(line.writer)
    if seen is None:
        seen = state.seen[line.writer] = {}
    seen[line.incarnation] = line.n
    if line.t:
        state.t_first = min(state.t_first or line.t, line.t)
        state.t_last = max(state.t_last, line.t)
    handler = _HANDLERS.get(type(line.event))
    if handler is not None:
        handler(state, line)
    return True


def fold_all(lines: Iterable[Line]) -> RunState:
    """The state of a whole set of lines, in any order that keeps each incarnation's own order."""
    kept = list(lines)
    state = RunState()
    while True:
        try:
            for line in kept:
                fold(state, line)
            return state
        except LateCut:
            state = afresh(state)


def afresh(state: RunState) -> RunState:
    """An empty state that knows all cuts of `state`: what to fold into after a LateCut."""
    fresh = RunState(acceptances=state.acceptances)
    _cut(fresh)
    return fresh


def _accepted(state: RunState, line: Line) -> None:
    event: ev.Accepted = line.event
    made = Acceptance(line.incarnation, line.n, event.writer, event.incarnation, event.cut)
    if made in state.acceptances:
        return  # known from before a LateCut
    before = [(w, i, state.cuts[w].get(i, -1)) for w, newest in state.accepted.items() for i in range(1, newest)]
    state.acceptances = sorted([*state.acceptances, made], key=_place)
    _cut(state)
    for writer, seen in state.seen.items():
        if any(n > _last_counted(state, writer, incarnation, n) for incarnation, n in seen.items()):
            raise LateCut(writer)
    if any(_last_counted(state, writer, incarnation, _NO_LIMIT) > n for writer, incarnation, n in before):
        raise LateCut("lines were passed over on the word of a scheduler that was cut itself")


def _place(acceptance: Acceptance) -> tuple[int, int]:
    return acceptance.epoch, acceptance.n


def _cut(state: RunState) -> None:
    """Derive who is accepted, and the cuts, from the acceptances that stand.

    The newest scheduler has the last word on the schedulers before it; what they accepted beyond that never counts. For
    the others, what any scheduler refused never counts.
    """
    epochs = [a for a in state.acceptances if a.writer == SCHEDULER]
    newest = max(epochs, key=lambda a: a.incarnation, default=None)
    if newest is not None:
        limits = {**newest.cut, newest.incarnation: _NO_LIMIT}
        state.acceptances = [
            a
            for a in state.acceptances
            if a.n <= limits.get(a.epoch, -1 if a.epoch < newest.incarnation else _NO_LIMIT)
        ]
    state.accepted, state.cuts = {}, {}
    for a in state.acceptances:
        state.accepted[a.writer] = max(a.incarnation, state.accepted.get(a.writer, 0))
        cuts = state.cuts.setdefault(a.writer, {})
        for incarnation, n in a.cut.items():
            cuts[incarnation] = min(n, cuts.get(incarnation, n))
    if newest is not None:
        state.cuts[SCHEDULER] = dict(newest.cut)


SCHEDULER = "scheduler"
_NO_LIMIT = 1 << 62


def _opened(state: RunState, line: Line) -> None:
    state.opened.setdefault(line.writer, {})[line.incarnation] = line.event


def _step(state: RunState, step: int) -> Step:
    found = state.steps.get(step)
    if found is None:
        found = state.steps[step] = Step()
    return found


def _execution(state: RunState, name: str) -> Execution:
    found = dict.get(state.executions, name)
    if found is None and name.rpartition("-")[0] in state.consumed:
        found = state.executions.get(name)  # it may lie settled in a snapshot (ledger/snapshot.py)
    if found is None:
        found = state.executions[name] = Execution()
    return found


def _attempt(execution: Execution, number: int) -> Attempt:
    found = execution.attempts.get(number)
    if found is None:
        found = execution.attempts[number] = Attempt()
    return found


def _burst_opened(state: RunState, line: Line) -> None:
    event: ev.BurstOpened = line.event
    state.bursts[event.burst] = Burst(event.lineage, event.version, [plan.group for plan in event.groups], line.t)
    for plan in event.groups:
        state.groups[plan.group] = Group(plan, event.burst, event.lineage, event.version, order=len(state.groups))
        if plan.purpose == "train":
            state.planned += 1
            state.outstanding[plan.group] = len(state.groups) - 1
        for name in execution_names(plan):
            execution = _execution(state, name)
            before = _lift(state, name, execution)
            execution.group, execution.task, execution.purpose = plan.group, plan.task, plan.purpose
            _settle(state, name, execution, before)


def _dispatched(state: RunState, line: Line) -> None:
    event: ev.Dispatched = line.event
    for dispatch in event.executions:
        execution = _execution(state, dispatch.execution)
        before = _lift(state, dispatch.execution, execution)
        attempt = _attempt(execution, dispatch.attempt)
        attempt.worker, attempt.incarnation, attempt.epoch = event.worker, event.incarnation, line.incarnation
        _settle(state, dispatch.execution, execution, before)


def _started(state: RunState, line: Line) -> None:
    attempt = _attempt(_execution(state, line.event.execution), line.event.attempt)
    attempt.started, attempt.t_started = True, line.t


def _finished(state: RunState, line: Line) -> None:
    event: ev.Finished = line.event
    execution = _execution(state, event.execution)
    before = _lift(state, event.execution, execution)
    attempt = _attempt(execution, event.attempt)
    attempt.finished, attempt.t_finished = event, line.t
    state.tally.tokens_sampled += event.tokens_sampled
    state.tally.ends[event.kind] = state.tally.ends.get(event.kind, 0) + 1
    _settle(state, event.execution, execution, before)


def _excluded(state: RunState, line: Line) -> None:
    execution = _execution(state, line.event.execution)
    before = _lift(state, line.event.execution, execution)
    execution.excluded = line.event.reason
    _settle(state, line.event.execution, execution, before)


def _lift(state: RunState, name: str, execution: Execution) -> ev.Outcome | None:
    """Before a change of an execution: out of `live.waiting` and `live.running`. Returns what it counted as."""
    if name in state.open:
        state.live.waiting.discard(name)
        for number, attempt in execution.attempts.items():
            if attempt.incarnation and attempt.finished is None:
                incarnations = state.live.running[attempt.worker]
                there = incarnations[attempt.incarnation]
                there.remove((name, number))
                if not there:
                    del incarnations[attempt.incarnation]
                    if not incarnations:
                        del state.live.running[attempt.worker]
    return execution.verdict()


def _settle(state: RunState, name: str, execution: Execution, before: ev.Outcome | None) -> None:
    """After a change of an execution: is it open, and what does it count as? Whichever of its lines came first."""
    now = execution.verdict()
    if now != before:
        for verdict, sign in ((before, -1), (now, 1)):
            if verdict == "graded":
                state.tally.graded += sign
            elif verdict == "excluded":
                state.tally.excluded += sign
    if now is not None:
        if name in state.open:
            state.open.remove(name)
            _off(state.live.routed, state.routes.get(name, ""), name)
            _count(state, execution.group, -1)
    elif execution.group:
        if name not in state.open:
            state.open.add(name)
            _on(state.live.routed, state.routes.get(name, ""), name)
            _count(state, execution.group, 1)
        _lay(state, name, execution)


def _lay(state: RunState, name: str, execution: Execution) -> None:
    """An open execution: into `live.waiting` and `live.running`."""
    for number, attempt in execution.attempts.items():
        if attempt.incarnation and attempt.finished is None:
            there = state.live.running.setdefault(attempt.worker, {}).setdefault(attempt.incarnation, set())
            there.add((name, number))
    last = execution.last()
    if not last or execution.attempts[last].finished is not None:
        state.live.waiting.add(name)


def _count(state: RunState, group: str, change: int) -> None:
    left = state.live.groups.get(group, 0) + change
    if left:
        state.live.groups[group] = left
    else:
        del state.live.groups[group]


def _on(sets: dict[str, set[str]], key: str, name: str) -> None:
    there = sets.get(key)
    if there is None:
        there = sets[key] = set()
    there.add(name)


def _off(sets: dict[str, set[str]], key: str, name: str) -> None:
    there = sets[key]
    there.remove(name)
    if not there:
        del sets[key]


def _route(state: RunState, name: str, cell: str) -> None:
    """A new route of an execution; "" for none."""
    if name in state.open:
        _off(state.live.routed, state.routes.get(name, ""), name)
        _on(state.live.routed, cell, name)
    state.routes[name] = cell


def _routed(state: RunState, line: Line) -> None:
    event: ev.Routed = line.event
    for name, cell in event.routes.items():
        _route(state, name, cell)
    state.routed = max(state.routed, (line.incarnation, line.n))


def _acknowledged(state: RunState, line: Line) -> None:
    event: ev.RoutesAcknowledged = line.event
    state.acknowledged.setdefault(line.writer, {})[line.incarnation] = (event.epoch, event.n)


def _worker_ready(state: RunState, line: Line) -> None:
    state.slots.setdefault(line.writer, {})[line.incarnation] = line.event.slots


def _consumed(state: RunState, line: Line) -> None:
    event: ev.Consumed = line.event
    state.consumed[event.group] = event.step
    _step(state, event.step).consumed.append(event)
    if event.void:
        state.void.append(event.group)
    order = state.outstanding.pop(event.group)
    for name, older in state.outstanding.items():
        if older < order:
            state.groups[name].overtaken += 1
    for name in execution_names(state.groups[event.group].plan):
        if name in state.routes:
            _route(state, name, "")
            del state.routes[name]


def _filled(state: RunState, line: Line) -> None:
    _step(state, line.event.step).filled = True


def _flushed(state: RunState, line: Line) -> None:
    step = _step(state, line.event.step)
    step.flushes.append(len(step.consumed))


def _microstep_ready(state: RunState, line: Line) -> None:
    _step(state, line.event.step).microsteps[line.event.microstep] = line.event


def _packed(state: RunState, line: Line) -> None:
    _step(state, line.event.step).packed = line.event


def _granted(state: RunState, line: Line) -> None:
    state.granted = max(state.granted, line.event.grant)
    _step(state, line.event.step).grants.append(line.event)


def _role_ordered(state: RunState, line: Line) -> None:
    state.roles[line.event.cell] = line.event
    state.t_roles[line.event.cell] = line.t


def _cell(state: RunState, line: Line) -> CellIncarnation:
    incarnations = state.cells.setdefault(line.writer, {})
    found = incarnations.get(line.incarnation)
    if found is None:
        found = incarnations[line.incarnation] = CellIncarnation(t=line.t)
    return found


def _cell_entered(state: RunState, line: Line) -> None:
    cell = _cell(state, line)
    cell.history.append((cell.state, line.event.seconds, line.t))
    cell.state, cell.t = line.event.state, line.t
    cell.training = (line.event.lineage, line.event.step) if line.event.state == "training" else (0, 0)


def _serving(state: RunState, line: Line) -> None:
    _cell(state, line).serving = line.event


def _serving_ended(state: RunState, line: Line) -> None:
    _cell(state, line).serving = None


def _pulled(state: RunState, line: Line) -> None:
    _cell(state, line).pulled.append(line.event)


def _done(state: RunState, line: Line) -> None:
    event: ev.Done = line.event
    cell = _cell(state, line)
    if cell.buffer and (cell.done[cell.buffer[0]].lineage, cell.done[cell.buffer[0]].step) != (
        event.lineage,
        event.step,
    ):
        cell.buffer = []
    cell.done[event.grant] = event
    cell.buffer.append(event.grant)
    lineage = state.lineages.get(event.lineage)
    if lineage is not None and (lineage.cell, lineage.incarnation) == (line.writer, line.incarnation):
        lineage.sequence.append(("done", event.grant))


def _offered(state: RunState, line: Line) -> None:
    event: ev.Offered = line.event
    cell = _cell(state, line)
    cell.offers[event.number] = Contribution(
        event.lineage, event.step, event.number, event.microsteps, event.manifest, cell.buffer
    )
    cell.buffer = []


def _lineage_opened(state: RunState, line: Line) -> None:
    state.lineages[line.event.lineage] = Lineage(line.writer, line.incarnation, line.event, line.t)


def _merged(state: RunState, line: Line) -> None:
    lineage = state.lineages[line.event.lineage]
    lineage.sequence.append(("merged", len(lineage.merged)))
    lineage.merged.append(line.event)


def _refused(state: RunState, line: Line) -> None:
    state.lineages[line.event.lineage].refused.append(line.event)


def _fenced(state: RunState, line: Line) -> None:
    state.lineages[line.event.lineage].fenced.append(line.event)


def _committed(state: RunState, line: Line) -> None:
    lineage = state.lineages[line.event.lineage]
    lineage.committed[line.event.step] = line.event
    lineage.t_committed[line.event.step] = line.t


def _checkpointed(state: RunState, line: Line) -> None:
    committed = state.lineages[line.event.lineage].committed
    committed[line.event.step] = msgspec.structs.replace(committed[line.event.step], checkpointed=True)


def _ended(state: RunState, line: Line) -> None:
    state.ends[line.incarnation] = line.event


def _cancel(state: RunState, line: Line) -> None:
    state.asked[line.incarnation] = line.event


_HANDLERS: dict[type, Callable[[RunState, Any], None]] = {
    ev.Accepted: _accepted,
    ev.Opened: _opened,
    ev.BurstOpened: _burst_opened,
    ev.Dispatched: _dispatched,
    ev.Started: _started,
    ev.Finished: _finished,
    ev.Excluded: _excluded,
    ev.Routed: _routed,
    ev.RoutesAcknowledged: _acknowledged,
    ev.WorkerReady: _worker_ready,
    ev.Consumed: _consumed,
    ev.StepFilled: _filled,
    ev.Flushed: _flushed,
    ev.MicroStepReady: _microstep_ready,
    ev.Packed: _packed,
    ev.Granted: _granted,
    ev.TrainOrdered: _role_ordered,
    ev.ServeOrdered: _role_ordered,
    ev.LineageOrdered: lambda state, line: setattr(state, "lineage_ordered", line.event),
    ev.OfferOrdered: lambda state, line: _step(state, line.event.step).offers_ordered.append(line.event),
    ev.MergeOrdered: lambda state, line: _step(state, line.event.step).merges_ordered.append(line.event),
    ev.FenceOrdered: lambda state, line: state.fences_ordered.append(line.event),
    ev.CommitOrdered: lambda state, line: _step(state, line.event.step).commits_ordered.append(line.event),
    ev.CheckpointOrdered: lambda state, line: _step(state, line.event.step).checkpoints_ordered.append(line.event),
    ev.RestartOrdered: lambda state, line: state.restarts_ordered.append(line.event),
    ev.TaskSetAside: lambda state, line: state.set_aside.__setitem__(line.event.task, line.event.reason),
    ev.StopOrdered: lambda state, line: state.stops.__setitem__(line.incarnation, line.event.reason),
    ev.RunEnded: _ended,
    ev.CancelRequested: _cancel,
    ev.ResumeRequested: lambda state, line: state.asked.__setitem__(line.incarnation, None),
    ev.GaveUp: lambda state, line: state.gave_up.__setitem__(line.incarnation, line.event.reason),
    ev.CellEntered: _cell_entered,
    ev.EngineStarted: lambda state, line: _cell(state, line).engines.__setitem__(line.event.engine, line.event),
    ev.StoreStarted: lambda state, line: state.stores.__setitem__(line.incarnation, line.event.address),
    ev.Serving: _serving,
    ev.ServingEnded: _serving_ended,
    ev.Pulled: _pulled,
    ev.Done: _done,
    ev.Offered: _offered,
    ev.LineageOpened: _lineage_opened,
    ev.Merged: _merged,
    ev.Refused: _refused,
    ev.Fenced: _fenced,
    ev.Committed: _committed,
    ev.Checkpointed: _checkpointed,
    ev.ProcessStarted: lambda state, line: state.processes.__setitem__(line.event.name, line.event),
    ev.ProcessEnded: lambda state, line: state.processes_ended.__setitem__(line.event.name, line.event),
}
