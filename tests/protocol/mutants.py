"""The protocol, broken on purpose: each mutant takes away one thing that the exactly-once promise rests on.

Owns the mutations, of the decisions and of the modelled cells; each undone by pytest's monkeypatch. Invariant: a mutant
differs from the protocol in that one thing, and never raises anything itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gyre.ledger import events as ev
from gyre.scheduling import custody, microsteps
from gyre.scheduling.decider import Decider, Decision
from gyre.scheduling.facts import World
from tests.protocol.cells import RankedCell
from tests.scheduling import world as small
from tests.scheduling.processes import Pause

Patch = pytest.MonkeyPatch
NEVER = 1 << 30
"""A line that no writer reaches."""


def _decide(patch: Patch, name: str, mutant: Decision) -> None:
    """`mutant` in the place of the decision of that name, for `decide` and for the Decider."""
    module = sys.modules["gyre.scheduling.decide"]
    mutant.__name__ = name
    decisions = tuple(mutant if one.__name__ == name else one for one in module.DECISIONS)
    patch.setattr(module, "DECISIONS", decisions)
    patch.setattr(small, "Decider", lambda state, settings: Decider(state, settings, decisions))


def _answered_without_zeroing(cell: RankedCell, answer: Any) -> Pause:
    kept, sums = list(cell.buffer), cell.sums
    yield from _ANSWERED(cell, answer)
    if kept and not cell.buffer:
        cell.buffer, cell.sums = kept, sums


_ANSWERED = RankedCell._answered


def a_buffer_outlives_its_answer(patch: Patch) -> None:
    patch.setattr(RankedCell, "_answered", _answered_without_zeroing)


def gradients_outlive_their_lineage(patch: Patch) -> None:
    original = RankedCell._train_role

    def train_role(cell: RankedCell, order: ev.TrainOrdered) -> Pause:
        kept, sums = list(cell.buffer), cell.sums
        yield from original(cell, order)
        if kept and not cell.buffer:
            cell.buffer, cell.sums = kept, sums

    patch.setattr(RankedCell, "_train_role", train_role)


def each_rank_adds_what_it_gets(patch: Patch) -> None:
    def add(cell: RankedCell, manifest: str) -> Pause:
        for rank, sums in enumerate(cell.sums):
            yield from cell.at("pulled" if rank == 0 else "between ranks' adds")
            if manifest in cell.sim.manifests:  # else its own pull failed
                sums += cell.sim.contributions[manifest][rank]
        yield from cell.at("added and not merged")
        cell.where = ""

    patch.setattr(RankedCell, "add", add)


def a_fence_is_said_and_not_kept(patch: Patch) -> None:
    original = RankedCell._fence

    def fence(cell: RankedCell, order: ev.FenceOrdered) -> Pause:
        yield from original(cell, order)
        cell.fenced.clear()

    patch.setattr(RankedCell, "_fence", fence)


def any_checkpoint_opens_a_lineage(patch: Patch) -> None:
    patch.setattr(RankedCell, "counts", lambda cell, made, step, openings: True)


def leases_are_not_looked_at(patch: Patch) -> None:
    original = RankedCell._retire

    def retire(cell: RankedCell, step: int) -> None:
        roles, cell.roles = cell.roles, {}
        original(cell, step)
        cell.roles = roles

    patch.setattr(RankedCell, "_retire", retire)


def a_commit_does_not_wait_for_the_contributions(patch: Patch) -> None:
    def commit(world: World) -> list[ev.Event]:
        found = world.state.steps.get(world.step)
        everything = frozenset(found.microsteps) if found is not None else frozenset()
        known = World(world.state, world.settings, world.dead, world.waiting)
        known.__dict__["merged"] = everything
        return microsteps.commit(known)

    _decide(patch, "commit", commit)


def what_a_lost_cell_held_stays_with_it(patch: Patch) -> None:
    patch.setattr(World, "lost", property(lambda world: frozenset()))


def a_lost_cells_grants_are_free_before_the_fence(patch: Patch) -> None:
    original = World.lost.func  # type: ignore[attr-defined]

    def lost(world: World) -> frozenset[int]:
        gone = {
            g.grant for g in world.grants if world.state.incarnation(g.cell) != g.incarnation or g.cell in world.dead
        }
        found: frozenset[int] = original(world) | gone
        return found

    patch.setattr(World, "lost", property(lost))


def merges_of_an_earlier_lineage_count(patch: Patch) -> None:
    original = World.merged.func  # type: ignore[attr-defined]

    def merged(world: World) -> frozenset[str]:
        everyones = [m for found in world.state.lineages.values() for m in found.merged if m.step == world.step]
        found: frozenset[str] = original(world).union(*(m.microsteps for m in everyones))
        return found

    patch.setattr(World, "merged", property(merged))


def a_successor_is_accepted_without_a_cut(patch: Patch) -> None:
    def accept(world: World) -> list[ev.Event]:
        return [
            msgspec.structs.replace(order, cut=dict.fromkeys(order.cut, NEVER))
            for order in custody.accept(world)
            if isinstance(order, ev.Accepted)
        ]

    _decide(patch, "accept", accept)


MUTANTS: dict[Callable[[Patch], None], int] = {
    a_buffer_outlives_its_answer: 1,
    gradients_outlive_their_lineage: 3,
    each_rank_adds_what_it_gets: 9,
    a_fence_is_said_and_not_kept: 6,
    any_checkpoint_opens_a_lineage: 11,
    leases_are_not_looked_at: 19,
    a_commit_does_not_wait_for_the_contributions: 0,
    what_a_lost_cell_held_stays_with_it: 0,
    a_lost_cells_grants_are_free_before_the_fence: 3,
    merges_of_an_earlier_lineage_count: 0,
    a_successor_is_accepted_without_a_cut: 32,
}
"""Each with the first chunk of histories that found it when these tests ran alone: where the search begins."""
