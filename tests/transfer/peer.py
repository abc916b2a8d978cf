"""A publishing process for the tests: publishes seeded bytes, obeys one command a line, ends with its stdin.

`python peer.py BYTES SEED`. Prints the descriptor as JSON, then one line after each command.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from gyre.transfer.engine import TransferSession
from gyre.transfer.publish import BufferKey, Publisher

KEY = BufferKey("weights", 1, 1)


def main(nbytes: str, seed: str) -> None:
    session = TransferSession("127.0.0.1")
    publisher = Publisher(session, 0)
    payload = np.random.default_rng(int(seed)).integers(0, 256, int(nbytes), np.uint8)
    print(msgspec.json.encode(publisher.publish(KEY, payload)).decode(), flush=True)
    for line in sys.stdin:
        if line.strip() == "tear":  # what the publisher must never do: write a published buffer
            publisher._published[KEY][1].array()[-1] ^= 1
        elif line.strip() == "retire":
            publisher.retire(keep=[])
            publisher.publish(BufferKey("weights", 1, 2), payload[::-1].copy())
        print("done", flush=True)
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
