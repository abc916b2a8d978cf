"""What one session of an execution leaves to the next: the changes of all sessions so far, as layers.

Owns the place of these. Invariant: nothing that a session left is changed by another user's overlay; where the user
stays, the next session goes on in the same upper folder.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from gyre.executions.layers import private_folder
from gyre.executions.users import User


class Left(Struct, frozen=True, kw_only=True):
    """After a session of `user` (None: root): its snapshot, and the layers `below` that earlier ones of other users
    left, the lowest first.
    """

    snapshot: Path
    below: tuple[Path, ...] = ()
    user: User | None = None


def upper_after(left: Left | None, upper: Path, user: User | None) -> tuple[tuple[Path, ...], bool]:
    """Make the folder `upper` for the next session, of `user`. Returns the layers that lie below it, above those of the
    task, and whether it goes on where an earlier one ended. Raises OSError.
    """
    if left is not None and left.user == user:
        left.snapshot.rename(upper)
        return left.below, True
    private_folder(upper).chmod(0o755)
    if left is None:
        return (), False
    aside = upper.with_name(f"{upper.name}-below-{len(left.below) + 1}")
    left.snapshot.rename(aside)
    return (*left.below, aside), False
