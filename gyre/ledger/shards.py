"""Trajectory shards of one writer: written by its process, followed by others, sealed when full or when it died.

Owns `trajectories/<writer>/`: `index` names each shard `<incarnation>-<number>` after its file exists;
the shard is `<name>.arrows` while it grows and `<name>.arrow` once sealed.
Invariants: a turn is with the operating system before `append` returns, so it survives the process, and on the disk
after `sync`; a shard is never without one of its two files; a reader gives each turn once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from gyre.ledger.files import ledger_writes
from gyre.ledger.growing import GrowingFile, write_whole
from gyre.ledger.layout import RunFolder
from gyre.ledger.shard_files import (
    batch_message,
    parse_stream,
    read_from,
    read_sealed,
    rows_after,
    stream_start,
    turn_batch,
    turns_of,
    write_sealed,
)
from gyre.ledger.turns import ARROW_SCHEMA, Turn

MAX_ROWS = 4096
MAX_BYTES = 32 << 20

_SHARD = re.compile(rb"([1-9][0-9]*)-([0-9]{5,})")


def shard_name(incarnation: int, number: int) -> str:
    return f"{incarnation}-{number:05d}"


def _index(folder: Path) -> Path:
    return folder / "index"


def _stream(folder: Path, name: str) -> Path:
    return folder / f"{name}.arrows"


def _sealed(folder: Path, name: str) -> Path:
    return folder / f"{name}.arrow"


def _seal(folder: Path, name: str) -> None:
    """Makes the sealed file of a shard that no one writes any more, then removes the growing one."""
    stream, sealed = _stream(folder, name), _sealed(folder, name)
    if not stream.exists():
        return
    if not sealed.exists():
        batches, _ = parse_stream(stream.read_bytes(), stream, True, ARROW_SCHEMA)
        write_sealed(sealed, batches)
    stream.unlink()


class TurnWriter(GrowingFile):
    """Appends turns for one incarnation of a writer. Safe to use from several threads.

    A shard is sealed once it has `max_rows` turns or `max_bytes` bytes. Every failure raises LedgerWriteError, and so
    does each append after it.
    """

    def __init__(
        self,
        run: RunFolder,
        writer: str,
        incarnation: int,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(run.shard_dir(writer))
        self._incarnation = incarnation
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._number = 0
        self._rows = 0
        self._bytes = 0
        with ledger_writes(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._open()

    def _open(self) -> None:
        """Starts the next growing shard and, once it is there, names it in the index."""
        name = shard_name(self._incarnation, self._number)
        start = stream_start(ARROW_SCHEMA)
        self._start(_stream(self._folder, name), start)
        self._rows, self._bytes = 0, len(start)
        _append_name(_index(self._folder), name)

    def append(self, turn: Turn) -> None:
        """Hands one turn to the operating system before it returns."""
        with self._writing():
            data = batch_message(turn_batch(turn))
            write_whole(self._fd, data)
            self._rows += 1
            self._bytes += len(data)
            if self._rows >= self._max_rows or self._bytes >= self._max_bytes:
                self._end()
                self._number += 1
                self._open()

    def _end(self) -> None:
        """Also seals. Without it (a killed process) `seal_dead` does so later."""
        super()._end()
        _seal(self._folder, shard_name(self._incarnation, self._number))


def _append_name(index: Path, name: str) -> None:
    fd = os.open(index, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        # A predecessor may have died in the middle of its line: end it, so that ours stands alone.
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        write_whole(fd, (b"\n" if torn else b"") + name.encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


class _Shard(Struct):
    """How far a reader is: `offset` in the growing file, `rows` given, `done` when there will be no more."""

    offset: int = 0
    rows: int = 0
    done: bool = False


class TurnReader:
    """Follows the shards of one writer, all its incarnations. One thread uses it."""

    def __init__(self, run: RunFolder, writer: str) -> None:
        self._folder = run.shard_dir(writer)
        self._shards: dict[tuple[int, int], _Shard] = {}

    def poll(self) -> list[Turn]:
        """The turns that came since the last poll; a torn tail is left for the next one.

        Raises UserError for a damaged sealed shard or a newer schema.
        """
        for key in self._named():
            self._shards.setdefault(key, _Shard())
        out: list[Turn] = []
        for key in sorted(self._shards):
            if not self._shards[key].done:
                out.extend(turns_of(self._news(key, self._shards[key])))
        return out

    def _news(self, key: tuple[int, int], shard: _Shard) -> list[pa.RecordBatch]:
        """New batches of one shard; the sealed file is preferred. Tried twice: it may be sealed in between."""
        sealed = _sealed(self._folder, shard_name(*key))
        stream = _stream(self._folder, shard_name(*key))
        for _ in range(2):
            try:
                batches = rows_after(read_sealed(sealed), shard.rows)
                shard.done = True
            except FileNotFoundError:
                data = read_from(stream, shard.offset)
                if data is None:
                    continue
                batches, used = parse_stream(data, stream, shard.offset == 0, ARROW_SCHEMA)
                shard.offset += used
            shard.rows += sum(batch.num_rows for batch in batches)
            return batches
        return []

    def _named(self) -> list[tuple[int, int]]:
        """Shards that the index names: (incarnation, number), in order."""
        try:
            data = _index(self._folder).read_bytes()
        except FileNotFoundError:
            return []
        lines = data[: data.rfind(b"\n") + 1].split(b"\n")
        return sorted({(int(m[1]), int(m[2])) for line in lines if (m := _SHARD.fullmatch(line))})

    def _batches(self) -> list[pa.RecordBatch]:
        return [batch for key in self._named() for batch in self._news(key, _Shard())]

    def read_all(self) -> list[Turn]:
        """Every turn that is there now, in the order of (incarnation, number, row); `poll` is not moved by it."""
        return turns_of(self._batches())

    def read_execution(self, execution: str) -> list[Turn]:
        """Every turn of one execution, in the same order; no other row becomes an object."""
        batches = [batch.filter(pc.equal(batch.column("execution"), execution)) for batch in self._batches()]
        return turns_of(batches)

    def read_table(self) -> pa.Table:
        """The same as one table with `ARROW_SCHEMA`."""
        return pa.Table.from_batches(self._batches(), schema=ARROW_SCHEMA)


def seal_dead(run: RunFolder, writer: str, incarnation: int) -> int:
    """Seals what a dead incarnation left growing; returns how many shards. Turns after its cut never count.

    Raises LedgerWriteError when the file system refuses; it can be called again.
    """
    folder = run.shard_dir(writer)
    count = 0
    for key in TurnReader(run, writer)._named():
        name = shard_name(*key)
        if key[0] == incarnation and _stream(folder, name).exists():
            _seal(folder, name)
            count += 1
    return count
