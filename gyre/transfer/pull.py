"""Pulling a published buffer, verified.

Owns the pulling side: staging memory and the session it belongs to. Invariant: bytes are handed out only when all of
them arrived and their digest is the published one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gyre.ledger.digest import new_digest
from gyre.transfer.engine import Alive, TransferSession
from gyre.transfer.errors import DigestMismatch, SessionStale
from gyre.transfer.manifest import RankBuffer
from gyre.transfer.memory import Region


def pull(session: TransferSession, buffer: RankBuffer, staging: Region, *, alive: Alive | None = None) -> memoryview:
    """Pull `buffer` into `staging` and verify it; a view of its bytes (writable, valid until staging is reused).

    What has landed is digested while the rest is on its way. The caller then checks that the manifest is still
    current. Raises TransferFailed (staging is quarantined if bytes may have moved: look at `staging.state`),
    SessionStale (open another session), DigestMismatch (staging is fine).
    """
    running = new_digest()

    def landed(start: int, size: int) -> None:
        running.update(staging.view()[start : start + size])

    session.read(buffer.peer, buffer.address, staging, buffer.nbytes, alive=alive, landed=landed)
    digest = running.hexdigest()
    if digest != buffer.digest:
        raise DigestMismatch(f"{buffer.nbytes} bytes from {buffer.session}: digest {digest}, not {buffer.digest}")
    return staging.view()[: buffer.nbytes]


class Puller:
    """Pulls buffers, one at a time, with staging of its own; replaces its session where a peer made that necessary.

    Staging is reused for the next pull: a view that `pull` returned holds until the next call. After failures whose
    quarantined memory exceeds `quarantine_limit` bytes the session is replaced, which frees that memory.
    """

    def __init__(self, open_session: Callable[[], TransferSession], *, quarantine_limit: int = 4 << 30) -> None:
        self._open, self._limit = open_session, quarantine_limit
        self._session: TransferSession | None = None
        self._staging: Region | None = None
        self._lock = threading.Lock()

    def pull(self, buffer: RankBuffer, *, alive: Alive | None = None) -> memoryview:
        """The verified bytes of `buffer`. Raises TransferFailed or DigestMismatch; a later pull may then succeed."""
        with self._lock:
            session = self._usable_session()
            try:
                return pull(session, buffer, self._staging_of(session, buffer.nbytes), alive=alive)
            except SessionStale:  # its peer restarted where another had lived: nothing was transferred yet
                self._close()
            session = self._usable_session()
            return pull(session, buffer, self._staging_of(session, buffer.nbytes), alive=alive)

    def _usable_session(self) -> TransferSession:
        session = self._session
        if session is not None:
            waste = sum(region.nbytes for region in session.quarantined)
            if session.usable and waste <= self._limit:
                return session
            self._close()
        self._session = self._open()
        return self._session

    def _staging_of(self, session: TransferSession, nbytes: int) -> Region:
        staging = self._staging
        if staging is not None and staging.state == "live" and staging.nbytes >= nbytes:
            return staging
        if staging is not None and staging.state == "live":
            staging.close()
        self._staging = session.allocate(nbytes)
        return self._staging

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._staging = None, None

    def close(self) -> None:
        """End the session and free all staging. Idempotent. Views from `pull` must not be used any more."""
        with self._lock:
            self._close()
