"""What can go wrong in a transfer, by what the caller should do about it.

Owns the room's exceptions. Invariant: `TransferFailed` and `DigestMismatch` mean that no byte was delivered.
"""

from __future__ import annotations


class TransferFailed(Exception):
    """The peer is gone, frozen or too slow. The staging region is quarantined if bytes could still land in it."""


class SessionStale(TransferFailed):
    """This session cannot serve the request any more (its peer restarted, or a first contact hangs in it).

    Nothing was transferred and the staging region is untouched. Open a fresh session; `Puller` does so by itself.
    """


class DigestMismatch(Exception):
    """All bytes arrived, but they are not the published ones: the buffer was written or reused meanwhile."""


class Misuse(RuntimeError):
    """A defect of the caller: a closed or foreign region, a forked process, a key published twice."""
