"""Routing: which cell serves an execution.

Invariant: an open execution has a route to a cell that will serve, whenever there is one; routes leave a cell before
the cell leaves rollout, and the workers have acknowledged them. Cells later in the order serve longest, so they are
preferred among those with room.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.scheduling.facts import World


def route(world: World) -> list[ev.Event]:
    """Routes for executions that have none, or whose cell will not serve them."""
    able = [cell for cell in world.settings.cells if world.will_serve(cell)]
    if not able:
        return []
    routes = world.state.routes
    lost = [name for name in sorted(world.state.open) if routes.get(name, "") not in able]
    moved = assign(world, lost, able) if lost else {}
    return [ev.Routed(routes=moved)] if moved else []


def move_off(world: World, leaving: str) -> list[ev.Event]:
    """Routes that take everything off a cell that is about to leave rollout."""
    able = [cell for cell in world.settings.cells if world.will_serve(cell) and cell != leaving]
    open_here = [name for name in sorted(world.state.open) if world.state.routes.get(name) == leaving]
    if not open_here:
        return []
    return [ev.Routed(routes=assign(world, open_here, able) if able else dict.fromkeys(open_here, ""))]


def acknowledged(world: World) -> bool:
    """Has every worker that runs executions taken over the newest routes?"""
    state = world.state
    busy = {
        attempt.worker
        for name in state.open
        for attempt in state.executions[name].attempts.values()
        if attempt.finished is None
        and attempt.worker not in world.dead
        and attempt.incarnation == state.incarnation(attempt.worker)
    }
    return all(
        state.acknowledged.get(worker, {}).get(state.incarnation(worker), (0, -1)) >= state.routed for worker in busy
    )


def assign(world: World, names: list[str], able: list[str]) -> dict[str, str]:
    """The least loaded cell first (load relative to C_e); ties go to the cell that will serve longest."""
    load = dict.fromkeys(able, 0)
    for name in world.state.open:
        cell = world.state.routes.get(name, "")
        if cell in load:
            load[cell] += 1
    position = {cell: index for index, cell in enumerate(world.settings.cells)}
    moved: dict[str, str] = {}
    for name in names:
        cell = min(able, key=lambda c: (load[c], -position[c]))
        load[cell] += 1
        moved[name] = cell
    return moved
