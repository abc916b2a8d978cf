"""The versioned weight push: how an engine comes to serve one known set of weights.

Invariant: from the first tensor to the last check the engine is paused and reports the version `UPDATING`, so an
interrupted push never serves mixed weights and never claims a version it does not hold; the next push heals it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineRefused
from gyre.engines.shared import SharedBuckets

if TYPE_CHECKING:
    import torch

UPDATING = "updating"


def serialize_bucket(named_tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 of a plain pickle of (Hugging Face name, tensor), which SGLang loads on any platform.

    Tensors go out as contiguous CPU tensors that own exactly their bytes (a pickled view would carry its whole
    storage).
    """
    owned = [(name, _owned(tensor)) for name, tensor in named_tensors]
    stream = io.BytesIO()
    pickle.dump(owned, stream, protocol=pickle.HIGHEST_PROTOCOL)
    return base64.b64encode(stream.getbuffer()).decode("ascii")


def serialize_for_all(named_tensors: list[tuple[str, torch.Tensor]], receivers: int) -> list[str]:
    """`serialize_bucket` for each of `receivers` processes."""
    return [serialize_bucket(named_tensors)] * receivers


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous()
    if flat.untyped_storage().nbytes() != flat.numel() * flat.element_size():
        flat = flat.clone()
    return flat


def buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors, in order, into lists of at most `size` bytes; a larger tensor goes alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in named_tensors:
        need = tensor.numel() * tensor.element_size()
        if bucket and held + need > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += need
    if bucket:
        yield bucket


class Carrier(Protocol):
    """How tensors get to the engine, within an update that `push_weights` opens and closes."""

    async def prepare(self, client: EngineClient) -> None:
        """What can be refused before anything is interrupted."""

    async def carry(self, client: EngineClient, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """One bucket; when it returns, the engine has it."""

    async def finish(self) -> None:
        """Raises EngineRefused unless the engine has got everything that it holds."""


class Tensors:
    """SGLang loads the buckets itself: from shared memory with the secret `shared_by`, else from what it is sent."""

    def __init__(self, ranks: int, shared_by: str = "") -> None:
        self._ranks = ranks
        self._serialize = SharedBuckets(shared_by).serialize if shared_by else serialize_for_all

    async def prepare(self, client: EngineClient) -> None:
        """Nothing to ask."""

    async def carry(self, client: EngineClient, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Serialized once for each tensor-parallel rank."""
        await client.update_tensors(await asyncio.to_thread(self._serialize, named_tensors, self._ranks))

    async def finish(self) -> None:
        """The engine itself knows what it has loaded."""


async def push_weights(
    client: EngineClient,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: str,
    bucket_bytes: int,
    tensor_parallel: int = 1,
    shared_by: str = "",
    carrier: Carrier | None = None,
) -> str:
    """Make the engine serve exactly `named_tensors` under `version`; return the engine's checksum of them.

    `shared_by`: the secret by which SGLang on this node takes them from shared memory; without one they are sent.
    `carrier` is another way than both. Requests in flight end with partial output. On any error the engine stays paused
    under the version `UPDATING`: push again. Raises EngineUnavailable and EngineRefused.
    """
    carrier = carrier or Tensors(tensor_parallel, shared_by)
    await carrier.prepare(client)
    await client.pause("abort")
    await client.wait_idle()
    await client.set_version(UPDATING)
    await _begin(client)
    for bucket in buckets(named_tensors, bucket_bytes):
        await carrier.carry(client, bucket)
    await carrier.finish()
    await client.end_weight_update()
    await client.flush_cache()
    await client.set_version(version)
    checksum = await client.weights_checksum()
    await client.resume_generation()
    return checksum


async def _begin(client: EngineClient) -> None:
    """Begin an update, closing first the one that an interrupted push left open."""
    try:
        await client.begin_weight_update()
    except EngineRefused as refusal:
        if refusal.status != 400:
            raise
        await client.end_weight_update()
        await client.begin_weight_update()
