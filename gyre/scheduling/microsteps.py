"""Micro-steps: grants, contributions, and the commit of a step.

Invariant: within a lineage a micro-step is granted again only after its holder was fenced or refused; a step is
committed only when the merged sets are disjoint and together are exactly its `packed` record.
"""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.scheduling.facts import World

AHEAD = 2
"""Bundles a cell has at a time: the one it trains and one ahead."""


def grant(world: World) -> list[ev.Event]:
    """One bundle for the training cell that has the fewest."""
    lineage = world.reign()
    if lineage is None or world.step > world.settings.steps:
        return []
    pending, able = world.pending, world.takers
    if not pending or not able:
        return []
    cell = min(able, key=world.load)
    if world.load(cell) >= AHEAD:
        return []
    return [
        ev.Granted(
            grant=world.state.granted + 1,
            lineage=world.number,
            step=world.step,
            cell=cell,
            incarnation=world.state.incarnation(cell),
            microsteps=pending[: world.settings.microsteps_per_grant],
        )
    ]


def _open_offer(world: World, cell: str) -> int | None:
    """Number of the contribution of this cell that the core has not answered."""
    found, incarnation = world.state.cell(cell), world.state.incarnation(cell)
    if found is None or not found.offers:
        return None
    answered = {a.number for a in world.answers if (a.source, a.source_incarnation) == (cell, incarnation)}
    for number, offer in found.offers.items():
        if (offer.lineage, offer.step) == (world.number, world.step) and number not in answered:
            return number
    return None


def offer(world: World) -> list[ev.Event]:
    """A satellite hands over when nothing is left to grant in the step, or when it has to go back to rollout."""
    lineage, step = world.reign(), world.step
    if lineage is None:
        return []
    found = world.state.steps.get(step)
    finished = found is not None and found.packed is not None and not world.pending
    orders: list[ev.Event] = []
    for cell in world.settings.cells:
        if cell == lineage.cell or not world.training(cell) or world.unfinished(cell):
            continue
        if not world.unmerged(lineage, cell) or not (finished or world.starved()):
            continue
        if not world.offering(cell):
            orders.append(
                ev.OfferOrdered(
                    cell=cell,
                    incarnation=world.state.incarnation(cell),
                    lineage=world.number,
                    step=step,
                )
            )
    return orders


def merge(world: World) -> list[ev.Event]:
    """Hand each open offer to the core, once."""
    lineage = world.reign()
    if lineage is None:
        return []
    orders: list[ev.Event] = []
    for cell in world.settings.cells:
        number = _open_offer(world, cell)
        found = world.state.cell(cell)
        if number is None or found is None:
            continue
        incarnation = world.state.incarnation(cell)
        offered = found.offers[number]
        asked = any(
            (m.lineage, m.source, m.source_incarnation, m.number) == (world.number, cell, incarnation, number)
            for m in world.state.steps[offered.step].merges_ordered
        )
        if not asked:
            orders.append(
                ev.MergeOrdered(
                    cell=lineage.cell,
                    incarnation=lineage.incarnation,
                    lineage=world.number,
                    step=offered.step,
                    source=cell,
                    source_incarnation=incarnation,
                    number=number,
                    manifest=offered.manifest,
                    microsteps=offered.microsteps,
                )
            )
    return orders


def commit(world: World) -> list[ev.Event]:
    lineage, step, settings = world.reign(), world.step, world.settings
    if lineage is None or step > settings.steps:
        return []
    found = world.state.steps.get(step)
    if found is None or found.packed is None:
        return []
    packed = found.packed
    if not world.merged.issuperset(packed.microsteps):
        return []
    if not world.joined(lineage.cell):
        return []  # a step without micro-steps too: in rollout the core's tensors are not on its devices
    if any(c.lineage == world.number for c in found.commits_ordered):
        return []
    return [
        ev.CommitOrdered(
            cell=lineage.cell,
            incarnation=lineage.incarnation,
            lineage=world.number,
            step=step,
            executions=packed.executions,
            microsteps=packed.microsteps,
            checkpoint=step % settings.checkpoint_every == 0 or step == settings.steps,
            version=settings.version(step),
        )
    ]
