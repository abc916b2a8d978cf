"""`gyre doctor engine URL`: does this server give what a run records?

Owns the questions. Invariants: it only samples and aborts its own calls, so a serving engine may be asked; no id
outside the vocabulary is ever sent, for that ends a server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import aiohttp

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineError, EngineUnauthorized
from gyre.engines.types import GenerateRequest, Generation, new_rid
from gyre.launch.findings import Finding, failure, ok, warning
from gyre.proxy.families import family

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
DRAWS = 32
LONG = 2000
EXACT, CLOSE = 1e-3, 0.1
"""Log-probabilities that agree; that differ as those of bfloat16 do, between one batch and another."""
REPLIES = {
    "qwen3": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "llama3": '{"name": "bash", "parameters": {"command": "ls"}}',
    "qwen3-coder": "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
}
REPLIES["qwen3.5"] = REPLIES["qwen3-coder"]


async def examine(url: str, keys: dict[str, str], template: str) -> AsyncIterator[Finding]:
    """Findings about the engine at `url`; `keys` as in a run's key file, or empty."""
    async with aiohttp.ClientSession() as session:
        client = EngineClient(url, session, keys.get("api_key"), keys.get("admin_key"))
        try:
            info = await client.model_info()
        except EngineError as error:
            yield failure(f"{url}: {error}", "start the server first, and give its keys with --key-file")
            return
        yield ok(f"serves {info.get('model_path', '?')} under version {info.get('weight_version', '?')!r}")
        for question in (ids, temperatures, aborting, versions):
            try:
                yield await question(client)
            except EngineError as error:
                yield failure(f"{question.__name__}: {error}", "see the server's log")
    yield parser(template)


def _ask(count: int, **more: object) -> GenerateRequest:
    fields = {"input_ids": PROMPT, "rid": new_rid(secrets.token_hex), "ignore_eos": True, **more}
    return GenerateRequest(max_new_tokens=count, **fields)  # type: ignore[arg-type]


async def ids(client: EngineClient) -> Finding:
    """Ids come back with their log-probabilities, and scoring the same ids gives the same."""
    got = await client.generate_once(_ask(16))
    scores = (await client.score(PROMPT + got.output_ids))[len(PROMPT) - 1 :]
    worst = max(abs(a - b) for a, b in zip(got.logprobs, scores, strict=True))
    said = f"{len(got.output_ids)} ids with log-probabilities; scored again they differ by {worst:.1e} at most"
    if worst <= EXACT:
        return ok(said)
    if worst <= CLOSE:
        return warning(said, "usual for bfloat16; the trainer's difference will not be smaller")
    return failure(said, "what is recorded would not be what was sampled")


async def temperatures(client: EngineClient) -> Finding:
    """Log-probabilities are those of the scaled distribution: a gap at T = 1 is half of that at T = 2."""
    draws = await asyncio.gather(*(client.generate_once(_ask(1, temperature=2.0)) for _ in range(DRAWS)))
    found = {draw.output_ids[0]: draw.logprobs[0] for draw in draws}
    if len(found) < 2:
        return warning("one token was sampled every time at T = 2", "the model is too sure to tell: ask another")
    first, second = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    at_one = [(await client.score([*PROMPT, token]))[-1] for token in (first, second)]
    halves = (found[first] - found[second], (at_one[0] - at_one[1]) / 2)
    said = f"the gap of two tokens is {halves[0]:.4f} at T = 2, half of T = 1's {2 * halves[1]:.4f}"
    if abs(halves[1]) < 2 * CLOSE:
        return warning(said, "too small to tell: ask another model")
    if abs(halves[0] - halves[1]) <= CLOSE:
        return ok(said)
    return failure(
        said.replace("half of", "not half of"),
        "it returns log-probabilities before the temperature: unset SGLANG_RETURN_ORIGINAL_LOGPROB",
    )


async def aborting(client: EngineClient) -> Finding:
    """An aborted call gives what was sampled so far."""
    request = _ask(LONG)
    last: Generation | None = None
    try:
        async for chunk in client.generate(request):
            if last is None and chunk.output_ids and chunk.finish is None:
                await client.abort(request.rid)
            last = chunk if isinstance(chunk, Generation) else None
    except EngineUnauthorized as error:
        return failure(f"aborting: {error}", "give the server's admin key with --key-file")
    if last is not None and last.finish == "abort" and 0 < len(last.output_ids) < LONG:
        return ok(f"an aborted call gave the {len(last.output_ids)} tokens that it had")
    how = "did not end" if last is None else f"ended by {last.finish} with {len(last.output_ids)} tokens"
    return failure(f"an aborted call {how}", "calls could not continue on another cell")


async def versions(client: EngineClient) -> Finding:
    """Each token carries the version that the server reports."""
    reported = await client.weight_version()
    got = await client.generate_once(_ask(4))
    if got.versions == [(reported, len(got.output_ids))]:
        return ok(f"tokens carry version {reported!r}")
    return failure(f"tokens carry {got.versions}, the server reports {reported!r}", "replies would be discarded")


def parser(template: str) -> Finding:
    """The family's parser reads a canned tool call."""
    parsed = family(template).parse(REPLIES[template], False, ())
    calls = [(call.name, call.arguments) for call in parsed.calls]
    if calls == [("bash", '{"command": "ls"}')]:
        return ok(f"the {template} parser reads a tool call")
    return failure(f"the {template} parser read {calls} from a tool call", "report this")
