"""One call through the routed engine, continued elsewhere when an engine dies or its cell leaves.

Invariant: the tokens of a `Sampled` were sampled one after the other, each given exactly the prompt and those
before it, by weights whose version the engine reported and which is the salt that was sent; the harness sees
one answer.

Stop strings are the proxy's affair, for log-probabilities must be those of the unbent distribution: sampling
ends once the text holds one, the tokens sampled up to there are recorded (the one that completes it is the
last), and the reply's text is cut before it. Such a turn lacks its stop token, so the next tail closes it.

Experts that tokens went to, if wanted, come with the last chunk of an engine call only. Each call asks for those
from where the known ones end, so what one call did not tell the next one does; a call that was left tells nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from gyre.engines.errors import EngineRefused, EngineUnauthorized, EngineUnavailable
from gyre.engines.types import GenerateChunk, GenerateRequest, TokenHex, new_rid
from gyre.engines.wire import expert_numbers
from gyre.ledger.routing import Mixture
from gyre.ledger.turns import Span
from gyre.proxy.routes import Route, Routes


class Engine(Protocol):
    """What is used of `gyre.engines.client.EngineClient`."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Cumulative chunks; the last one has a finish reason. EngineUnavailable, EngineRefused."""


class GenerationFailed(Exception):
    """The call cannot be completed. `partial` is what had been sampled and stands."""

    def __init__(self, message: str, partial: Sampled) -> None:
        super().__init__(message)
        self.partial = partial


class Sampled(msgspec.Struct, kw_only=True):
    """Output of a call. len(output) == len(logprobs) == sum(span.length); `finish`: stop, length, or "" while
    it goes on.

    `stop_at`: characters of the text before a stop string that was found, else None. `cached_tokens` is of
    the first engine call; `cell` of the last. `continuations` counts engine calls after the first,
    `discarded` tokens thrown away. `routing`: rows of `Mixture.row_size` bytes, for positions from the call's
    `routing_from` on, at most to the last but one.
    """

    output: array[int]
    logprobs: array[float]
    spans: list[Span]
    finish: str = ""
    stop_at: int | None = None
    cell: str = ""
    cached_tokens: int = 0
    first_token: float = 0.0
    continuations: int = 0
    discarded: int = 0
    routing: bytearray = msgspec.field(default_factory=bytearray)


def nothing_sampled() -> Sampled:
    """The start of a call."""
    return Sampled(output=array("i"), logprobs=array("d"), spans=[])


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to sample: prompt ids, at most `max_tokens` more, `stops` (strings) of the harness. `routing_from`: the
    first position whose experts are wanted, where they are.
    """

    execution: str
    prompt: array[int]
    max_tokens: int
    stops: tuple[str, ...] = ()
    routing_from: int = 0


class Generator:
    """Samples calls. `engines` makes a client for a route; `decode` gives text of ids; `now` is for display
    times only.

    A call fails after more than `fruitless` engine calls in a row that brought no token; a deadline is the
    caller's. `handover`: seconds that a call may go on after its route has gone. `patience`: seconds to wait for
    another route after the first fruitless call; doubles up to 64 times that. `mixture`: the model's experts, if the
    engines are to say which ones tokens went to.
    """

    def __init__(
        self,
        routes: Routes,
        engines: Callable[[Route], Engine],
        *,
        temperature: float,
        stop_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        token_hex: TokenHex,
        now: Callable[[], float],
        fruitless: int = 20,
        patience: float = 0.1,
        handover: float = 0.5,
        mixture: Mixture | None = None,
    ) -> None:
        self._routes = routes
        self._engines = engines
        self._temperature = temperature
        self._stop_ids = list(stop_ids)
        self._decode = decode
        self._token_hex = token_hex
        self._now = now
        self._fruitless = fruitless
        self._patience = patience
        self._handover = handover
        self.mixture = mixture

    async def sample(self, wanted: Wanted, into: Sampled) -> None:
        """Fill `into` until it is finished. Raises GenerationFailed; if cancelled, `into` holds what stands."""
        fruitless = 0
        first = True
        while not self._finished(wanted, into):
            route = await self._routes.current(wanted.execution)
            if not first:
                into.continuations += 1
            first = False
            before = len(into.output)
            try:
                reason = await self._while_routed(wanted, into, route)
            except EngineRefused as error:
                raise GenerationFailed(f"the engine refused the call: {error}", into) from error
            if into.finish:
                return
            fruitless = 0 if len(into.output) > before else fruitless + 1
            if fruitless > self._fruitless:
                raise GenerationFailed(f"{fruitless} engine calls in a row sampled nothing: {reason}", into)
            # The route usually changes now; if not, the engine may be well again soon.
            await self._routes.other(wanted.execution, route, self._patience * min(2**fruitless, 64))

    async def _while_routed(self, wanted: Wanted, into: Sampled, route: Route) -> str:
        """An engine call that ends when its route does: an engine that is draining may hold it for a whole training."""
        call = asyncio.ensure_future(self._engine_call(wanted, into, route))
        left = asyncio.ensure_future(self._routes.left(wanted.execution, route))
        try:
            await asyncio.wait({call, left}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # the engine may be about to hand over what it has sampled
                await asyncio.wait({call}, timeout=self._handover)
            if call.done():
                return call.result()
            return f"{route.cell} left rollout"
        finally:
            left.cancel()
            call.cancel()
            await asyncio.gather(left, call, return_exceptions=True)

    async def _engine_call(self, wanted: Wanted, into: Sampled, route: Route) -> str:
        """One engine call; keeps what was received. Gives the reason why the call is not finished, or ""."""
        request = GenerateRequest(
            input_ids=wanted.prompt + into.output if into.output else wanted.prompt,
            rid=new_rid(self._token_hex),
            max_new_tokens=wanted.max_tokens - len(into.output),
            temperature=self._temperature,
            stop_token_ids=self._stop_ids,
            cache_salt=route.weight_version,
            return_routed_experts=self.mixture is not None,
            routed_experts_start=self._routing_end(wanted, into),
        )
        last: GenerateChunk | None = None
        reason, seen = "", 0
        try:
            async with contextlib.aclosing(_closable(self._engines(route).generate(request))) as chunks:
                async for chunk in chunks:
                    last = chunk
                    if chunk.output_ids and not into.first_token:
                        into.first_token = self._now()
                    if wanted.stops and self._stop_found(wanted.stops, into, chunk, seen):
                        # Leaving the stream makes the engine abort the request.
                        break
                    seen = len(chunk.output_ids)
        except (EngineUnavailable, EngineUnauthorized) as error:
            # A key that is refused means that another engine took this one's place: the route will change.
            reason = str(error)
        finally:
            # Also when cancelled: what was received is the turn's.
            if last is not None:
                reason = self._keep(wanted, into, route, last) or reason
        return reason

    def _keep(self, wanted: Wanted, into: Sampled, route: Route, chunk: GenerateChunk) -> str:
        """Take a chunk's tokens over, if the weights are those that were asked for."""
        into.cell = route.cell
        if any(version != route.weight_version for version, _ in chunk.versions):
            into.discarded += len(chunk.output_ids)
            return f"engine {route.engine} of {route.cell} serves other weights than {route.weight_version}"
        if not into.output:
            into.cached_tokens = chunk.cached_tokens
        self._keep_routing(wanted, into, chunk)
        length = min(len(chunk.output_ids), wanted.max_tokens - len(into.output))
        into.output.extend(chunk.output_ids[:length])
        into.logprobs.extend(chunk.logprobs[:length])
        _add_span(into.spans, route.weight_version, length)
        if chunk.finish in ("stop", "length"):
            into.finish = chunk.finish
        self._finished(wanted, into)
        if self.mixture is not None:
            positions = len(wanted.prompt) + len(into.output) - 1 - wanted.routing_from
            del into.routing[max(0, positions) * self.mixture.row_size :]
        return "" if into.finish else "the engine aborted the call"

    def _routing_end(self, wanted: Wanted, into: Sampled) -> int:
        """The first position whose experts are wanted and not known. It is in the prompt of the next engine call."""
        return wanted.routing_from + len(into.routing) // self.mixture.row_size if self.mixture is not None else 0

    def _keep_routing(self, wanted: Wanted, into: Sampled, chunk: GenerateChunk) -> None:
        """Take over the experts of an engine call that went to its end, before its tokens are. What is not a row for
        each of its positions counts as not told.
        """
        if self.mixture is None or chunk.finish is None or chunk.routed_experts is None or not chunk.output_ids:
            return
        end = len(wanted.prompt) + len(into.output) + len(chunk.output_ids) - 1
        rows = end - self._routing_end(wanted, into)
        into.routing += self.mixture.pack(expert_numbers(chunk.routed_experts), rows) or b""

    def _finished(self, wanted: Wanted, into: Sampled) -> bool:
        """Decide by the tokens themselves; a cut call may already hold its end."""
        if wanted.stops and into.stop_at is None:
            self._cut(wanted, into)
        ended = bool(into.output) and into.output[-1] in self._stop_ids
        if into.stop_at is not None or ended:
            into.finish = "stop"
        elif len(into.output) >= wanted.max_tokens:
            into.finish = "length"
        return bool(into.finish)

    def _stop_found(self, stops: tuple[str, ...], into: Sampled, chunk: GenerateChunk, seen: int) -> bool:
        """Is there a stop string that ends among the tokens after the first `seen` of the chunk?"""
        # A token can be one byte of a character, so a stop string spans at most 4 tokens a character.
        overlap = 4 * max(len(stop) for stop in stops)
        recent = chunk.output_ids[max(0, seen - overlap) :]
        if seen < overlap:
            recent = [*into.output[-overlap:], *recent]
        return find_stop(self._decode(recent), stops) is not None

    def _cut(self, wanted: Wanted, into: Sampled) -> None:
        """End the output with the token that completes a stop string, if there is one."""
        at = find_stop(self._decode(into.output), wanted.stops)
        if at is None:
            return
        into.stop_at = at
        low, high = 1, len(into.output)
        while low < high:
            middle = (low + high) // 2
            found = find_stop(self._decode(into.output[:middle]), wanted.stops)
            low, high = (low, middle) if found is not None else (middle + 1, high)
        del into.output[low:], into.logprobs[low:]
        excess = sum(span.length for span in into.spans) - low
        into.discarded += excess
        while excess:
            span = into.spans.pop()
            left = max(0, span.length - excess)
            excess -= span.length - left
            if left:
                into.spans.append(msgspec.structs.replace(span, length=left))


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string starts in `text`."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def parse_version(weight_version: str) -> tuple[int, int]:
    """(lineage, version) of "<lineage>.<version>-<digest>". Raises ValueError."""
    numbers, _, _ = weight_version.partition("-")
    lineage, _, version = numbers.partition(".")
    return int(lineage), int(version)


def _add_span(spans: list[Span], weight_version: str, length: int) -> None:
    if not length:
        return
    lineage, version = parse_version(weight_version)
    if spans and (spans[-1].lineage, spans[-1].version) == (lineage, version):
        length += spans.pop().length
    spans.append(Span(lineage, version, length))


async def _closable(chunks: AsyncIterator[GenerateChunk]) -> AsyncGenerator[GenerateChunk, None]:
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
