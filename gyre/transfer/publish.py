"""Publishing: immutable, checksummed host buffers that peers pull.

Owns the published regions of one session. Invariant: a published buffer is neither written nor freed while its key
is current or leased; only `retire` ends a buffer, and only one that its caller did not ask to keep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from gyre.transfer.errors import Misuse
from gyre.transfer.manifest import Peer, RankBuffer, digest_of
from gyre.transfer.memory import Bytes, as_bytes
from gyre.transfer.pull import Puller, pull

__all__ = ["BufferKey", "Publisher", "Puller", "pull"]


class BufferKey(NamedTuple):
    """What a buffer holds: the weights after `step`, or contribution `number` of this cell to `step`."""

    kind: Literal["weights", "gradients"]
    lineage: int
    step: int
    number: int = 0


class PublishedRegion(Protocol):
    """What the publisher needs of a `Region`."""

    address: int
    nbytes: int

    def array(self) -> Bytes: ...
    def close(self) -> None: ...


class PublishingSession(Protocol):
    """What the publisher needs of a `TransferSession`."""

    peer: Peer

    def allocate(self, nbytes: int) -> PublishedRegion: ...


class Publisher:
    """Publishes one rank's buffers. Up to `spares` retired regions are kept registered for buffers of equal size."""

    def __init__(self, session: PublishingSession, rank: int, *, spares: int = 1) -> None:
        self._session, self._rank, self._spares = session, rank, spares
        self._published: dict[BufferKey, tuple[RankBuffer, PublishedRegion]] = {}
        self._spare: list[PublishedRegion] = []
        self._lock = threading.Lock()

    def publish(self, key: BufferKey, flat: Any) -> RankBuffer:
        """Copy `flat` (a buffer, or a list of them, laid end to end) into a region of its own, and describe it.

        Buffers are numpy arrays, torch tensors or anything with the buffer protocol, contiguous; none may change
        during the call. Raises Misuse if the key was published before: what was published is immutable.
        """
        parts = [as_bytes(part) for part in (flat if isinstance(flat, list | tuple) else [flat])]
        nbytes = sum(part.nbytes for part in parts)
        with self._lock:
            if key in self._published:
                raise Misuse(f"{key} was published before")
            region = self._take(nbytes)
            target, start = region.array(), 0
            for part in parts:
                np.copyto(target[start : start + part.nbytes], part)
                start += part.nbytes
            peer = self._session.peer
            digest = digest_of(target)
            buffer = RankBuffer(self._rank, peer.session, region.address, nbytes, digest, peer.incarnation, peer.beacon)
            self._published[key] = (buffer, region)
            return buffer

    def _take(self, nbytes: int) -> PublishedRegion:
        for index, region in enumerate(self._spare):
            if region.nbytes == nbytes:
                return self._spare.pop(index)
        return self._session.allocate(nbytes)

    def retire(self, keep: Iterable[BufferKey]) -> list[BufferKey]:
        """Give up every buffer whose key is not in `keep` (the current ones and the leased ones, from the ledger).

        Returns the retired keys, oldest publication first. Their memory is reused or freed from now on; a straggler
        that still pulls one of them sees a digest mismatch.
        """
        kept = frozenset(keep)
        with self._lock:
            retired = [key for key in self._published if key not in kept]
            for key in retired:
                _, region = self._published.pop(key)
                self._spare.append(region)
            while len(self._spare) > self._spares:
                self._spare.pop(0).close()
            return retired

    def published(self) -> dict[BufferKey, RankBuffer]:
        """The buffers that can be pulled now, oldest first."""
        with self._lock:
            return {key: buffer for key, (buffer, _) in self._published.items()}

    def array(self, key: BufferKey) -> Bytes:
        """A read-only view of a published buffer (uint8 [nbytes]), valid until its key is retired."""
        with self._lock:
            view = self._published[key][1].array().view()
        view.flags.writeable = False
        return view
