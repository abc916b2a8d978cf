"""The experts that the engine chose along a path, for the replay of its routing in training.

Owns which record speaks for which row. Invariant: a row has the choice of the call that first computed that token, if
it was recorded; the records of one execution are of one mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gyre.ledger.microsteps import UInt16
from gyre.ledger.routing import NO_EXPERTS, Routing
from gyre.trajectory.tree import TrajectoryError

Records = Mapping[tuple[int, int], Routing]
"""By attempt and turn."""


def experts_along(path: Sequence[tuple[int, int]], attempt: int, records: Records) -> UInt16 | None:
    """uint16 (T, layers, chosen) for the T tokens of `path`: the turns that own them, root first, each with the
    position where its own end. `NO_EXPERTS` where nothing is recorded; None when nothing is for all of it.

    Raises TrajectoryError when the records are of several mixtures.
    """
    found = [(end, record) for turn, end in path if (record := records.get((attempt, turn))) is not None]
    mixtures = {(record.layers, record.chosen) for _, record in found}
    if not mixtures:
        return None
    if len(mixtures) > 1:
        raise TrajectoryError(found[0][1].execution, attempt, None, f"experts were recorded in shapes {mixtures}")
    table = np.full((path[-1][1], *mixtures.pop()), NO_EXPERTS, np.uint16)
    # A call begins at the last token of what it goes on from. Its parent may have computed that: the parent comes last.
    for end, record in reversed(found):
        rows = record.table()[: max(end - record.start, 0)]
        table[record.start : record.start + len(rows)] = rows
    return table


def stacked(tables: Sequence[UInt16 | None], lengths: Sequence[int]) -> UInt16:
    """Tables of `lengths` rows one below the other, those that are None without experts; empty when all are."""
    shapes = {table.shape[1:] for table in tables if table is not None}
    if not shapes:
        return np.zeros((0, 0, 0), np.uint16)
    (shape,) = shapes
    return np.concatenate(
        [
            np.full((length, *shape), NO_EXPERTS, np.uint16) if table is None else table
            for table, length in zip(tables, lengths, strict=True)
        ]
    )
