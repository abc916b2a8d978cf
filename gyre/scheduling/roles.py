"""Roles: which cell rolls out and which trains. Elastic, Colocate and Async on the same parts.

Invariant: live work is always carried. A cell leaves rollout only when the rooms of the cells that go on serving hold
the waterlevel, after its executions were routed away and the workers have acknowledged; one switch at a time. Training
cells are a prefix of the order, the core first; they go back in reverse order when the burst is over.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.ledger.state import Lineage
from gyre.scheduling.facts import World
from gyre.scheduling.routing import acknowledged, move_off


def switch(world: World) -> list[ev.Event]:
    """The next role order, or none."""
    lineage = world.reign()
    if lineage is None:
        return []
    refresh = [cell for cell in world.settings.cells if _stale(world, lineage, cell)]
    if refresh:
        return [_serve(world, lineage, cell) for cell in refresh]
    void = [cell for cell in world.settings.cells if _void(world, cell)]
    if void:
        # without the core in training there is no step to join
        joins = world.training(lineage.cell) or world.settings.mode == "async"
        return [(_train if joins else _serve)(world, lineage, cell) for cell in void]
    if any(world.alive(cell) and not world.settled(cell) for cell in world.settings.cells):
        return []
    back = _back(world, lineage)
    if back is not None:
        return [back]
    rejoin = _rejoin(world, lineage)
    if rejoin:
        return rejoin
    cell = _forward(world, lineage)
    if cell is None:
        return []
    moved = move_off(world, cell)
    if moved:
        return moved
    return [_train(world, lineage, cell)] if acknowledged(world) else []


def capacity(world: World, but: str = "") -> int:
    """C_R: executions that the serving cells carry, without `but`."""
    return world.settings.cell_room * sum(1 for cell in world.serving_cells() if cell != but)


def _stale(world: World, lineage: Lineage, cell: str) -> bool:
    """Serves, or is new and without a role, and should have the weights of this boundary: no switch, just an update."""
    if not world.alive(cell) or world.training(cell) or world.settings.only_trains(cell):
        return False
    order = world.role_order(cell)
    return order is None or (
        isinstance(order, ev.ServeOrdered) and order.weight_version != world.to_serve(lineage, cell).weight_version
    )


def _void(world: World, cell: str) -> bool:
    """Ordered to train in a lineage that is over, perhaps waiting for weights that nobody has any more."""
    order = world.role_order(cell)
    return (
        isinstance(order, ev.TrainOrdered)
        and world.alive(cell)
        and order.lineage != world.number
        and world.step <= world.settings.steps
    )


def _back(world: World, lineage: Lineage) -> ev.Event | None:
    """The last training cell goes back: its burst is over, or the others cannot carry the waterlevel."""
    cells = [cell for cell in world.settings.cells if world.training(cell)]
    if not cells or world.settings.mode == "async":
        return None
    last = cells[-1]
    if world.unmerged(lineage, last) or world.unfinished(last):
        return None
    over = world.returning(last)
    if over and last == lineage.cell and _core_stays(world):
        return None
    if over or (world.starved() and last != lineage.cell):
        return _serve(world, lineage, last)
    if world.state.waterlevel and not capacity(world) and not _step_under_way(world):
        return _serve(world, lineage, last)
    return None


def _step_under_way(world: World) -> bool:
    """Has the core gradients of an uncommitted step in its buffer? Then it finishes the step first."""
    return bool(world.merged or world.grants)


def _core_stays(world: World) -> bool:
    """The next batch is ready whole, and the other cells can carry what is dispatched."""
    state, settings = world.state, world.settings
    if world.step > settings.steps:
        return False
    ready = sum(1 for name in state.outstanding if state.group_terminal(name))
    found = state.steps.get(world.step)
    ready += len(found.consumed) if found is not None else 0
    return ready >= settings.groups_per_step and state.waterlevel <= capacity(world)


def _rejoin(world: World, lineage: Lineage) -> list[ev.Event]:
    """Training cells go on with the step in hand: a new step, or a new lineage."""
    target = (world.number, world.step)
    if world.step > world.settings.steps or world.step > world.burst * world.settings.steps_per_burst:
        return []
    orders: list[ev.Event] = []
    for cell in world.settings.cells:
        order = world.role_order(cell)
        if isinstance(order, ev.TrainOrdered) and world.alive(cell) and (order.lineage, order.step) != target:
            if not world.returning(cell) or cell == lineage.cell:
                orders.append(_train(world, lineage, cell))
    return orders


def _forward(world: World, lineage: Lineage) -> str | None:
    """The next cell that should leave rollout for training."""
    settings = world.settings
    if world.step > settings.steps:
        return None
    waiting = [cell for cell in settings.cells if world.alive(cell) and not world.training(cell)]
    if settings.mode == "async":
        return next((cell for cell in waiting if settings.only_trains(cell)), None)
    if not waiting:
        return None
    cell = waiting[0]
    if cell != lineage.cell and not world.training(lineage.cell):
        return None
    if not _work(world, cell == lineage.cell):
        return None
    limit = 0 if settings.mode == "colocate" else capacity(world, but=cell)
    return cell if world.state.waterlevel <= limit else None


def _work(world: World, core: bool) -> bool:
    """Is there something to train, or a batch in training that can be joined? The core also has to commit."""
    found = world.state.steps.get(world.step)
    if found is None or not found.consumed:
        return False
    if found.packed is None or core:
        return True
    return not world.merged.issuperset(found.packed.microsteps)


def _train(world: World, lineage: Lineage, cell: str) -> ev.TrainOrdered:
    return ev.TrainOrdered(
        cell=cell,
        incarnation=world.state.incarnation(cell),
        lineage=world.number,
        step=world.step,
        manifest=world.newest(lineage).manifest,
    )


def _serve(world: World, lineage: Lineage, cell: str) -> ev.ServeOrdered:
    weights = world.to_serve(lineage, cell)
    return ev.ServeOrdered(
        cell=cell,
        incarnation=world.state.incarnation(cell),
        lineage=world.number,
        step=weights.step,
        version=weights.version,
        weight_version=weights.weight_version,
        manifest=weights.manifest,
    )
