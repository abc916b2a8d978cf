"""Manifests: who to pull a step's weights, or a cell's contribution, from.

Owns the descriptors and their files (`RUN/weights/*.json`). Invariant: a manifest file is complete and durable before
its name exists, and is never changed afterwards; digests in it are those of `gyre.ledger.digest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre.errors import UserError
from gyre.ledger.digest import new_digest
from gyre.ledger.files import read_json, write_atomic
from gyre.transfer.memory import as_bytes


class Peer(msgspec.Struct, frozen=True):
    """A session of another process: Mooncake's `session` ("host:port"), its incarnation, its beacon's port."""

    session: str
    incarnation: str
    beacon: int

    @property
    def host(self) -> str:
        return self.session.rpartition(":")[0]


class RankBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's immutable buffer: where it lies (`address`, `nbytes`) and what it holds (`digest`).

    `incarnation` and `beacon` name the session's life: a restarted process never has the same incarnation.
    """

    rank: int
    session: str
    address: int
    nbytes: int
    digest: str
    incarnation: str
    beacon: int

    @property
    def peer(self) -> Peer:
        return Peer(self.session, self.incarnation, self.beacon)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All ranks' buffers of one publication. `version` counts publications, `step` optimizer steps; `cell` and its
    `incarnation` published it; `number` tells the contributions of one cell in one step apart (0 for weights)."""

    kind: Literal["weights", "gradients"]
    lineage: int
    step: int
    version: int
    cell: str
    incarnation: int
    number: int
    ranks: list[RankBuffer]
    digest: str

    @property
    def version_name(self) -> str:
        """What engines and cache salts call these weights: "<lineage>.<version>-<first 16 hex of the digest>"."""
        return f"{self.lineage}.{self.version}-{self.digest[:16]}"

    @property
    def file_name(self) -> str:
        """A name that no other manifest of the run has."""
        return (
            f"{self.kind}-{self.lineage:04d}-step-{self.step:06d}-{self.cell}.{self.incarnation}-{self.number:05d}.json"
        )


def digest_of(buffer: Any) -> str:
    """The digest, 32 hexadecimal digits, of a buffer's bytes (numpy, torch or buffer protocol)."""
    return new_digest(as_bytes(buffer).data).hexdigest()


def whole_digest(ranks: Sequence[RankBuffer]) -> str:
    """The digest of a publication: over the ranks' digests in rank order."""
    ordered = sorted(ranks, key=lambda buffer: buffer.rank)
    return new_digest("".join(buffer.digest for buffer in ordered).encode()).hexdigest()


def make_manifest(
    kind: Literal["weights", "gradients"],
    *,
    lineage: int,
    step: int,
    version: int,
    cell: str,
    incarnation: int,
    number: int,
    ranks: Sequence[RankBuffer],
) -> Manifest:
    """A manifest of all ranks 0..n-1 with its digest. Raises ValueError if a rank is missing or given twice."""
    ordered = sorted(ranks, key=lambda buffer: buffer.rank)
    if [buffer.rank for buffer in ordered] != list(range(len(ordered))) or not ordered:
        raise ValueError(f"a manifest needs ranks 0..n-1 once each, got {[buffer.rank for buffer in ranks]}")
    digest = whole_digest(ordered)
    return Manifest(kind, lineage, step, version, cell, incarnation, number, ordered, digest)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the file whole and durably. Raises LedgerWriteError when the file system is full or read-only."""
    write_atomic(path, msgspec.json.encode(manifest) + b"\n")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises UserError if it is absent, malformed, or its digest is not its ranks'."""
    manifest = read_json(path, Manifest)
    if manifest.digest != whole_digest(manifest.ranks):
        raise UserError(f"{path}: its digest is not that of its ranks", code=1)
    return manifest
