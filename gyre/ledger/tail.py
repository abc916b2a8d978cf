"""Reading journals: following those of a live run, and whole files fast.

Owns the way from bytes to lines. Invariants: a line counts when it is whole, its checksum is right and its n is the
next one; reading stops in front of the first that is not; lines of one writer come out in order (incarnation, n), save
that a newer incarnation may speak while an older file still grows: readers decide by cuts.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.events import Event
from gyre.ledger.journal import index_pattern
from gyre.ledger.layout import RunFolder

_SUFFIX = len(b',"c":"00000000"}')
_BLOCK = 1 << 22


class Line(Struct, frozen=True, gc=False):
    """One event as it was journalled. `t`: seconds since the epoch by the writer's clock, for display only."""

    writer: str
    incarnation: int
    n: int
    t: float
    event: Any


def line_decoder(event_type: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of journal lines whose event is one of `event_type`."""
    wire = msgspec.defstruct("Wire", [("n", int), ("t", float), ("e", event_type)], gc=False)
    return msgspec.json.Decoder(wire)


def decode_lines(
    data: bytes,
    decoder: msgspec.json.Decoder[Any],
    path: Path,
    writer: str,
    incarnation: int,
    n: int,
) -> tuple[list[Line], int]:
    """The good lines at the start of `data`, the first of which must be number `n`, and how many bytes they take.

    Raises UserError for a line that is whole and sound and that this version of gyre does not know.
    """
    out: list[Line] = []
    used = 0
    decode = decoder.decode
    append = out.append
    for raw in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if raw[-_SUFFIX:] != b',"c":"%08x"}' % crc32(raw[:-_SUFFIX]):
            break
        try:
            wire = decode(raw)
        except msgspec.DecodeError as error:
            # The checksum is right, so the writer meant this: it is newer than we are.
            raise UserError(
                f"{path} line {n + 1}: {error}: it was written by another version of gyre, use that one",
                code=1,
            ) from None
        if wire.n != n:
            break
        append(Line(writer, incarnation, n, wire.t, wire.e))
        n += 1
        used += len(raw) + 1
    return out, used


@contextmanager
def no_collection() -> Iterator[None]:
    """Decoding makes many objects and no cycles: the collector would double its time (measured)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _File(Struct):
    """How far one journal was read. `idle` and `skip` count polls: a file without news is looked at less often."""

    offset: int = 0
    n: int = 0
    idle: int = 0
    skip: int = 0
    stuck: bool = False


class _Writer(Struct):
    pattern: re.Pattern[bytes]
    offset: int = 0
    files: dict[int, _File] = {}


class JournalTail:
    """Follows the journals of some writers through their indexes. One thread uses it."""

    def __init__(self, run: RunFolder, writers: Iterable[str], event_type: Any = Event) -> None:
        self._run = run
        self._decoder = line_decoder(event_type)
        self._writers: dict[str, _Writer] = {}
        for writer in writers:
            self.add_writer(writer)

    def add_writer(self, name: str) -> None:
        """Follows one more writer. Its index must exist by the next poll."""
        self._writers.setdefault(name, _Writer(index_pattern(name)))

    def poll(self) -> list[Line]:
        """The lines that came since the last poll. When it raises, no line is lost: all offsets are as before."""
        out: list[Line] = []
        moved: list[tuple[_File, int, int]] = []
        for name, state in self._writers.items():
            self._follow_index(name, state)
            for file, lines, used in reversed(self._newest_first(name, state)):
                out.extend(lines)
                moved.append((file, used, len(lines)))
        for file, used, count in moved:
            file.offset += used
            file.n += count
        return out

    def _newest_first(self, name: str, state: _Writer) -> list[tuple[_File, list[Line], int]]:
        """What is new in the files of a writer, the newest incarnation's read first (and handed out last).

        So what an incarnation wrote before its successor's line is on the disk, and read, whenever that line is.
        """
        found: list[tuple[_File, list[Line], int]] = []
        newest = max(state.files, default=0)
        for incarnation in sorted(state.files, reverse=True):
            file = state.files[incarnation]
            if file.skip > 0 and not found:
                file.skip -= 1
                continue
            lines, used = self._read(name, incarnation, file)
            if lines:
                found.append((file, lines, used))
                file.idle = file.skip = 0
            elif incarnation != newest or file.stuck:
                file.idle = min(file.idle + 1, 5)
                file.skip = 2**file.idle
        return found

    def _follow_index(self, name: str, state: _Writer) -> None:
        path = self._run.index_path(name)
        try:
            data = _read_from(path, state.offset)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: {name} is not a process of this run") from None
        end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n")[:-1]:
            match = state.pattern.fullmatch(line)  # a torn line of an incarnation that died is not a name
            if match:
                state.files.setdefault(int(match[1]), _File())
        state.offset += end

    def _read(self, writer: str, incarnation: int, file: _File) -> tuple[list[Line], int]:
        path = self._run.journal_path(writer, incarnation)
        data = _read_from(path, file.offset)
        if not data:
            file.stuck = False
            return [], 0
        with no_collection():
            lines, used = decode_lines(data, self._decoder, path, writer, incarnation, file.n)
        file.stuck = b"\n" in data[used:]
        return lines, used

    def stuck(self) -> list[tuple[str, int, int]]:
        """(writer, incarnation, offset) of files in which a whole line is bad: nothing after it will be read."""
        return [
            (name, incarnation, file.offset)
            for name, state in self._writers.items()
            for incarnation, file in sorted(state.files.items())
            if file.stuck
        ]

    def offsets(self) -> dict[str, Any]:
        """How far everything was read, as plain data for a snapshot."""
        return {
            name: {
                "index": state.offset,
                "files": {str(incarnation): [file.offset, file.n] for incarnation, file in state.files.items()},
            }
            for name, state in self._writers.items()
        }

    def restore(self, offsets: dict[str, Any]) -> None:
        """Goes on from `offsets()` of another tail of this run; writers that are not in it start at their beginning."""
        for name, saved in offsets.items():
            files = {int(key): _File(offset, n) for key, (offset, n) in saved["files"].items()}
            self._writers[name] = _Writer(index_pattern(name), saved["index"], files)


def _read_from(path: Path, offset: int) -> bytes:
    """The bytes from `offset` on; opened afresh, so that NFS asks the server what is new. Cheap without news."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size - offset
        if size <= 0:
            return b""
        pieces = []
        while size > 0 and (piece := os.pread(fd, size, offset)):
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def read_journal(path: Path, event_type: Any = Event) -> Iterator[Line]:
    """The good lines of one journal file, in order, read in blocks: for journals of a million lines."""
    stem, _, _ = path.name.rpartition(".jsonl")
    writer, _, incarnation = stem.rpartition(".")
    if not incarnation.isdigit():
        raise UserError(f"{path} is not a journal: its name is not <writer>.<incarnation>.jsonl")
    decoder = line_decoder(event_type)
    n = 0
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            data = rest + block
            with no_collection():
                lines, used = decode_lines(data, decoder, path, writer, int(incarnation), n)
            yield from lines
            n += len(lines)
            rest = data[used:]
            if b"\n" in rest:
                return  # a whole line that is bad: nothing after it counts
