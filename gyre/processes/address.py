"""Where the processes of other nodes reach this one.

Invariant: on one machine that is loopback; in a job it is what the launcher found for this node.
"""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"


def node_address() -> str:
    """The IPv4 address that engines and transfer sessions bind to and announce."""
    return os.environ.get("GYRE_HOST") or LOOPBACK
