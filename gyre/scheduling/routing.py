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
    routed = world.state.live.routed
    lost = sorted(name for cell, names in routed.items() if cell not in able for name in names)
    moved = assign(world, lost, able) if lost else {}
    return [ev.Routed(routes=moved)] if moved else []


def move_off(world: World, leaving: str) -> list[ev.Event]:
    """Routes that take everything off a cell that is about to leave rollout."""
    able = [cell for cell in world.settings.cells if world.will_serve(cell) and cell != leaving]
    open_here = sorted(world.state.live.routed.get(leaving, ()))
    if not open_here:
        return []
    return [ev.Routed(routes=assign(world, open_here, able) if able else dict.fromkeys(open_here, ""))]


def acknowledged(world: World) -> bool:
    """Has every worker that runs executions taken over the newest routes?"""
    state = world.state
    busy = [
        worker
        for worker, incarnations in state.live.running.items()
        if worker not in world.dead and state.incarnation(worker) in incarnations
    ]
    return all(
        state.acknowledged.get(worker, {}).get(state.incarnation(worker), (0, -1)) >= state.routed for worker in busy
    )


def assign(world: World, names: list[str], able: list[str]) -> dict[str, str]:
    """The least loaded cell first (load relative to C_e); ties go to the cell that will serve longest."""
    load = {cell: len(world.state.live.routed.get(cell, ())) for cell in able}
    position = {cell: index for index, cell in enumerate(world.settings.cells)}
    moved: dict[str, str] = {}
    for name in names:
        cell = min(able, key=lambda c: (load[c], -position[c]))
        load[cell] += 1
        moved[name] = cell
    return moved
