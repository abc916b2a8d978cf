"""The snapshot: a fold of the journals with the offsets it reached.

Owns the file `snapshot`: the length of its head (8 bytes, little-endian), the head, then chunks. Invariants: it is a
cache: absent, old or unreadable, it costs time and nothing else. The executions of settled groups (consumed into a
packed step), by far the most of a long run, are encoded once, in chunks that are copied from one snapshot to the next,
and read only when somebody asks for one of them.
"""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, BinaryIO

import msgspec

from gyre.ledger import events as ev
from gyre.ledger.files import write_atomic
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import Execution, RunState, execution_names
from gyre.ledger.tail import no_collection

SNAPSHOT_VERSION = 6
_LENGTH = 8

_TOUCHING = (ev.Started, ev.Finished)
"""Lines about an execution that may come after it was settled: from an attempt that was given up for lost."""

_decode_chunk = msgspec.msgpack.Decoder(dict[str, Execution]).decode


class Head(msgspec.Struct, frozen=True):
    version: int
    offsets: dict[str, Any]
    chunks: list[int]
    """Their lengths, in bytes. A chunk is the msgpack of name -> Execution."""
    frozen: set[str]
    """The groups whose executions are in the chunks."""
    state: RunState
    """With the other executions."""


class Chunks:
    """The encoded executions of settled groups: in memory, or still in the file that they were loaded from."""

    def __init__(self, file: BinaryIO | None = None, lengths: list[int] | None = None) -> None:
        self._file = file
        self._there = lengths or []
        self._here: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._there or self._here)

    def add(self, chunk: bytes) -> None:
        self._here.append(chunk)

    def all(self) -> list[bytes]:
        """The chunks. The file may have been replaced meanwhile: it is read through its open descriptor."""
        if self._file is not None:
            self._here = [self._file.read(length) for length in self._there] + self._here
            self._file.close()
            self._file, self._there = None, []
        return self._here


class Executions(dict[str, Execution]):
    """All executions, those of the chunks decoded when one of them is first asked for.

    Every question but `executions[name]` of one that is at hand decodes them all.
    """

    def __init__(self, at_hand: dict[str, Execution], chunks: Chunks) -> None:
        super().__init__(at_hand)
        self._chunks: Chunks | None = chunks

    def at_hand(self) -> dict[str, Execution]:
        return {name: dict.__getitem__(self, name) for name in dict.__iter__(self)}

    def _decode(self) -> None:
        chunks, self._chunks = self._chunks, None
        with no_collection():
            for chunk in chunks.all() if chunks is not None else ():
                for name, execution in _decode_chunk(chunk).items():
                    self.setdefault(name, execution)

    def __missing__(self, name: str) -> Execution:
        if self._chunks is None:
            raise KeyError(name)
        self._decode()
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        self._decode()
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._decode()
        return super().__iter__()

    def __len__(self) -> int:
        self._decode()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._decode()
        return super().__eq__(other)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._decode()
        return super().keys()  # type: ignore[return-value]

    def values(self) -> ValuesView[Execution]:  # type: ignore[override]
        self._decode()
        return super().values()  # type: ignore[return-value]

    def items(self) -> ItemsView[str, Execution]:  # type: ignore[override]
        self._decode()
        return super().items()  # type: ignore[return-value]


class SnapshotStore:
    """Loads and saves the snapshot of one reader."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.forget()

    def forget(self) -> None:
        self._chunks = Chunks()
        self._frozen: set[str] = set()

    def load(self) -> tuple[RunState, dict[str, Any]] | None:
        """The state and the offsets of the tail, or None: then everything is read."""
        try:
            file = open(self._run.snapshot, "rb")  # noqa: SIM115 - its chunks are read later
        except FileNotFoundError:
            return None
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH), "little")
        try:
            with no_collection():
                head = msgspec.msgpack.decode(file.read(min(length, size)), type=Head)
        except (msgspec.DecodeError, msgspec.ValidationError):
            file.close()
            return None
        if head.version != SNAPSHOT_VERSION or _LENGTH + length + sum(head.chunks) != size:
            file.close()
            return None
        self._chunks, self._frozen = Chunks(file, head.chunks), head.frozen
        head.state.executions = Executions(head.state.executions, self._chunks)
        return head.state, head.offsets

    def folded(self, event: Any) -> None:
        """Every line that was folded: when an execution changes after it was settled, all are encoded again."""
        if isinstance(event, _TOUCHING) and event.execution.rpartition("-")[0] in self._frozen:
            self.forget()

    def save(self, state: RunState, offsets: dict[str, Any]) -> None:
        settled = [
            consumed.group
            for step in state.steps.values()
            if step.packed is not None
            for consumed in step.consumed
            if consumed.group not in self._frozen
        ]
        executions = state.executions
        if settled:
            names = [name for group in settled for name in execution_names(state.groups[group].plan)]
            self._chunks.add(msgspec.msgpack.encode({name: executions[name] for name in names}))
            self._frozen.update(settled)
        at_hand = executions.at_hand() if isinstance(executions, Executions) else executions
        rest = {name: found for name, found in at_hand.items() if found.group not in self._frozen}
        chunks = self._chunks.all()
        head = msgspec.msgpack.encode(
            Head(
                SNAPSHOT_VERSION,
                offsets,
                [len(chunk) for chunk in chunks],
                self._frozen,
                msgspec.structs.replace(state, executions=rest),
            )
        )
        write_atomic(self._run.snapshot, b"".join([len(head).to_bytes(_LENGTH, "little"), head, *chunks]))
