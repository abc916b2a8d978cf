"""What a harness wrote of its own session, counted: a second witness of calls and tokens.

Owns the reading of files that a harness left. Invariants: nothing outside the snapshot is opened and no link is
followed; of a file at most `MOST_BYTES` are read; whatever files hold, reading gives counts or None and never raises.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from gyre.ledger.turns import ROLES

MOST_BYTES = 64 << 20
MOST_FILES = 1000


class Told(Struct, frozen=True, kw_only=True):
    """Model calls that the harness counted, and the tokens that they gave.

    `call_roles`, `token_roles`: the roles of turns that its counts cover.
    """

    calls: int
    tokens: int
    call_roles: tuple[str, ...] = ROLES
    token_roles: tuple[str, ...] = ROLES


@runtime_checkable
class KeepsTranscript(Protocol):
    """A harness that writes something of its session that can be counted."""

    def transcript(self, snapshot: Path, log: Path) -> Told | None:
        """Counts from the files in `snapshot` (what its sandbox wrote) or its output `log`; None: nothing usable."""


def told_by(harness: object, snapshot: Path, log: Path) -> Told | None:
    """What `harness` wrote; None when it keeps nothing, or nothing that can be read."""
    if not isinstance(harness, KeepsTranscript):
        return None
    try:
        return harness.transcript(snapshot, log)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        # Its format changed, or the agent wrote there: no count is a fact too, and no failure of the execution.
        return None


def files_in(snapshot: Path, pattern: str) -> list[Path]:
    """Files of a snapshot that `pattern` names, links left out."""
    root = snapshot.resolve()
    found = []
    for path in sorted(snapshot.glob(pattern))[:MOST_FILES]:
        if path.parent.resolve().is_relative_to(root) and not path.is_symlink():
            found.append(path)
    return found


def text_of(path: Path) -> str:
    """A regular file's text. Raises OSError for anything else, or when it is too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise OSError(f"{path.name} is not a regular file of at most {MOST_BYTES} bytes")
        return file.read(MOST_BYTES).decode("utf-8", "replace")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are JSON objects; others are passed over. Raises OSError."""
    for line in text_of(path).splitlines():
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value
