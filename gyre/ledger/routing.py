"""Which experts each token of a turn went to: rows beside the turns, for replay of the routing in training.

Owns `trajectories/<writer>/<incarnation>.routing.arrows`, framed as a growing shard (shard_files.py), and its schema.
Invariant: the record of a turn is with the operating system before the turn's own row; so a record may lack its turn
(its writer died in between), never a turn its record. Only runs that ask for it have the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gyre.ledger.files import ledger_writes
from gyre.ledger.growing import GrowingFile, write_whole
from gyre.ledger.layout import RunFolder
from gyre.ledger.shard_files import batch_message, parse_stream, read_from, stream_start

SCHEMA_VERSION = 1
ROUTING_FILES = "[1-9]*.routing.arrows"
NO_EXPERTS = 0xFFFF
"""In a table of experts' numbers: none is recorded for this position."""

ARROW_SCHEMA = pa.schema(
    [
        ("execution", pa.string()),
        ("attempt", pa.int32()),
        ("turn", pa.int32()),
        ("start", pa.int32()),
        ("layers", pa.int32()),
        ("chosen", pa.int32()),
        ("item_size", pa.int32()),
        ("experts", pa.large_binary()),
    ],
    metadata={"gyre.table": "routing", "gyre.schema": str(SCHEMA_VERSION)},
)


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """A model's layers of experts: `layers` layers of `experts` experts, `chosen` of them for each token."""

    layers: int
    experts: int
    chosen: int

    @property
    def item_size(self) -> int:
        """Bytes of an expert's number: one, or two for more than 256 experts."""
        return 1 if self.experts <= 256 else 2

    @property
    def row_size(self) -> int:
        """Bytes of one token's row."""
        return self.layers * self.chosen * self.item_size

    def pack(self, numbers: npt.NDArray[np.int32], rows: int) -> bytes | None:
        """`rows` rows of experts' numbers, [rows, layers, chosen] in any shape, as they are kept (little-endian).

        None when they are not so many, or one is no expert's number.
        """
        if numbers.size != rows * self.layers * self.chosen:
            return None
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.experts):
            return None
        return numbers.astype(f"<u{self.item_size}").tobytes()


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's record: rows for positions start, start + 1, ... of its whole sequence.

    The last sampled token has none (it went through no layer), nor have others at the end when the call was left in
    mid-stream. `experts`: the rows, each [layers, chosen] numbers of `item_size` bytes, unsigned, little-endian.
    """

    execution: str
    attempt: int
    turn: int
    start: int
    layers: int
    chosen: int
    item_size: int
    experts: bytes

    @property
    def rows(self) -> int:
        """Positions that have their experts here."""
        return len(self.experts) // (self.layers * self.chosen * self.item_size)

    def table(self) -> npt.NDArray[np.uint16]:
        """[rows, layers, chosen]"""
        numbers = np.frombuffer(self.experts, dtype=f"<u{self.item_size}")
        return numbers.astype(np.uint16).reshape(-1, self.layers, self.chosen)


class RoutingWriter(GrowingFile):
    """Appends records for one incarnation of a writer, beside its shards, whose folder is there."""

    def __init__(self, run: RunFolder, writer: str, incarnation: int) -> None:
        super().__init__(run.shard_dir(writer))
        with ledger_writes(self._folder):
            self._start(run.routing_path(writer, incarnation), stream_start(ARROW_SCHEMA))

    def append(self, routing: Routing) -> None:
        """Hands one record to the operating system before it returns."""
        fields = ((field, getattr(routing, field.name)) for field in ARROW_SCHEMA)
        arrays = [pa.array([value], type=field.type) for field, value in fields]
        with self._writing():
            write_whole(self._fd, batch_message(pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)))


class RoutingReader:
    """Follows the records of one writer, all its incarnations. One thread uses it."""

    def __init__(self, run: RunFolder, writer: str) -> None:
        self._folder = run.shard_dir(writer)
        self._read: dict[Path, int] = {}

    def poll(self) -> list[Routing]:
        """The whole records that came since the last poll, one incarnation after the other; a torn tail is left for the
        next one, and does not count when none comes.

        Raises UserError for a file of another schema.
        """
        out: list[Routing] = []
        for _, path in sorted((int(path.name.partition(".")[0]), path) for path in self._folder.glob(ROUTING_FILES)):
            offset = self._read.get(path, 0)
            batches, used = parse_stream(read_from(path, offset) or b"", path, offset == 0, ARROW_SCHEMA)
            self._read[path] = offset + used
            out += (Routing(**row) for batch in batches for row in batch.to_pylist())
        return out


def read_routing(run: RunFolder, writer: str) -> Iterator[Routing]:
    """Every whole record of a writer, as `RoutingReader` gives them."""
    yield from RoutingReader(run, writer).poll()
