"""Consumption: which ready group goes into which step, and when a step is full.

Invariant: groups are consumed as they get ready as long as the deadline of every outstanding group stays feasible
(earliest deadline first over the steps that remain within its staleness bound), and no group is overtaken by more than
`max_overtake` later ones. Every group is consumed exactly once.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings


def consume(world: World) -> list[ev.Event]:
    """Fill the step in hand."""
    state, settings, step = world.state, world.settings, world.step
    if step > settings.steps or not state.bursts or step > world.burst * settings.steps_per_burst:
        return []
    found = state.steps.get(step)
    if found is not None and found.filled:
        return []
    taken = len(found.consumed) if found is not None else 0
    if taken >= settings.groups_per_step:
        return [ev.StepFilled(step=step)]
    waiting = list(state.outstanding)
    for index, name in enumerate(waiting):
        if not state.group_terminal(name):
            continue
        others = [other for other in waiting if other != name]
        late = any(state.groups[other].overtaken >= settings.max_overtake for other in waiting[:index])
        if late or not feasible([deadline(world, other) for other in others], settings, step, taken + 1):
            continue
        void = len(state.graded(name)) < settings.min_graded
        return [ev.Consumed(step=step, group=name, void=void)]
    if not waiting and taken and not _more_to_come(world):
        return [ev.StepFilled(step=step)]
    return []


def deadline(world: World, group: str) -> int:
    """The last step that may consume this group: phi + mu steps from the boundary that dispatched it."""
    settings = world.settings
    first = settings.first_step(world.state.groups[group].burst)
    return first - 1 + settings.lead_steps + settings.steps_per_burst


def feasible(deadlines: list[int], settings: Settings, step: int, taken: int) -> bool:
    """Do all deadlines hold if `taken` places of `step` are used and B a step follow (earliest deadline first)?"""
    places = settings.groups_per_step - taken
    return all(
        position < places + (due - step) * settings.groups_per_step for position, due in enumerate(sorted(deadlines))
    )


def _more_to_come(world: World) -> bool:
    return world.state.planned < world.settings.steps * world.settings.groups_per_step


def flush(world: World) -> list[ev.Event]:
    """Training cells with nothing to do close the micro-steps that are open, if a group went in since the last time."""
    lineage, step = world.reign(), world.step
    found = world.state.steps.get(step)
    if lineage is None or found is None or found.filled or not found.consumed:
        return []
    idle = any(world.joined(cell) and not world.unfinished(cell) for cell in world.settings.cells)
    last = found.flushes[-1] if found.flushes else 0
    if idle and not world.pending and len(found.consumed) > last:
        return [ev.Flushed(step=step)]
    return []
