"""The versioned weight push: how engines come to serve one known set of weights.

Invariant: from the first tensor to the last check the engine is paused and reports the version `UPDATING`, so an
interrupted push never serves mixed weights and never claims a version it does not hold; the next push heals it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.shared import SharedBuckets

if TYPE_CHECKING:
    import torch

UPDATING = "updating"
Answer = TypeVar("Answer")


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
    """SGLang loads the buckets itself: from shared memory, which engines of one secret share, or what it is sent."""

    def __init__(self, ranks: int, shared: SharedBuckets | None = None) -> None:
        self._ranks = ranks
        self._serialize = shared.serialize if shared is not None else serialize_for_all

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
    """`push_to_all` for one engine; return its checksum of the weights.

    `shared_by`: the secret by which SGLang on this node takes them from shared memory; without one they are sent.
    `carrier` is another way than both. Raises EngineUnavailable and EngineRefused.
    """
    carrier = carrier or Tensors(tensor_parallel, SharedBuckets(shared_by) if shared_by else None)
    try:
        (checksum,) = await push_to_all([(client, carrier)], named_tensors, version, bucket_bytes)
    except PushFailed as failed:
        raise failed.failures[0] from None
    return checksum


class PushFailed(EngineError):
    """`failures`: what each engine that did not take a push met, by its place in the order they were given."""

    def __init__(self, failures: dict[int, EngineError]) -> None:
        super().__init__("; ".join(str(error) for error in failures.values()))
        self.failures = failures


async def push_to_all(
    engines: Sequence[tuple[EngineClient, Carrier]],
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: str,
    bucket_bytes: int,
) -> list[str]:
    """Make every engine serve exactly `named_tensors` under `version`, each bucket given to all at once; return the
    engines' checksums of them.

    Requests in flight end with partial output. When an engine fails, all of them stay paused under the version
    `UPDATING`, or have the new weights: push again. Raises PushFailed.
    """
    await _each(engines, lambda client, carrier: carrier.prepare(client))
    await _each(engines, lambda client, _: _open(client))
    for bucket in buckets(named_tensors, bucket_bytes):
        await _each(engines, lambda client, carrier, bucket=bucket: carrier.carry(client, bucket))  # type: ignore[misc]
    return await _each(engines, lambda client, carrier: _close(client, carrier, version))


async def _each(
    engines: Sequence[tuple[EngineClient, Carrier]], step: Callable[[EngineClient, Carrier], Awaitable[Answer]]
) -> list[Answer]:
    """A step of all engines at once. It ends when each has done it or failed, so that none is in the middle of it."""
    answers = await asyncio.gather(*(step(*engine) for engine in engines), return_exceptions=True)
    failures = {number: answer for number, answer in enumerate(answers) if isinstance(answer, EngineError)}
    done = []
    for answer in answers:
        if not isinstance(answer, BaseException):
            done.append(answer)
        elif not isinstance(answer, EngineError):
            raise answer
    if failures:
        raise PushFailed(failures)
    return done


async def _open(client: EngineClient) -> None:
    """Until the update is open; one that an interrupted push left open is closed first."""
    await client.pause("abort")
    await client.wait_idle()
    await client.set_version(UPDATING)
    try:
        await client.begin_weight_update()
    except EngineRefused as refusal:
        if refusal.status != 400:
            raise
        await client.end_weight_update()
        await client.begin_weight_update()


async def _close(client: EngineClient, carrier: Carrier, version: str) -> str:
    """From the last bucket to the engine's checksum; then it goes on."""
    await carrier.finish()
    await client.end_weight_update()
    await client.flush_cache()
    await client.set_version(version)
    checksum = await client.weights_checksum()
    await client.resume_generation()
    return checksum
