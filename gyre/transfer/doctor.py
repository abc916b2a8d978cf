"""The transfer check of `gyre doctor transfer`: two spawned processes move bytes over loopback or a fabric.

Owns the two little programs (`python -m gyre.transfer.doctor serve|pull`). Invariant: it measures the same session,
publisher and puller that a run uses, and leaves no process behind.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from statistics import median

import msgspec
import numpy as np

from gyre.errors import UserError
from gyre.transfer.engine import TransferSession
from gyre.transfer.environment import Protocol
from gyre.transfer.errors import DigestMismatch
from gyre.transfer.manifest import RankBuffer
from gyre.transfer.publish import BufferKey, Publisher, pull


class LoopbackReport(msgspec.Struct, frozen=True):
    """Medians over `repeats` pulls of `nbytes` bytes: GB/s (1e9 bytes) of the transfer alone, of a verified pull,
    and of a plain memory copy in the pulling process. The first, untimed pull makes the contact."""

    protocol: str
    nbytes: int
    repeats: int
    transfer: float
    verified: float
    memcpy: float


def serve(host: str, protocol: Protocol, devices: str, nbytes: int) -> None:
    """Publish seeded random bytes, print the descriptor, live until stdin ends."""
    payload = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    with TransferSession(host, protocol, devices) as session:
        buffer = Publisher(session, 0).publish(BufferKey("weights", 1, 0), payload)
        print(msgspec.json.encode(buffer).decode(), flush=True)
        sys.stdin.read()


def measure(host: str, protocol: Protocol, devices: str, repeats: int, buffer: RankBuffer) -> LoopbackReport:
    """Pull `buffer` `repeats` times and time it."""
    moved, verified, copied = [], [], []
    other = np.zeros(buffer.nbytes, np.uint8)
    with TransferSession(host, protocol, devices) as session:
        staging = session.allocate(buffer.nbytes)
        session.read(buffer.peer, buffer.address, staging, buffer.nbytes)
        for _ in range(repeats):
            start = time.perf_counter()
            session.read(buffer.peer, buffer.address, staging, buffer.nbytes)
            moved.append(time.perf_counter() - start)
            start = time.perf_counter()
            try:
                pull(session, buffer, staging)
            except DigestMismatch as error:
                raise UserError(f"transfer check: {buffer.nbytes} bytes arrived damaged over {protocol}", 1) from error
            verified.append(time.perf_counter() - start)
            start = time.perf_counter()
            np.copyto(other, staging.array())
            copied.append(time.perf_counter() - start)
    speeds = [buffer.nbytes / median(seconds) / 1e9 for seconds in (moved, verified, copied)]
    return LoopbackReport(protocol, buffer.nbytes, repeats, *speeds)


def loopback_check(
    host: str = "127.0.0.1",
    protocol: Protocol = "tcp",
    devices: str = "",
    *,
    nbytes: int = 64 << 20,
    repeats: int = 5,
    timeout: float = 120.0,
) -> LoopbackReport:
    """Move `nbytes` between two spawned processes. Raises UserError (one line) if that fails within `timeout` s."""
    common = [host, protocol, devices]
    server = _spawn("serve", *common, str(nbytes))
    assert server.stdin is not None and server.stdout is not None
    watchdog = threading.Timer(timeout, server.kill)
    watchdog.start()
    try:
        line = server.stdout.readline()
        if not line:
            server.wait(timeout)
            raise UserError(f"transfer check: the publishing process failed: {_last_line(server)}", 1)
        puller = _spawn("pull", *common, str(repeats))
        try:
            output, errors = puller.communicate(line, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"transfer check: no result within {timeout:g} s over {protocol}", 1) from error
        finally:
            puller.kill()
            puller.wait()
        if puller.returncode != 0:
            raise UserError(f"transfer check: the pulling process failed: {_last(errors)}", 1)
        return msgspec.json.decode(output, type=LoopbackReport)
    finally:
        watchdog.cancel()
        server.kill()
        server.communicate()


def _spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gyre.transfer.doctor", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return _last(process.stderr.read())


def _last(errors: str) -> str:
    lines = errors.strip().splitlines()
    return lines[-1] if lines else "no message"


def main(arguments: list[str]) -> None:
    """`serve HOST PROTOCOL DEVICES BYTES`, or `pull HOST PROTOCOL DEVICES REPEATS` with the descriptor on stdin."""
    role, host, protocol_name, devices, number = arguments
    protocol = msgspec.convert(protocol_name, Protocol)
    if role == "serve":
        serve(host, protocol, devices, int(number))
    else:
        buffer = msgspec.json.decode(sys.stdin.readline(), type=RankBuffer)
        print(msgspec.json.encode(measure(host, protocol, devices, int(number), buffer)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
