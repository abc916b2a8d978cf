"""The snapshot: a fold of the journals with the offsets it reached.

Owns the file `snapshot`. Invariants: it is a cache: absent, old or unreadable, it costs time and nothing else. The
executions of settled groups (consumed into a packed step), by far the most of a long run, are encoded once, in chunks
that are written again as they are and decoded only when somebody asks for one of them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import msgspec

from gyre.ledger import events as ev
from gyre.ledger.files import write_atomic
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import Execution, RunState, execution_names

SNAPSHOT_VERSION = 2

_TOUCHING = (ev.Started, ev.Finished)
"""Lines about an execution that may come after it was settled: from an attempt that was given up for lost."""

_decode_chunk = msgspec.msgpack.Decoder(dict[str, Execution]).decode


class Snapshot(msgspec.Struct, frozen=True):
    version: int
    offsets: dict[str, Any]
    settled: list[bytes]
    """Chunks: msgpack of name -> Execution."""
    frozen: set[str]
    """The groups whose executions are in the chunks."""
    state: RunState
    """With the other executions."""


class Executions(dict[str, Execution]):
    """All executions, those of the chunks decoded when one of them is first asked for.

    Every question but `executions[name]` of one that is at hand decodes them all.
    """

    def __init__(self, at_hand: dict[str, Execution], chunks: list[bytes]) -> None:
        super().__init__(at_hand)
        self._chunks = chunks

    def at_hand(self) -> dict[str, Execution]:
        return {name: dict.__getitem__(self, name) for name in dict.__iter__(self)}

    def _decode(self) -> None:
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            for name, execution in _decode_chunk(chunk).items():
                self.setdefault(name, execution)

    def __missing__(self, name: str) -> Execution:
        if not self._chunks:
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
        self._settled: list[bytes] = []
        self._frozen: set[str] = set()

    def load(self) -> tuple[RunState, dict[str, Any]] | None:
        """The state and the offsets of the tail, or None: then everything is read."""
        try:
            saved = msgspec.msgpack.decode(self._run.snapshot.read_bytes(), type=Snapshot)
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        if saved.version != SNAPSHOT_VERSION:
            return None
        self._settled, self._frozen = saved.settled, saved.frozen
        saved.state.executions = Executions(saved.state.executions, list(saved.settled))
        return saved.state, saved.offsets

    def folded(self, event: Any) -> None:
        """Every line that was folded: an execution that changes after it was settled is encoded again, with all."""
        if isinstance(event, _TOUCHING) and event.execution.rpartition("-")[0] in self._frozen:
            self.forget()

    def forget(self) -> None:
        self._settled, self._frozen = [], set()

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
            self._settled.append(msgspec.msgpack.encode({name: executions[name] for name in names}))
            self._frozen.update(settled)
        at_hand = executions.at_hand() if isinstance(executions, Executions) else executions
        rest = {name: found for name, found in at_hand.items() if found.group not in self._frozen}
        saved = Snapshot(
            SNAPSHOT_VERSION,
            offsets,
            self._settled,
            self._frozen,
            msgspec.structs.replace(state, executions=rest),
        )
        write_atomic(self._run.snapshot, msgspec.msgpack.encode(saved))
