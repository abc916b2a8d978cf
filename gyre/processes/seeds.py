"""Which running engine another takes its weights from when it starts. Pure.

Invariant: only one that its cell says to serve, under the version that is wanted; whether its weights were that version
to the end is for who has read them to find out.
"""

from __future__ import annotations

from gyre.engines.sglang.arguments import NO_SEED, Seed
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState


def seed_of(state: RunState, run: RunFolder, cell: str, version: str = "", engine: int = 0) -> Seed:
    """The first other cell's engine that serves `version` ("": the newest that any serves), or NO_SEED. An `engine` of
    a cell takes them from its like, so that one does not give them all."""
    found = []
    for name in sorted(state.cells):
        other = state.cell(name)
        if name == cell or other is None or other.serving is None or engine not in other.engines:
            continue
        if version in ("", other.serving.weight_version):
            giver, serving = other.engines[engine], other.serving
            newest = (serving.lineage, serving.version)
            found.append((newest, Seed(giver.url, run.keys / giver.key_file, serving.weight_version)))
    return max(found, key=lambda one: one[0])[1] if found else NO_SEED
