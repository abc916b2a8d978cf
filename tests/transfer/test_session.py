"""Real Mooncake sessions against real processes that are killed, frozen, restarted, and that tear their buffers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from gyre.errors import UserError
from gyre.transfer import engine
from gyre.transfer.beacon import Beacon
from gyre.transfer.engine import Piece, TransferSession
from gyre.transfer.environment import Timeouts
from gyre.transfer.errors import DigestMismatch, Misuse, SessionStale, TransferFailed
from gyre.transfer.manifest import Peer, digest_of
from gyre.transfer.publish import BufferKey, Publisher, Puller, pull

QUICK = Timeouts(liveness=1.0, contact=1.0, progress=1, transfer=10)
CHUNK = 8 << 20
LARGE = 4 * CHUNK  # twice what is in flight: the second half is asked for after the first came

pytestmark = [pytest.mark.other_process, pytest.mark.timeout(200)]


def payload(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(engine, "CHUNK", CHUNK)


class Between:
    """A clock for sessions: runs `action`, once, when the first half of a transfer was asked for."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None

    def __call__(self) -> float:
        action, self.action = self.action, None
        if action is not None:
            action()
        return time.monotonic()


def open_session(between: Between | None = None) -> TransferSession:
    return TransferSession("127.0.0.1", timeouts=QUICK, clock=between or time.monotonic)


@pytest.fixture(scope="module")
def between() -> Between:
    return Between()


@pytest.fixture(scope="module")
def session(between) -> Iterator[TransferSession]:
    """One session for most tests, as a trainer has: what one peer did must not harm the pulls from the next."""
    with open_session(between) as opened:
        yield opened


def contact(session: TransferSession, process) -> None:
    """Pull one byte, so that what follows is not the first contact."""
    region = session.allocate(1)
    session.read(process.buffer.peer, process.buffer.address, region, 1)
    region.close()


def test_pull_gives_the_published_bytes(session, start_publisher):
    nbytes = CHUNK + 12_345  # more than one batch, not a whole number of slices
    buffer = start_publisher(nbytes).buffer
    view = pull(session, buffer, session.allocate(nbytes + 7))
    assert digest_of(view) == buffer.digest == digest_of(payload(nbytes))
    assert view == payload(nbytes).data
    assert len(view) == nbytes


def test_pieces_are_written_and_gathered_where_they_belong(session):
    """Into a peer without a beacon of ours; the bytes between the pieces stay as they were."""
    nbytes = 2 * CHUNK + 77
    with open_session() as other:
        there, source, back = other.allocate(nbytes), session.allocate(nbytes), session.allocate(nbytes)
        there.array()[:] = 0
        source.array()[:] = payload(nbytes)
        back.array()[:] = 0
        peer = Peer(other.peer.session, "an engine", 0)
        pieces = [Piece(3, there.address, 5), Piece(100, there.address + 64, CHUNK + 9), Piece(0, there.address, 0)]
        session.write(peer, source, pieces)
        expected = np.zeros(nbytes, np.uint8)
        expected[:5] = payload(nbytes)[3:8]
        expected[64 : 64 + CHUNK + 9] = payload(nbytes)[100 : 100 + CHUNK + 9]
        assert np.array_equal(there.array(), expected)
        session.gather(peer, back, pieces)
        wanted = np.zeros(nbytes, np.uint8)
        wanted[3:8] = payload(nbytes)[3:8]
        wanted[100 : 100 + CHUNK + 9] = payload(nbytes)[100 : 100 + CHUNK + 9]
        assert np.array_equal(back.array(), wanted)
        with pytest.raises(Misuse, match="do not fit"):
            session.write(peer, source, [Piece(nbytes - 4, there.address, 5)])


def test_a_write_into_memory_that_is_not_the_peers_to_give_fails(session):
    """The source is never used again: what was asked for could still be sent."""
    with open_session() as other:
        there, source = other.allocate(64), session.allocate(64)
        peer, loose = Peer(other.peer.session, "an engine", 0), np.zeros(64, np.uint8)
        session.write(peer, source, [Piece(0, there.address, 64)])
        with pytest.raises(TransferFailed):
            session.write(peer, source, [Piece(0, int(loose.ctypes.data), 64)])
        assert source.state == "quarantined"
        assert not loose.any()


def test_what_landed_is_told_in_order_while_the_rest_is_on_its_way(session, start_publisher):
    nbytes = 3 * CHUNK + 5
    buffer, staging = start_publisher(nbytes).buffer, session.allocate(nbytes)
    told, expected = [], payload(nbytes)

    def landed(start: int, size: int) -> None:
        assert staging.state == "busy"
        assert (staging.array()[start : start + size] == expected[start : start + size]).all()
        told.append((start, size))

    session.read(buffer.peer, buffer.address, staging, nbytes, landed=landed)
    assert told == [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, CHUNK), (3 * CHUNK, 5)]
    with pytest.raises(ZeroDivisionError):  # what it does wrong leaves later chunks in flight
        session.read(buffer.peer, buffer.address, staging, nbytes, landed=lambda start, size: 1 // start)
    assert staging.state == "quarantined"


def test_empty_buffer_can_be_pulled(session, start_publisher):
    assert pull(session, start_publisher(0).buffer, session.allocate(0)) == b""


def test_publisher_lays_parts_end_to_end(session):
    torch = pytest.importorskip("torch")
    with open_session() as publishing:
        parts = [
            torch.arange(5, dtype=torch.bfloat16),
            np.arange(3, dtype=np.float32),
            b"xyz",
            torch.zeros(0),
        ]
        buffer = Publisher(publishing, 3).publish(BufferKey("gradients", 1, 2, 3), parts)
        expected = torch.arange(5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        expected += np.arange(3, dtype=np.float32).tobytes() + b"xyz"
        assert (buffer.rank, buffer.nbytes, buffer.digest) == (3, 25, digest_of(expected))
        assert pull(session, buffer, session.allocate(25)) == expected


def test_publisher_killed_in_the_middle(session, between, start_publisher, healthy):
    victim = start_publisher(LARGE)
    contact(session, victim)
    staging = session.allocate(LARGE)
    between.action = victim.kill
    with pytest.raises(TransferFailed, match="in the middle|refused"):
        pull(session, victim.buffer, staging)
    assert staging.state == "quarantined"
    assert session.quarantined[-1].address == staging.address
    with pytest.raises(Misuse, match="quarantined"):
        staging.view()
    with pytest.raises(Misuse, match="not a live region"):
        pull(session, healthy.buffer, staging)
    fresh = session.allocate(LARGE)
    assert fresh.address >= staging.address + LARGE or staging.address >= fresh.address + LARGE
    fresh.array()[:] = 7
    assert pull(session, healthy.buffer, session.allocate(1000)) == payload(1000, 2).data
    with pytest.raises(TransferFailed, match="does not answer"):
        pull(session, victim.buffer, fresh)
    assert fresh.state == "live"
    assert (fresh.array() == 7).all()


def test_publisher_frozen_in_the_middle(session, between, start_publisher, healthy):
    victim = start_publisher(LARGE)
    contact(session, victim)
    staging = session.allocate(LARGE)
    between.action = victim.freeze
    with pytest.raises(TransferFailed, match="in the middle"):
        pull(session, victim.buffer, staging)
    assert staging.state == "quarantined"
    fresh = session.allocate(LARGE)
    fresh.array()[:] = 7
    assert pull(session, healthy.buffer, session.allocate(1000)) == payload(1000, 2).data
    victim.thaw()  # what it still had to send goes nowhere
    assert pull(session, victim.buffer, session.allocate(LARGE)) == payload(LARGE).data
    assert (fresh.array() == 7).all()


def test_publisher_frozen_before_the_first_contact(session, start_publisher, healthy):
    victim = start_publisher(1000)
    victim.freeze()
    staging = session.allocate(1000)
    with pytest.raises(TransferFailed, match="does not answer"):
        pull(session, victim.buffer, staging)
    assert staging.state == "live"
    assert pull(session, healthy.buffer, staging) == payload(1000, 2).data


def test_publisher_frozen_between_beacon_and_first_contact(start_publisher, healthy):
    victim = start_publisher(1000)
    victim.freeze()
    decoy = Beacon("127.0.0.1", victim.buffer.incarnation)  # answers for the frozen one
    frozen = msgspec.structs.replace(victim.buffer, beacon=decoy.port)
    puller = Puller(open_session)
    with pytest.raises(TransferFailed, match="hangs"):
        puller.pull(frozen)
    assert puller.pull(healthy.buffer) == payload(1000, 2).data  # while the first session still hangs
    puller.close()
    decoy.close()


def test_peer_declared_lost_in_the_middle(start_publisher):
    between, victim, answers = Between(), start_publisher(LARGE), iter([True, False])
    with open_session(between) as session:
        contact(session, victim)
        staging = session.allocate(LARGE)
        memory = staging.array()
        between.action = victim.freeze
        with pytest.raises(TransferFailed, match="declared lost in the middle"):
            pull(session, victim.buffer, staging, alive=lambda: next(answers))
        assert staging.state == "quarantined"
        with pytest.raises(TransferFailed, match="declared lost"):
            pull(session, victim.buffer, session.allocate(LARGE), alive=lambda: False)
    memory[:] = 7  # the session is closed: its engine is gone, and with it every late write
    victim.thaw()
    victim.tell("nothing")
    assert (memory == 7).all()


def test_torn_read_is_seen(session, between, start_publisher):
    publisher = start_publisher(LARGE)
    contact(session, publisher)
    staging = session.allocate(LARGE)
    between.action = lambda: publisher.tell("tear")
    with pytest.raises(DigestMismatch):
        pull(session, publisher.buffer, staging)
    assert staging.state == "live"  # all bytes landed: nothing can come late


def test_retired_and_reused_buffer_is_seen(session, start_publisher):
    publisher = start_publisher(100_000)
    publisher.tell("retire")
    with pytest.raises(DigestMismatch):
        pull(session, publisher.buffer, session.allocate(100_000))


def test_peer_restarted_on_the_same_port(session, switchboard, start_publisher):
    puller = Puller(open_session)
    staging = session.allocate(1000)
    first = start_publisher(1000)
    before = switchboard.lead_to(first)
    assert pull(session, before, staging) == puller.pull(before) == payload(1000).data
    first.kill()
    after = switchboard.lead_to(start_publisher(1000, seed=2))
    assert after.session == before.session
    with pytest.raises(SessionStale, match="earlier incarnation"):
        pull(session, after, staging)
    assert staging.state == "live"
    session._known[after.session] = after.incarnation  # without that check, Mooncake's own cache leads to the dead one
    with pytest.raises(TransferFailed, match="in the middle|refused"):
        pull(session, after, staging)
    assert puller.pull(after) == payload(1000, 2).data
    with pytest.raises(TransferFailed, match="restarted"):
        puller.pull(msgspec.structs.replace(before, beacon=after.beacon))
    puller.close()


def test_fork_is_refused(session):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            session.allocate(10)
        except Misuse:
            try:
                open_session()
            except Misuse:
                code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.allocate(10).nbytes == 10


def test_regions_own_their_memory(session):
    other = open_session()
    mine = np.arange(50_000, dtype=np.uint8)
    region = other.adopt(mine)
    with pytest.raises(OSError, match="register"):
        other.adopt(mine)
    assert region.address == mine.ctypes.data
    region.close()
    region.close()
    with pytest.raises(Misuse, match="closed"):
        region.array()
    with pytest.raises(Misuse, match="not a live region"):
        other.read(session.peer, region.address, region, 1)
    again = other.adopt(mine)  # unregistered: so it can be registered again
    with pytest.raises(Misuse, match="not a live region"):
        session.read(other.peer, again.address, again, 1)  # somebody else's
    with pytest.raises(Misuse, match="do not fit"):
        other.read(session.peer, again.address, again, 50_001)
    with pytest.raises(ValueError, match="writable"):
        other.adopt(b"constant")
    ports = (int(other.peer.session.rpartition(":")[2]), other.peer.beacon)
    for port in ports:
        socket.create_connection(("127.0.0.1", port)).close()
    other.close()
    other.close()
    assert again.state == "closed"
    with pytest.raises(Misuse, match="session is closed"):
        other.allocate(1)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_one_setting_a_process(session):
    with pytest.raises(UserError, match="two protocols"):
        TransferSession("127.0.0.1", "rdma", timeouts=QUICK)
    with pytest.raises(UserError, match="two sets of timeouts"):
        TransferSession("127.0.0.1")
