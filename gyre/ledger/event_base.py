"""What every event of a journal is: an immutable struct whose tag on disk is its name in snake case.

Invariant: a tag is never given to another event; a new field has a default, so that old journals can be read.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Purpose = Literal["train", "eval"]
Outcome = Literal["graded", "excluded", "retry"]
CellState = Literal[
    "starting", "ready", "rollout", "draining", "releasing", "joining", "training", "leaving", "resuming", "failed"
]
EndState = Literal["finished", "failed", "cancelled"]


def _tag(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class JournalEvent(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_tag):
    """One line of a journal."""
