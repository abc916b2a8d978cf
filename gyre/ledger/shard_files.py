"""The bytes of a trajectory shard: rows as Arrow, growing (stream format) and sealed (file format, zstd).

Owns both formats and the way between them. Invariants: a stream is the schema, then one record batch a row; each batch
carries a checksum of its content, and one that is torn or fails it counts no more than what follows it; a sealed file
holds exactly the good batches of its stream.
"""

from __future__ import annotations

import errno
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from gyre.errors import UserError
from gyre.ledger.files import written_aside
from gyre.ledger.turns import ARROW_SCHEMA, Span, Turn

_LISTS = ("context", "output", "logprobs")
_PLAIN = tuple(name for name in ARROW_SCHEMA.names if name not in (*_LISTS, "spans"))
_END_OF_STREAM = 8
"""Bytes that end a stream of Arrow: left off, since ours goes on."""
_ROW_GROUP = 1024
"""Turns a batch of a sealed file: a reader that wants few rows decompresses little."""


def turn_batch(turn: Turn) -> pa.RecordBatch:
    """One turn as a record batch of one row."""
    row = {name: getattr(turn, name) for name in (*_PLAIN, *_LISTS)}
    row["spans"] = [(span.lineage, span.version, span.length) for span in turn.spans]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[field.name]], type=field.type) for field in ARROW_SCHEMA],
        schema=ARROW_SCHEMA,
    )


def _list_rows(column: pa.ListArray) -> list[list[Any]]:
    """Rows of a list column as Python lists, by way of numpy: an order of magnitude faster than to_pylist."""
    offsets = column.offsets.to_numpy().tolist()
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[start:end].tolist() for start, end in pairwise(offsets)]


def _span_rows(column: pa.ListArray) -> list[list[Span]]:
    offsets = column.offsets.to_numpy().tolist()
    parts = [column.values.field(name).to_numpy().tolist() for name in ("lineage", "version", "length")]
    spans = [Span(*part) for part in zip(*parts, strict=True)]
    return [spans[start:end] for start, end in pairwise(offsets)]


def batch_turns(batch: pa.RecordBatch) -> list[Turn]:
    """The turns of a record batch, in order."""
    columns: dict[str, list[Any]] = {name: batch.column(name).to_pylist() for name in _PLAIN}
    columns |= {name: _list_rows(batch.column(name)) for name in _LISTS}
    columns["spans"] = _span_rows(batch.column("spans"))
    names = tuple(columns)
    return [Turn(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def check_schema(schema: pa.Schema, path: Path, wanted: pa.Schema) -> None:
    """Raises UserError when `path` is not a table of `wanted`'s name, or one of a newer gyre."""
    metadata = schema.metadata or {}
    table, known = wanted.metadata[b"gyre.table"], int(wanted.metadata[b"gyre.schema"])
    if metadata.get(b"gyre.table") != table or not metadata.get(b"gyre.schema", b"").isdigit():
        raise UserError(f"{path} is not a trajectory shard of gyre", code=1)
    version = int(metadata[b"gyre.schema"])
    if version > known:
        raise UserError(
            f"{path} has {table.decode()} of schema {version}; this gyre reads up to {known}: use a newer gyre",
            code=1,
        )
    if not schema.equals(wanted):
        raise UserError(f"{path} has other columns than schema {version} of {table.decode()}", code=1)


def _checksum(batch: pa.RecordBatch) -> dict[str, str]:
    """What a batch carries about itself. Arrow's framing has no checksum, and after the loss of a node the end of a
    file may be zeros. Over the batch as Arrow serialises it, uncompressed: the same when it is read back.
    """
    return {"gyre.crc32": f"{crc32(batch.serialize()):08x}"}


def _is_sound(batch: pa.RecordBatch, metadata: Any) -> bool:
    batch.validate(full=True)
    return metadata is not None and metadata.get(b"gyre.crc32") == _checksum(batch)["gyre.crc32"].encode()


@cache
def stream_start(schema: pa.Schema) -> bytes:
    """The first bytes of a growing file of `schema`."""
    return schema.serialize().to_pybytes()


def batch_message(batch: pa.RecordBatch) -> bytes:
    """The bytes that a batch adds to a growing file of its schema."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=_checksum(batch))
    return sink.getvalue().to_pybytes()[len(stream_start(batch.schema)) : -_END_OF_STREAM]


def parse_stream(data: bytes, path: Path, at_start: bool, schema: pa.Schema) -> tuple[list[pa.RecordBatch], int]:
    """The good batches at the start of `data`, and how many bytes they (and the schema, if at_start) take.

    `data` begins at the start of the file or behind a whole batch. Raises UserError for another schema.
    """
    start = b"" if at_start else stream_start(schema)
    source = pa.BufferReader(start + data)
    batches: list[pa.RecordBatch] = []
    used = 0
    try:
        reader = pa.ipc.open_stream(source)
        check_schema(reader.schema, path, schema)
        used = source.tell()
        while True:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            if not _is_sound(batch, metadata):
                break
            batches.append(batch)
            used = source.tell()
    except (pa.ArrowException, StopIteration, EOFError, OSError, ValueError):
        pass  # the end, or a tail that is torn or was never written out: it does not count, and may come later
    return batches, max(0, used - len(start))


def write_sealed(path: Path, batches: list[pa.RecordBatch]) -> None:
    """Writes a sealed shard: aside, fsynced, renamed. Raises LedgerWriteError when the file system refuses."""
    table = pa.Table.from_batches(batches, schema=ARROW_SCHEMA).combine_chunks()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with (
        written_aside(path) as aside,
        pa.OSFile(str(aside), "wb") as sink,
        pa.ipc.new_file(sink, ARROW_SCHEMA, options=options) as writer,
    ):
        for batch in table.to_batches(max_chunksize=_ROW_GROUP):
            writer.write_batch(batch, custom_metadata=_checksum(batch))


def read_sealed(path: Path) -> list[pa.RecordBatch]:
    """The batches of a sealed shard. Raises FileNotFoundError, or UserError when it is damaged or newer."""
    data = path.read_bytes()
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        check_schema(reader.schema, path, ARROW_SCHEMA)
        pairs = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
        sound = all(_is_sound(batch, metadata) for batch, metadata in pairs)
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}", code=1) from error
    if not sound:
        raise UserError(f"{path} is damaged: its content is not what its checksum says", code=1)
    return [batch for batch, _ in pairs]


def rows_after(batches: list[pa.RecordBatch], skip: int) -> list[pa.RecordBatch]:
    """The batches without the first `skip` rows."""
    out = []
    for batch in batches:
        if skip < batch.num_rows:
            out.append(batch.slice(skip))
        skip = max(0, skip - batch.num_rows)
    return out


def turns_of(batches: list[pa.RecordBatch]) -> list[Turn]:
    return [turn for batch in batches for turn in batch_turns(batch)]


def float32(values: list[float]) -> list[float]:
    """What a list of log-probabilities reads after a shard kept it."""
    kept: list[float] = np.asarray(values, dtype=np.float32).tolist()
    return kept


def read_from(path: Path, offset: int) -> bytes | None:
    """The bytes from `offset` on, or None when the file is gone (sealed, by us or by another node)."""
    try:
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size <= offset:
                return b""
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: removed while we held it open
            return None
        raise
