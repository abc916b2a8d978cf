"""Which row of a turn counts.

A turn's row is written before its reply is sent, and again (same execution, attempt and turn) when the
delivery went otherwise than the row says. Invariant: the last row of a turn number, in the writer's order,
wins; an undelivered turn whose whole sequence a later turn keeps was received after all, and counts as
committed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gyre.ledger.turns import Turn


def latest_rows(turns: Iterable[Turn]) -> list[Turn]:
    """One row a turn, ordered by (execution, attempt, turn). `turns` come in the order in which they were
    written.
    """
    latest: dict[tuple[str, int, int], Turn] = {}
    for turn in turns:
        latest[turn.execution, turn.attempt, turn.turn] = turn
    continued = set()
    for turn in latest.values():
        parent = latest.get((turn.execution, turn.attempt, turn.parent))
        # even a call that failed later shows that the harness had the whole reply: it sent it back
        if parent is not None and turn.keep == whole_length(parent):
            continued.add((turn.execution, turn.attempt, turn.parent))
    rows = []
    for key in sorted(latest):
        row = latest[key]
        if row.status == "undelivered" and key in continued:
            row = msgspec.structs.replace(row, status="committed")
        rows.append(row)
    return rows


def whole_length(turn: Turn) -> int:
    """Tokens of the turn's whole sequence."""
    return turn.keep + len(turn.context) + len(turn.output)
