"""Who counts: accepting incarnations, opening lineages, fencing the lost, restarting the stuck.

Invariant: a writer's newest opened incarnation is accepted with a cut of all before it; a lineage belongs to one core
incarnation; a lost cell's micro-steps are free again only after the core's own `fenced`.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.ledger.state import CellIncarnation
from gyre.scheduling.facts import World

UNACCEPTED = ("scheduler", "supervisor", "control")
"""Writers that nobody orders: the scheduler cuts its own predecessor, the others' facts hold whoever wrote them."""


def accept(world: World) -> list[ev.Event]:
    state = world.state
    return [
        ev.Accepted(
            writer=writer,
            incarnation=max(opened),
            cut={i: state.seen[writer][i] for i in opened if i < max(opened)},
        )
        for writer, opened in state.opened.items()
        if writer not in UNACCEPTED and max(opened) > state.incarnation(writer)
    ]


def open_lineage(world: World) -> list[ev.Event]:
    """The first cell is the core. A new incarnation of it opens the next lineage."""
    core, state = world.settings.cells[0], world.state
    if not world.alive(core) or world.reign() is not None:
        return []
    ordered = state.lineage_ordered
    incarnation = state.incarnation(core)
    if ordered is not None and (ordered.cell, ordered.incarnation) == (core, incarnation):
        return []
    previous = max(ordered.lineage if ordered is not None else 0, world.number)
    return [ev.LineageOrdered(cell=core, incarnation=incarnation, lineage=previous + 1)]


def fence(world: World) -> list[ev.Event]:
    """Incarnations that are gone, or dead by their counter, and still hold micro-steps of the step in hand."""
    lineage = world.reign()
    if lineage is None:
        return []
    asked = {(f.source, f.source_incarnation) for f in world.state.fences_ordered if f.lineage == world.number}
    gone = {
        (g.cell, g.incarnation)
        for g in world.grants
        if (g.cell, g.incarnation) != (lineage.cell, lineage.incarnation)
        and (world.state.incarnation(g.cell) != g.incarnation or not world.alive(g.cell))
        and g.grant not in world.lost
        and not world.merged.issuperset(g.microsteps)
    }
    return [
        ev.FenceOrdered(
            cell=lineage.cell,
            incarnation=lineage.incarnation,
            lineage=world.number,
            source=source,
            source_incarnation=incarnation,
        )
        for source, incarnation in sorted(gone - asked)
    ]


def restart(world: World) -> list[ev.Event]:
    """Each phase of a switch has a deadline; a cell that misses it ends its incarnation."""
    state = world.state
    asked = {(r.cell, r.incarnation) for r in state.restarts_ordered}
    return [
        ev.RestartOrdered(cell=cell, incarnation=state.incarnation(cell), reason=reason)
        for cell in world.settings.cells
        if (cell, state.incarnation(cell)) not in asked and (reason := _stuck(world, cell))
    ]


def _stuck(world: World, cell: str) -> str:
    """Why this incarnation has to end, or "". A fenced one has nothing left to give; it may not know."""
    state, lineage = world.state, world.reign()
    if world.is_fenced(cell):
        return "its contributions are fenced"
    if lineage is not None and cell == lineage.cell and _nobody_serves(world, cell):
        return "nobody else is left to serve, and the step in hand waits for executions"
    if world.settled(cell) or cell in world.dead:
        return ""
    found = state.cell(cell) or CellIncarnation()
    late = world.waiting.get(cell, 0.0) > world.settings.phase_timeout
    return f"{found.state} passed its deadline" if late else ""


def _nobody_serves(world: World, core: str) -> bool:
    """The core trains a step that cannot be filled, since all others that would serve are gone, and stay away.

    Its gradients are of use to nobody then: as a new incarnation it serves first, and does the step again.
    """
    others = [cell for cell in world.settings.cells if cell != core]
    found = world.state.steps.get(world.step)
    return (
        bool(world.state.waterlevel and others)
        and world.settings.mode != "async"
        and world.training(core)
        and (found is None or not found.filled)
        and not any(world.alive(cell) for cell in others)
        and all(world.waiting.get(cell, 0.0) > world.settings.phase_timeout for cell in world.settings.cells)
    )
