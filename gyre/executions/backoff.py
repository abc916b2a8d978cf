"""How long to wait before what failed is tried again.

Owns that one rule. Invariant: the first try waits for nothing, and no wait is longer than LONGEST.
"""

from __future__ import annotations

FIRST, LONGEST = 0.5, 30.0
"""Seconds."""


def pause_before(failures: int) -> float:
    """Seconds to wait after so many failed tries: doubling, so that what is overloaded gets room."""
    return min(LONGEST, FIRST * 2.0 ** (min(failures, 32) - 1)) if failures else 0.0
