"""`decide(world) -> orders`: the whole of the scheduler's mind, in the order in which it thinks.

Invariant: pure, and idempotent on a folded state. The caller journals and folds what it gets, and calls again until
nothing is left to say; so each decision sees the ones before it. The simulator calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre.ledger import events as ev
from gyre.scheduling import admission, consumption, custody, microsteps, roles, routing
from gyre.scheduling.facts import World

DECISIONS: tuple[Callable[[World], list[ev.Event]], ...] = (
    custody.accept,
    custody.open_lineage,
    custody.fence,
    custody.restart,
    admission.set_aside,
    admission.open_burst,
    admission.dispatch,
    routing.route,
    consumption.consume,
    microsteps.commit,
    microsteps.merge,
    microsteps.offer,
    consumption.flush,
    roles.switch,
    microsteps.grant,
)
LAST: tuple[Callable[[World], list[ev.Event]], ...] = (custody.accept, custody.restart, microsteps.save)
"""While a run that was cancelled waits for the checkpoint of its newest step."""


def decide(world: World) -> list[ev.Event]:
    """The next orders: the first decision that has something to say, or the end of the run, or nothing."""
    if world.state.ended is not None:
        return []
    if world.state.cancel:
        return cancel(world)
    ending = end(world)
    if ending:
        return ending
    for decision in DECISIONS:
        orders = decision(world)
        if orders:
            return orders
    return []


def cancel(world: World) -> list[ev.Event]:
    """A run that was cancelled ends once its newest step is saved, or at once: when that was asked for, or there is no
    core to save it."""
    for decision in LAST if microsteps.unsaved(world) and world.state.cancel == 1 else ():
        orders = decision(world)
        if orders:
            return orders
    if microsteps.unsaved(world) and world.state.cancel == 1:
        return []
    return [ev.StopOrdered(reason="cancelled"), ev.RunEnded(state="cancelled", reason="gyre cancel")]


def end(world: World) -> list[ev.Event]:
    """All steps are committed and nothing is open any more."""
    state, settings = world.state, world.settings
    lineage = state.reign()
    if lineage is None or lineage.step() < settings.steps or state.waterlevel:
        return []
    if settings.eval_every and world.burst <= settings.bursts:
        return []
    return [ev.StopOrdered(reason="finished"), ev.RunEnded(state="finished")]
