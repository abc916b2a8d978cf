"""The one place that speaks to Mooncake: a session that registers memory, pulls from peers and writes to them.

Owns an engine of this process, its registrations, and what it knows of peers. Invariant: whatever a peer does (gone,
frozen, restarted on its port), a transfer ends within its timeouts, and memory that a failed one could still write or
read is never used again. Status calls are made with live ids of one-entry batches only, never with 0 or a finished
id; they sleep between polls, since Mooncake's own waiting burns a core. Measured for Mooncake 0.3.13.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from gyre.errors import UserError
from gyre.transfer.beacon import Beacon, ask
from gyre.transfer.environment import Protocol, Timeouts, load_engine_class, refuse_silent_tcp
from gyre.transfer.errors import Misuse, SessionStale, TransferFailed
from gyre.transfer.manifest import Peer
from gyre.transfer.memory import QuarantinedRegion, Region, aligned, as_bytes

CHUNK = 64 << 20  # bytes of one batch id: bounds what Timeouts.transfer has to cover
IN_FLIGHT = 2  # batch ids at once, of one entry each (the engine's limit is 1024 entries)
_POLL = (0.0002, 0.002)  # seconds between status calls: first, longest
_LIVENESS_EVERY = 0.25  # seconds between two calls of the caller's liveness check

Alive = Callable[[], bool]
Landed = Callable[[int, int], None]


class Piece(NamedTuple):
    """Bytes that move together: `nbytes` between `offset` in a region of ours and the peer's `address`."""

    offset: int
    address: int
    nbytes: int


class TransferSession:
    """An engine that serves its registered memory at `peer`, and pulls from others. Close it when done.

    `host` is the address that peers reach; Mooncake itself listens on every interface, without authentication.
    `protocol` "rdma" is refused (UserError) where no RDMA device, or not every one of `devices` ("a,b"; "" = any),
    exists; "tcp" never uses RDMA. `incarnation` defaults to a fresh random name. `clock` and `sleep` are handed in.
    Use one session to publish and another to pull (see `Puller`): a pulling one may have to be replaced.
    """

    def __init__(
        self,
        host: str,
        protocol: Protocol = "tcp",
        devices: str = "",
        *,
        timeouts: Timeouts | None = None,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self._clock, self._sleep = clock, sleep
        self._pid = os.getpid()
        self._engine: Any = _start_engine(host, protocol, devices, self.timeouts)
        self._regions: dict[int, Region] = {}
        self._known: dict[str, str] = {}  # session -> incarnation that the engine's caches are about
        self._contacted: set[str] = set()  # sessions whose first contact succeeded: no call to them blocks any more
        self._hostages: list[object] = []  # memory that must outlive a hanging first contact
        self._lock = threading.RLock()  # one pull or registration at a time
        self._broken = ""
        self.quarantined: list[QuarantinedRegion] = []
        incarnation = incarnation or uuid.uuid4().hex
        self._beacon = Beacon(host, incarnation)
        self.peer = Peer(f"{host}:{self._engine.get_rpc_port()}", incarnation, self._beacon.port)
        self._scratch = self.allocate(1)

    # ---- memory ----

    def allocate(self, nbytes: int) -> Region:
        """A region of fresh host memory, uninitialised. Raises Misuse, or OSError if registration fails."""
        memory = aligned(nbytes)
        return self._register(Region(memory, memory.base, self._unregister))

    def adopt(self, buffer: Any) -> Region:
        """A region over the caller's host memory (numpy, torch, buffer protocol), kept alive until it is closed.

        Raises Misuse, OSError if registration fails (such as memory that is registered already), ValueError for
        memory that cannot be written in place.
        """
        memory = as_bytes(buffer)
        if not memory.flags.writeable:
            raise ValueError("a region needs writable memory")
        device = getattr(buffer, "device", None)
        if device is not None and str(device) != "cpu":
            raise ValueError(f"a region needs host memory, not {device}: copy it to the host first")
        return self._register(Region(memory, buffer, self._unregister))

    def _register(self, region: Region) -> Region:
        self._check_process()  # before the lock: in a forked child somebody may hold it for ever
        with self._lock:
            self._check_usable()
            if region.nbytes:
                code = self._engine.register_memory(region.address, region.nbytes)
                if code != 0:
                    raise OSError(f"Mooncake cannot register {region.nbytes} bytes (code {code}; memlock limit?)")
            self._regions[id(region)] = region
            return region

    def _unregister(self, region: Region) -> None:
        self._check_process()
        with self._lock:
            if self._engine is not None and region.nbytes:
                code = self._engine.unregister_memory(region.address)
                if code != 0:
                    raise OSError(f"Mooncake cannot unregister {region.nbytes} bytes (code {code})")
            self._regions.pop(id(region), None)

    def _quarantine(self, region: Region, reason: str) -> None:
        self._regions.pop(id(region), None)
        kept = region._drop("quarantined")
        self.quarantined.append(QuarantinedRegion(region.address, region.nbytes, reason, kept))

    # ---- transfers ----

    def check_peer(self, peer: Peer, alive: Alive | None = None) -> None:
        """Raise TransferFailed unless `peer` runs now, with its incarnation, and SessionStale if this session cannot
        reach it because an earlier incarnation lived at its address. Never blocks for longer than the timeouts. A peer
        without a beacon (0: it is no session of gyre's) is judged by `alive` alone."""
        self._check_process()
        with self._lock:
            self._check_usable()
            if alive is not None and not alive():
                raise TransferFailed(f"peer {peer.session} is declared lost")
            answer = ask(peer.host, peer.beacon, self.timeouts.liveness) if peer.beacon else peer.incarnation
            if answer != peer.incarnation:
                raise TransferFailed(f"peer {peer.session} restarted: incarnation {answer}, not {peer.incarnation}")
            if self._known.get(peer.session, peer.incarnation) != peer.incarnation:
                raise SessionStale(f"this session knew an earlier incarnation at {peer.session}")

    def read(
        self,
        peer: Peer,
        address: int,
        into: Region,
        nbytes: int,
        *,
        alive: Alive | None = None,
        landed: Landed | None = None,
    ) -> None:
        """Pull `nbytes` at the peer's `address` into the start of `into`.

        `alive` is the caller's own judgement of the peer, asked before and during the pull. `landed(start, size)` is
        told of each chunk, in order, once it is there and while later ones move. Raises TransferFailed
        (peer gone, frozen, lost or slow); once bytes may have moved, `into` is quarantined. Raises SessionStale
        (open another session; `into` untouched) and Misuse (a closed, foreign, busy or too small region).
        """
        self._move(peer, into, [Piece(0, address, nbytes)], False, alive, landed)

    def gather(self, peer: Peer, into: Region, pieces: Sequence[Piece], *, alive: Alive | None = None) -> None:
        """Pull pieces of the peer's memory to where they belong in `into`. Raises as `read` does."""
        self._move(peer, into, pieces, False, alive, None)

    def write(self, peer: Peer, source: Region, pieces: Sequence[Piece], *, alive: Alive | None = None) -> None:
        """Write pieces of `source` into the peer's memory. Raises as `read` does; after a failure bytes may be there,
        or come later, so what the peer has is unknown until it has ended or was written and read anew."""
        self._move(peer, source, pieces, True, alive, None)

    def _move(
        self,
        peer: Peer,
        region: Region,
        pieces: Sequence[Piece],
        writing: bool,
        alive: Alive | None,
        landed: Landed | None,
    ) -> None:
        self._check_process()
        with self._lock:
            self._check_usable()
            if self._regions.get(id(region)) is not region or region.state != "live":
                raise Misuse(f"this is not a live region of this session ({region.state})")
            for piece in pieces:
                if piece.nbytes < 0 or piece.offset < 0 or piece.offset + piece.nbytes > region.nbytes:
                    raise Misuse(f"{piece.nbytes} bytes at {piece.offset} do not fit a region of {region.nbytes}")
            self.check_peer(peer, alive)
            pieces = [piece for piece in pieces if piece.nbytes]
            if not pieces:
                return
            if peer.session not in self._contacted:
                self._first_contact(peer, pieces[0].address)
            region.state = "busy"
            try:
                self._move_chunks(peer, region.address, pieces, writing, alive, landed)
            except BaseException as error:  # an interrupt too leaves transfers in flight: quarantine, and pass it on
                self._quarantine(region, str(error))
                raise
            region.state = "live"

    def _first_contact(self, peer: Peer, address: int) -> None:
        """Shake hands by pulling one byte into scratch, in a thread: a peer that freezes now blocks it for 60 s."""
        self._known[peer.session] = peer.incarnation
        outcome: list[int] = []
        box = [self._engine]  # no other frame may hold the engine: close() counts on it
        arguments = (box, self._hostages, outcome, peer.session, self._scratch.address, address)
        thread = threading.Thread(target=_contact, args=arguments, name="transfer-contact", daemon=True)
        thread.start()
        thread.join(self.timeouts.contact)
        if thread.is_alive():
            self._broken = f"first contact with {peer.session} hangs"
            raise TransferFailed(f"{self._broken}: it froze; this session needs a successor")
        if not outcome or outcome[0] == 0:
            raise TransferFailed(f"peer {peer.session} refused the first contact")
        self._finish(outcome[0], peer, None)  # if it fails, its byte can still land: in scratch, where it may
        self._contacted.add(peer.session)

    def _move_chunks(
        self,
        peer: Peer,
        base: int,
        pieces: Sequence[Piece],
        writing: bool,
        alive: Alive | None,
        landed: Landed | None,
    ) -> None:
        submit = self._engine.batch_transfer_async_write if writing else self._engine.batch_transfer_async_read
        pending: deque[tuple[int, int, int]] = deque()

        def finish() -> None:
            batch, start, size = pending.popleft()
            self._finish(batch, peer, alive)
            if landed is not None:
                landed(start, size)

        for offset, address, nbytes in pieces:
            for start in range(0, nbytes, CHUNK):
                if len(pending) == IN_FLIGHT:
                    finish()
                size = min(CHUNK, nbytes - start)
                batch = submit(peer.session, [base + offset + start], [address + start], [size])
                if batch == 0:  # and a status call with id 0 would crash the process
                    raise TransferFailed(f"peer {peer.session} refused a transfer")
                pending.append((batch, offset + start, size))
        while pending:
            finish()

    def _finish(self, batch: int, peer: Peer, alive: Alive | None) -> None:
        """Wait, sleeping, until the batch is done; its id is never used again afterwards."""
        deadline = self._clock() + self.timeouts.transfer
        ask_next = self._clock() + _LIVENESS_EVERY
        pause = _POLL[0]
        while True:
            status = self._engine.transfer_check_status(batch)
            if status > 0:
                return
            if status < 0:
                raise TransferFailed(f"peer {peer.session} failed in the middle of a transfer (status {status})")
            now = self._clock()
            if now >= deadline:
                raise TransferFailed(f"peer {peer.session} was too slow: no chunk in {self.timeouts.transfer} s")
            if alive is not None and now >= ask_next:
                if not alive():
                    raise TransferFailed(f"peer {peer.session} was declared lost in the middle of a transfer")
                ask_next = now + _LIVENESS_EVERY
            self._sleep(pause)
            pause = min(_POLL[1], pause * 1.5)

    # ---- life ----

    @property
    def usable(self) -> bool:
        """False once closed, or once a hanging first contact made a successor necessary."""
        return self._engine is not None and not self._broken

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Misuse("a transfer session does not survive fork(): spawn the process and open its own")

    def _check_usable(self) -> None:
        if self._engine is None:
            raise Misuse("the transfer session is closed")
        if self._broken:
            raise SessionStale(self._broken)

    def close(self) -> None:
        """End the engine, then let go of all its memory, the quarantined too. Idempotent."""
        self._check_process()
        with self._lock:
            if self._engine is None:
                return
            self._beacon.close()
            self._engine = None  # the only reference: its destructor stops its threads, and only then may memory go
            for region in self._regions.values():
                self._hostages.append(region._drop("closed"))
            self._hostages.extend(self.quarantined)
            self._hostages = []  # unless a hanging first contact still holds the engine, and with it this list
            self._regions.clear()
            self.quarantined.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _contact(box: list[Any], hostages: list[object], outcome: list[int], session: str, local: int, remote: int) -> None:
    """Thread of a first contact: holds engine and memory until the call returns, and lets the engine go first."""
    outcome.append(box[0].batch_transfer_async_read(session, [local], [remote], [1]))
    box.clear()
    hostages.clear()


def _start_engine(host: str, protocol: Protocol, devices: str, timeouts: Timeouts) -> Any:
    engine = load_engine_class(protocol, timeouts)()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
    if code != 0:
        raise UserError(f"Mooncake does not start on {host} (code {code}): is this an address of this machine?", 1)
    if protocol == "rdma":
        refuse_silent_tcp(engine.get_local_topology(), devices, host)
    return engine
