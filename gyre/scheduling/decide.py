"""`decide(world) -> orders`: the whole of the scheduler's mind, in the order in which it thinks.

Invariant: pure, and idempotent on a folded state. The caller journals and folds what it gets, and calls again until
nothing is left to say; so each decision sees the ones before it. The simulator calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre.ledger import events as ev
from gyre.scheduling import admission, consumption, custody, ending, microsteps, roles, routing
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


def decide(world: World) -> list[ev.Event]:
    """The next orders: the first decision that has something to say, or the end of the run, or nothing."""
    if world.state.ended is not None:
        return []
    if world.state.cancel:
        return ending.cancel(world)
    over = ending.end(world)
    if over:
        return over
    for decision in DECISIONS:
        orders = decision(world)
        if orders:
            return orders
    return []
