"""Weights by Mooncake: a trainer's rank writes them into a running engine's memory, wherever that engine runs.

Owns the session and the staging memory of one push. Invariants: each bucket is read back and compared before the next
one, so what the engine is told to serve is what was sent; a transfer that fails is the engine's failure; nothing is
kept from one push to the next, for the engine may be another by then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineUnavailable
from gyre.engines.sglang.placement import Coverage, Heads, Part, parts
from gyre.engines.types import RankMemory
from gyre.training.architecture import read_architecture
from gyre.transfer.engine import Piece, TransferSession
from gyre.transfer.errors import TransferFailed
from gyre.transfer.manifest import Peer
from gyre.transfer.memory import Region

ALIGNED = 64
"""Bytes: any dtype may begin there."""
NO_BEACON = 0
"""SGLang's engine has no beacon of ours: that it lives is what its HTTP server says, a moment before."""


class Placing:
    """A `Carrier` of one push into an engine of `ranks` tensor-parallel ranks, whose weights are of `dtype`."""

    def __init__(self, host: str, model: Path, ranks: int, dtype: torch.dtype) -> None:
        architecture = read_architecture(model)
        self._heads = Heads(architecture.kv_heads, architecture.experts)
        self._ranks, self._dtype = ranks, dtype
        self._session = TransferSession(host)
        self._source: Region | None = None
        self._back: Region | None = None
        self._memory: list[RankMemory] = []
        self._coverage = Coverage([])

    async def prepare(self, client: EngineClient) -> None:
        """Ask where the parameters of each rank lie."""
        self._memory = [await client.memory(rank) for rank in range(self._ranks)]
        self._coverage = Coverage(self._memory)

    async def carry(self, client: EngineClient, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write, read back, compare."""
        await asyncio.to_thread(self._place, named_tensors)

    async def finish(self) -> None:
        """Every parameter of the engine must have been written."""
        self._coverage.check()

    def _place(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        found = [
            part
            for name, tensor in named_tensors
            for part in parts(name, tensor.detach().to(self._dtype), self._memory, self._heads)
        ]
        pieces, end = self._lay_out(found)
        source, back = self._staging(end)
        for part, piece in zip(found, pieces, strict=True):
            _bytes(source, piece).view(self._dtype).view(part.tensor.shape).copy_(part.tensor)
            self._coverage.add(part)
        try:
            for rank, there in enumerate(self._memory):
                peer = Peer(there.session, there.session, NO_BEACON)
                mine = [piece for part, piece in zip(found, pieces, strict=True) if part.rank == rank]
                self._session.write(peer, source, mine)
                self._session.gather(peer, back, mine)
        except TransferFailed as error:
            raise EngineUnavailable(f"weights could not be written: {error}") from error
        for part, piece in zip(found, pieces, strict=True):
            if not torch.equal(_bytes(source, piece), _bytes(back, piece)):
                raise EngineUnavailable(f"{part.parameter} of rank {part.rank} has not what was written there")

    def _lay_out(self, found: list[Part]) -> tuple[list[Piece], int]:
        """Side by side in staging memory; and the bytes that takes."""
        pieces, end = [], 0
        for part in found:
            there = self._memory[part.rank].parameters[part.parameter]
            pieces.append(Piece(end, there.address + part.start * there.element_bytes, part.tensor.nbytes))
            end += -(-part.tensor.nbytes // ALIGNED) * ALIGNED
        return pieces, end

    def _staging(self, nbytes: int) -> tuple[Region, Region]:
        """Two regions of at least `nbytes`."""
        if self._source is None or self._back is None or self._source.nbytes < nbytes:
            for region in (self._source, self._back):
                if region is not None:
                    region.close()
            self._source, self._back = self._session.allocate(nbytes), self._session.allocate(nbytes)
        return self._source, self._back

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()


def _bytes(region: Region, piece: Piece) -> torch.Tensor:
    return torch.from_numpy(region.array()[piece.offset : piece.offset + piece.nbytes])
