"""The digest of large bytes: weights, gradients, checkpoints.

XXH3 of 128 bits, at the speed of memory: a cryptographic one takes longer than the transfer or the write that it goes
with (SHA-256 by the processor's own instructions: 1.3 GB/s a core). It finds accidents, a torn or reused buffer or a
damaged file; it is no proof against a forger, who could as well write the manifest beside the bytes. Invariant: the
digests of such bytes that are compared come from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def new_digest(data: ReadableBuffer = b"") -> xxhash.xxh3_128:
    """A running digest; feed it with `update`, read it with `hexdigest` (32 hexadecimal digits)."""
    return xxhash.xxh3_128(data)
