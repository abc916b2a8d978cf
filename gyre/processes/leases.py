"""Leases on published weights, as the ledger tells them.

Invariant: a buffer is kept while it is current (the newest step's), while rollout is to serve it, and while a role
order names it; an order ends with its incarnation.
"""

from __future__ import annotations

from gyre.ledger.state import RunState


def keep_manifests(state: RunState, core: str, newest: str, boundary: int) -> list[str]:
    """Manifests of weights that the core must go on holding, by file name.

    `boundary`: the newest step whose weights rollout is to serve.
    """
    reign = state.reign()
    if reign is None:
        return [newest]
    mine = {reign.opened.manifest, *(commit.manifest for commit in reign.committed.values())}
    served = reign.committed.get(boundary, reign.opened).manifest
    leased = {
        order.manifest
        for cell, order in state.roles.items()
        if cell != core and order.incarnation == state.incarnation(cell)
    }
    return sorted(((leased | {served}) & mine) | {newest})
