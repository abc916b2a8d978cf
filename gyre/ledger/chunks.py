"""One chunk file of a checkpoint's array: raw little-endian bytes, as Zarr's uncompressed `bytes` codec
defines them.

Owns names, bytes and digests of chunk files. Invariant: a record is made from the bytes that were handed in
and only after the file is fsynced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from gyre.ledger.digest import new_digest

DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "float64": "float64",
    "bfloat16": "uint16",
    "int64": "int64",
}
"""dtype of the tensor -> dtype of the array: Zarr has no bfloat16."""


@dataclass(frozen=True)
class ArraySpec:
    """A global array: `chunk` divides `shape`; `dtype` is the tensor's and a key of DTYPES."""

    key: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str

    def grid(self) -> tuple[int, ...]:
        """Chunks along each dimension. ValueError when they do not divide."""
        if len(self.chunk) != len(self.shape) or any(s % c for s, c in zip(self.shape, self.chunk, strict=True)):
            raise ValueError(f"{self.key}: chunks of {self.chunk} do not divide {self.shape}")
        return tuple(s // c for s, c in zip(self.shape, self.chunk, strict=True))

    def chunk_name(self, offset: tuple[int, ...]) -> str:
        """File, relative to the checkpoint, of the chunk at element `offset`."""
        if any(o % c for o, c in zip(offset, self.chunk, strict=True)):
            raise ValueError(f"{self.key}: {offset} is no chunk's corner")
        index = [str(o // c) for o, c in zip(offset, self.chunk, strict=True)]
        return f"{self.key}/c." + ".".join(index)

    def chunk_names(self) -> set[str]:
        """Files of all chunks."""
        return {f"{self.key}/c." + ".".join(str(i) for i in index) for index in np.ndindex(*self.grid())}


@dataclass(frozen=True)
class FileRecord:
    """A file that is on disk: name relative to the checkpoint, size in bytes, digest of its content."""

    name: str
    bytes: int
    digest: str


def write_chunk(folder: Path, spec: ArraySpec, offset: tuple[int, ...], data: np.ndarray) -> FileRecord:
    """Write and fsync one chunk. `data`: any shape with the chunk's elements, dtype DTYPES[spec.dtype]."""
    expected = np.dtype(DTYPES[spec.dtype]).newbyteorder("<")
    if data.dtype != expected or data.size != prod(spec.chunk):
        raise ValueError(f"{spec.key}: a chunk is {spec.chunk} of {expected}, not {data.shape} of {data.dtype}")
    name = spec.chunk_name(offset)
    content = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    with open(folder / name, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name, content.nbytes, new_digest(content).hexdigest())


def record_of(folder: Path, name: str) -> FileRecord:
    """The record of a file as it is now."""
    digest = new_digest()
    size = 0
    with open(folder / name, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileRecord(name, size, digest.hexdigest())


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
