"""Weights and gradients over loopback, against the raw Transfer Engine and gloo, round by round in one run.

    python tests/bench/bench_transfer.py [MIB] [ROUNDS]

Medians, in GB/s (1e9 bytes), and the median share of the raw engine's speed in the same round:
  memcpy             in the pulling process
  raw engine         Mooncake's own asynchronous read of the whole buffer, polled
  transfer           the same bytes by `TransferSession.read` (liveness, chunks, quarantine)
  weight pull        by `Puller.pull`: transfer, and the digest of what has landed meanwhile
  gradient merge     a pull, and the addition to an fp32 sum
  gloo broadcast     torch.distributed, between the same two processes
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from gyre.transfer.engine import TransferSession
from gyre.transfer.manifest import RankBuffer
from gyre.transfer.publish import BufferKey, Publisher, Puller

HOST = "127.0.0.1"


def group(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def publish(nbytes: int, store: str) -> None:
    """The other process: publishes once; each line on stdin is a broadcast to take part in."""
    payload = np.random.default_rng(1).normal(size=nbytes // 4).astype(np.float32)
    with TransferSession(HOST) as session:
        buffer = Publisher(session, 0).publish(BufferKey("weights", 1, 0), payload)
        print(msgspec.json.encode(buffer).decode(), flush=True)
        group(1, store)
        for _ in sys.stdin:
            dist.broadcast(torch.from_numpy(payload), src=1)


def raw_read(session: TransferSession, buffer: RankBuffer, address: int) -> None:
    engine = session._engine
    batch = engine.batch_transfer_async_read(buffer.session, [address], [buffer.address], [buffer.nbytes])
    assert batch
    while (status := engine.transfer_check_status(batch)) == 0:
        time.sleep(0.0002)
    assert status > 0


def measure(nbytes: int, rounds: int, peer: subprocess.Popen[str], store: str) -> dict[str, list[float]]:
    assert peer.stdin is not None and peer.stdout is not None
    buffer = msgspec.json.decode(peer.stdout.readline(), type=RankBuffer)
    group(0, store)
    session, puller = TransferSession(HOST), Puller(lambda: TransferSession(HOST))
    staging = session.allocate(nbytes)
    other, total, received = np.zeros(nbytes, np.uint8), torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)

    def merge() -> None:
        total.add_(torch.frombuffer(puller.pull(buffer), dtype=torch.float32))

    def broadcast() -> None:
        peer.stdin.write("\n")
        peer.stdin.flush()
        dist.broadcast(received, src=1)

    ways: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: np.copyto(other, staging.array()),
        "raw engine": lambda: raw_read(session, buffer, staging.address),
        "transfer": lambda: session.read(buffer.peer, buffer.address, staging, nbytes),
        "weight pull": lambda: puller.pull(buffer),
        "gradient merge": merge,
        "gloo broadcast": broadcast,
    }
    session.read(buffer.peer, buffer.address, staging, nbytes)  # contact, and the memory's first touch
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order, dice = list(ways), random.Random(1)
    for number in range(rounds + 1):
        dice.shuffle(order)
        for name in order:
            began = time.perf_counter()
            ways[name]()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    session.close()
    puller.close()
    return seconds


def main(mebibytes: int = 256, rounds: int = 7) -> None:
    nbytes = mebibytes << 20
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        command = [sys.executable, __file__, "publish", str(nbytes), store]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            seconds = measure(nbytes, rounds, peer, store)
        finally:
            peer.kill()
            peer.wait()
    print(f"{mebibytes} MiB over loopback, medians of {rounds} rounds")
    for name, found in seconds.items():
        share = median(raw / own for raw, own in zip(seconds["raw engine"], found, strict=True))
        print(f"{name:16} {nbytes / median(found) / 1e9:6.2f} GB/s  {share:5.2f} x raw engine")
    sys.stdout.flush()
    os._exit(0)  # Mooncake's threads may not let the interpreter go


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        publish(int(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:]))
