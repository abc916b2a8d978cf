"""Role switches of a cell, read off the states that its lead journalled.

A switch to training is what lies between rollout and training; a switch to rollout what lies between training and
rollout. An update of weights (rollout -> resuming -> rollout) is none. Pure.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gyre.ledger.state import CellIncarnation


class Switch(Struct, frozen=True, kw_only=True):
    """`phases`: state -> seconds, in their order; `at`: display time of the end."""

    to: Literal["training", "rollout"]
    at: float
    seconds: float
    phases: dict[str, float]
    incarnation: int


def switches_of(cell: CellIncarnation, incarnation: int) -> list[Switch]:
    """The completed switches of one incarnation, oldest first."""
    found: list[Switch] = []
    role = ""
    phases: dict[str, float] = {}
    states = [*cell.history, (cell.state, 0.0, cell.t)]
    for state, seconds, t in states:
        if state in ("rollout", "training"):
            if role and role != state:
                to: Literal["training", "rollout"] = "training" if state == "training" else "rollout"
                ended = t - seconds
                found.append(
                    Switch(to=to, at=ended, seconds=sum(phases.values()), phases=phases, incarnation=incarnation)
                )
            role, phases = state, {}
        else:
            phases[state] = phases.get(state, 0.0) + seconds
    return found
