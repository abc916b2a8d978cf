"""Which events are orders to a cell.

Invariant: whoever plays a cell (its lead, or the simulator's) obeys the same list, in the order of the journal.
"""

from __future__ import annotations

from gyre.ledger import events as ev

CELL_ORDERS = (
    ev.LineageOrdered,
    ev.TrainOrdered,
    ev.ServeOrdered,
    ev.Granted,
    ev.OfferOrdered,
    ev.MergeOrdered,
    ev.FenceOrdered,
    ev.CommitOrdered,
    ev.CheckpointOrdered,
)
"""Done one at a time; a `RestartOrdered` is obeyed at once and is none of them."""
