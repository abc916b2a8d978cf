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
from typing import TYPE_CHECKING

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


async def push_weights(
    client: EngineClient,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: str,
    bucket_bytes: int,
    tensor_parallel: int = 1,
    shared_by: str = "",
) -> str:
    """Make the engine serve exactly `named_tensors` under `version`; return the engine's checksum of them.

    `shared_by`: the secret by which SGLang on this node takes them from shared memory; without one they are sent.
    Requests in flight end with partial output. On any error the engine stays paused under the version `UPDATING`: push
    again. Raises EngineUnavailable and EngineRefused.
    """
    await client.pause("abort")
    await client.wait_idle()
    await client.set_version(UPDATING)
    await _begin(client)
    serialize = SharedBuckets(shared_by).serialize if shared_by else serialize_for_all
    for bucket in buckets(named_tensors, bucket_bytes):
        await client.update_tensors(await asyncio.to_thread(serialize, bucket, tensor_parallel))
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
