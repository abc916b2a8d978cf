"""`decide(world) -> orders`: the whole of the scheduler's mind, in the order in which it thinks.

Invariant: pure, and idempotent on a folded state. The caller journals and folds what it gets, and calls again until
nothing is left to say; so each decision sees the ones before it. The simulator calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre.ledger import events as ev
from gyre.ledger.training_stats import differences, training_stats, widest
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


def decide(world: World) -> list[ev.Event]:
    """The next orders: the first decision that has something to say, or the end of the run, or nothing."""
    if world.state.ended is not None:
        return []
    ending = end(world)
    if ending:
        return ending
    for decision in DECISIONS:
        orders = decision(world)
        if orders:
            return orders
    return []


def end(world: World) -> list[ev.Event]:
    """The run is over when it was cancelled, when trainer and engine have come apart, or when all steps are committed
    and nothing is open any more."""
    state, settings = world.state, world.settings
    lineage = state.reign()
    if state.cancel:
        return [ev.StopOrdered(reason="cancelled"), ev.RunEnded(state="cancelled", reason="gyre cancel")]
    if problem := apart(world):
        return [ev.StopOrdered(reason=problem), ev.RunEnded(state="failed", reason=problem)]
    if lineage is None or lineage.step() < settings.steps or state.waterlevel:
        return []
    if settings.eval_every and world.burst <= settings.bursts:
        return []
    return [ev.StopOrdered(reason="finished"), ev.RunEnded(state="finished")]


def apart(world: World) -> str:
    """What is wrong if the last committed step's log-probabilities break the recipe's limit; empty if nothing is."""
    limit, lineage = world.settings.difference_limit, world.state.reign()
    if not limit or lineage is None or not lineage.step():
        return ""
    number, step = max(world.state.lineages), lineage.step()
    worst = widest(differences(training_stats(world.state, step, number)))
    if worst is None or worst.spread <= limit:
        return ""
    return (
        f"step {step}: trainer and engine differ by {worst.spread:.3g} for samples of {worst.lengths} targets, over"
        f" objective.difference_limit = {limit:g}; see gyre doctor engine, or raise the limit and gyre resume"
    )
