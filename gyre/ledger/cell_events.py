"""Events of a cell: facts that its lead, and nobody else, writes. Part of the vocabulary in `gyre.ledger.events`.

Invariant: each names the lineage and step that it speaks of, so that a reader can tell it from one of an earlier reign.
"""

from __future__ import annotations

from typing import Literal

from gyre.ledger.event_base import CellState, JournalEvent


class CellEntered(JournalEvent, frozen=True):
    """The cell is in `state` now; the state before it lasted `seconds` (by the lead's own monotonic clock)."""

    state: CellState
    seconds: float = 0.0
    lineage: int = 0
    step: int = 0
    """with state training: the step whose gradients are summed, and its lineage"""
    detail: str = ""


class EngineStarted(JournalEvent, frozen=True):
    """An engine of the cell, counted from 0, answers at `url`; its keys are in the 0600 file keys/`key_file`."""

    engine: int
    url: str
    key_file: str
    pid: int


class PartOrdered(JournalEvent, frozen=True):
    """The lead, to the agent of a further node: start your node's part of the ranks or of an engine, or end
    it.

    `number` counts the lead's orders; a new one ends what an older one started.
    """

    agent: str
    agent_incarnation: int
    part: Literal["ranks", "engine"]
    number: int
    wanted: bool = True
    rendezvous: str = ""
    """host:port on the first node where all parts meet; of an engine whose first node is the agent's: empty, the agent
    chooses"""
    engine: int = 0
    """of part engine: which one of the cell"""
    key_file: str = ""
    """of part engine: the name of its key file in keys/"""


class PartStarted(JournalEvent, frozen=True):
    """An agent: the engine that the lead's incarnation ordered with `number`, and whose first node is this one, has a
    process; its other parts meet it at `rendezvous`, host:port, and on that host it will answer."""

    cell_incarnation: int
    number: int
    rendezvous: str
    pid: int


class PartEnded(JournalEvent, frozen=True):
    """An agent: what the lead's incarnation ordered with `number` has ended by itself."""

    cell_incarnation: int
    number: int
    reason: str


class StoreStarted(JournalEvent, frozen=True):
    """The store process: the master of the run's store of KV pages answers at `address`, host:port."""

    address: str


class Serving(JournalEvent, frozen=True):
    """All engines of the cell report `weight_version`: the route is open."""

    lineage: int
    version: int
    weight_version: str


class ServingEnded(JournalEvent, frozen=True):
    """The route is closed; calls in flight are cut and continue elsewhere or later."""


class LineageOpened(JournalEvent, frozen=True):
    """Core: `lineage` reigns from the weights after `step`."""

    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str


class Pulled(JournalEvent, frozen=True):
    """The lease on the weights of (lineage, step) that the order gave is free again."""

    lineage: int
    step: int
    seconds: float
    nbytes: int


class Done(JournalEvent, frozen=True):
    """The gradients of these micro-steps are in this cell's buffer: also the ask for more."""

    grant: int
    lineage: int
    step: int
    microsteps: list[str]
    seconds: float = 0.0
    tokens: int = 0
    stats: dict[str, float] = {}


class Offered(JournalEvent, frozen=True):
    """A contribution (lineage, step, cell incarnation, number): frozen until the core answers."""

    lineage: int
    step: int
    number: int
    microsteps: list[str]
    manifest: str


class Merged(JournalEvent, frozen=True):
    """Core: all ranks have added this contribution."""

    lineage: int
    step: int
    source: str
    source_incarnation: int
    number: int
    microsteps: list[str]


class Refused(JournalEvent, frozen=True):
    """Core: this contribution was not added, and never will be."""

    lineage: int
    step: int
    source: str
    source_incarnation: int
    number: int
    reason: str


class Fenced(JournalEvent, frozen=True):
    """Core: contributions of this incarnation are refused from here on."""

    lineage: int
    source: str
    source_incarnation: int


class Committed(JournalEvent, frozen=True):
    """Core: the optimizer has made `step`; its weights can be pulled at `manifest`. checkpointed: its checkpoint is
    complete; when it is still being written, `Checkpointed` follows."""

    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str
    checkpointed: bool
    skipped: bool = False
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    seconds: float = 0.0
    stats: dict[str, float] = {}


class Checkpointed(JournalEvent, frozen=True):
    """Core: the checkpoint of a step that was committed without one, or while it was being written, is complete."""

    lineage: int
    step: int
