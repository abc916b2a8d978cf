"""The end of a run: all is done, trainer and engine have come apart, or it was cancelled, perhaps as its job ends.

Invariant: a run that was cancelled begins nothing new, and stops once the newest step is saved and, if the recipe wants
that at the end of a job, what runs is graded; at once, when that was asked for, or when nobody is left to do it.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.ledger.training_stats import differences, training_stats, widest
from gyre.scheduling import custody
from gyre.scheduling.admission import under_way
from gyre.scheduling.facts import World


def end(world: World) -> list[ev.Event]:
    """All steps are committed and nothing is open any more; or the recipe's limit is broken."""
    state, settings = world.state, world.settings
    lineage = state.reign()
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


def cancel(world: World) -> list[ev.Event]:
    """Stop, or what has to be done before."""
    state = world.state
    if state.cancel == 1 and (unsaved(world) or _to_grade(world)):
        for decision in (custody.accept, custody.restart, save):
            orders = decision(world)
            if orders:
                return orders
        return []
    reason = "its job ends" if state.leaving else "gyre cancel"
    return [ev.StopOrdered(reason="cancelled"), ev.RunEnded(state="cancelled", reason=reason)]


def _to_grade(world: World) -> bool:
    """Are workers ending executions, to grade them as they stand?"""
    wanted = world.settings.grade_interrupted and world.state.leaving
    return wanted and any(under_way(world, name) for name in world.state.open)


def unsaved(world: World) -> bool:
    """Has the reigning core committed a step that no checkpoint holds?"""
    lineage = world.reign()
    newest = lineage.committed.get(lineage.step()) if lineage is not None else None
    return newest is not None and not newest.checkpointed


def save(world: World) -> list[ev.Event]:
    """The order, once, to write the checkpoint of the newest committed step."""
    lineage = world.reign()
    if lineage is None or not unsaved(world):
        return []
    step = lineage.step()
    found = world.state.steps[step]
    if found.packed is None or any(c.lineage == world.number for c in found.checkpoints_ordered):
        return []
    return [
        ev.CheckpointOrdered(
            cell=lineage.cell,
            incarnation=lineage.incarnation,
            lineage=world.number,
            step=step,
            version=lineage.committed[step].version,
            microsteps=found.packed.microsteps,
        )
    ]
