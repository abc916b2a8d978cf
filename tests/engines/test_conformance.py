"""What every engine must do, told only through EngineClient: the reference engine, or real SGLang by environment."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from itertools import pairwise

import aiohttp
import pytest

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineRefused, EngineUnauthorized
from gyre.engines.push import UPDATING, push_weights, serialize_bucket
from gyre.engines.types import GenerateRequest, Generation, new_rid

from .place import Oracle, Place

CLOSE = 1e-4
LONG = 3000  # tokens of a request that a test ends itself


def middling(place: Place) -> int:
    """Tokens of a request in the middle of which a test does something, and which ends by itself.

    SGLang samples 400 of this model in a second, on a busy machine before the test has had its turn again.
    """
    return 2000 if place.real else 400


def ask(prompt: list[int], count: int = 8, **more: object) -> GenerateRequest:
    """A request that only its length ends, unless told otherwise."""
    fields = {"rid": new_rid(secrets.token_hex), "ignore_eos": True, **more}
    return GenerateRequest(input_ids=prompt, max_new_tokens=count, **fields)  # type: ignore[arg-type]


def prompts(place: Place, seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(place.vocabulary) for _ in range(length)] for length in lengths]


def near(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted, abs=CLOSE)


@pytest.fixture(autouse=True)
def same_weights(place: Place, oracle: Oracle, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test that asks for `changes` did to the weights, the next one finds those of the oracle."""
    yield
    if "changes" in request.fixturenames:
        place.drive(lambda client: push_weights(client, oracle.named(), "restored", 1 << 20))


@pytest.fixture
def changes() -> None:
    """Named by tests that change weights, pause, or release."""


async def started(client: EngineClient, request: GenerateRequest) -> asyncio.Task[Generation]:
    """The request as a task, once its first tokens are there."""
    first = asyncio.Event()

    async def body() -> Generation:
        async for chunk in client.generate(request):
            if chunk.output_ids:
                first.set()
            if isinstance(chunk, Generation):
                return chunk
        raise AssertionError("no last chunk")

    task = asyncio.create_task(body())
    await first.wait()
    return task


# -- numbers


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_logprobs_are_those_of_the_scaled_distribution(place: Place, oracle: Oracle, temperature: float) -> None:
    (prompt,) = prompts(place, 1, [37])
    got = place.drive(lambda client: client.generate_once(ask(prompt, 24, temperature=temperature)))
    assert (len(got.output_ids), got.finish, got.prompt_tokens) == (24, "length", 37)
    near(got.logprobs, oracle.logprobs(prompt, got.output_ids, temperature))


def test_temperature_zero_is_greedy(place: Place, oracle: Oracle) -> None:
    (prompt,) = prompts(place, 2, [20])
    got = place.drive(lambda client: client.generate_once(ask(prompt, 6, temperature=0.0)))
    for at, token in enumerate(got.output_ids):
        logits = oracle.logits(prompt + got.output_ids[:at])[-1]
        assert float(logits[token]) == pytest.approx(float(logits.max()), abs=CLOSE)


def test_a_batch_equals_solo_runs(place: Place, oracle: Oracle) -> None:
    """Greedy outputs and log-probabilities do not depend on what runs beside them: joins, leaves, chunked prefill."""
    many = prompts(place, 3, [3, 700, 41, 1, 120, 64, 9, 300, 17, 80, 5, 260])
    counts = [3 + 5 * (i % 5) for i in range(len(many))]

    async def work(client: EngineClient) -> tuple[list[Generation], list[Generation]]:
        await client.flush_cache()
        asked = [ask(p, n, temperature=0.0) for p, n in zip(many, counts, strict=True)]
        together = await asyncio.gather(*(client.generate_once(one) for one in asked))
        alone = [await client.generate_once(ask(p, n, temperature=0.0)) for p, n in zip(many, counts, strict=True)]
        return list(together), alone

    together, alone = place.drive(work)
    for prompt, batched, solo in zip(many, together, alone, strict=True):
        assert batched.output_ids == solo.output_ids
        near(batched.logprobs, solo.logprobs)
        near(batched.logprobs, oracle.logprobs(prompt, batched.output_ids))


def test_score_is_a_full_forward(place: Place, oracle: Oracle) -> None:
    for prompt in prompts(place, 4, [2, 50, 600]):
        got = place.drive(lambda client, ids=prompt: client.score(ids))  # type: ignore[misc]
        near(got, oracle.logprobs(prompt[:1], prompt[1:]))


def test_a_sampled_call_is_scored_the_same(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        (prompt,) = prompts(place, 5, [30])
        got = await client.generate_once(ask(prompt, 20))
        scores = await client.score(prompt + got.output_ids)
        near(got.logprobs, scores[len(prompt) - 1 :])

    place.drive(work)


# -- how calls end and stream


def test_stop_token_belongs_to_the_output(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        (prompt,) = prompts(place, 6, [12])
        free = await client.generate_once(ask(prompt, 10, temperature=0.0))
        stop = free.output_ids[4]
        cut = free.output_ids[: free.output_ids.index(stop) + 1]
        got = await client.generate_once(ask(prompt, 10, temperature=0.0, stop_token_ids=[stop], ignore_eos=False))
        assert (got.output_ids, got.finish, got.matched) == (cut, "stop", stop)
        assert len(got.logprobs) == len(cut)

    place.drive(work)


def test_chunks_are_cumulative(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        (prompt,) = prompts(place, 7, [12])
        chunks = [chunk async for chunk in client.generate(ask(prompt, 40))]
        for before, after in pairwise(chunks):
            assert after.output_ids[: len(before.output_ids)] == before.output_ids
            assert after.logprobs[: len(before.logprobs)] == before.logprobs
        assert len(chunks) > 1 and all(chunk.finish is None for chunk in chunks[:-1])
        last = chunks[-1]
        assert isinstance(last, Generation) and last.finish == "length" and len(last.output_ids) == 40
        assert sum(count for _, count in last.versions) == 40

    place.drive(work)


def test_refused_before_it_is_sent(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        for ids in ([place.vocabulary], [3, -1], []):
            with pytest.raises(EngineRefused) as refusal:
                await client.generate_once(ask(ids))
            assert refusal.value.status == 0
        with pytest.raises(EngineRefused, match="outside the vocabulary"):
            await client.score([1, place.vocabulary])
        with pytest.raises(EngineRefused, match="rid"):
            await client.generate_once(ask([1], rid="short"))
        with pytest.raises(EngineRefused, match="prefix"):
            await client.abort("short")
        assert await client.health()

    place.drive(work)


def test_too_long_is_refused(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        (prompt,) = prompts(place, 8, [4200])
        with pytest.raises(EngineRefused, match="longer than the model's context length") as refusal:
            await client.generate_once(ask(prompt))
        assert refusal.value.status == 400
        with pytest.raises(EngineRefused, match="maximum context length"):
            await client.generate_once(ask(prompt[:4000], 200))

    place.drive(work)


def test_keys_are_required(place: Place) -> None:
    if place.admin_key is None:
        pytest.skip("this engine has no keys")

    async def work(_: EngineClient) -> None:
        async with aiohttp.ClientSession() as session:
            bare = EngineClient(place.url, session, None, None, place.vocabulary)
            with pytest.raises(EngineUnauthorized):
                await bare.generate_once(ask([1, 2]))
            with pytest.raises(EngineUnauthorized):
                await bare.pause()
            user = EngineClient(place.url, session, place.api_key, None, place.vocabulary)
            assert (await user.generate_once(ask([1, 2], 1))).finish == "length"
            with pytest.raises(EngineUnauthorized):
                await user.pause()
            assert await bare.health()

    place.drive(work)


# -- aborting and pausing


def test_abort_gives_partial_output_to_one_alone(place: Place, oracle: Oracle) -> None:
    async def work(client: EngineClient) -> None:
        stem = secrets.token_hex(16)[:-1]
        ends = []
        for digit in "12":
            ends.append(await started(client, ask([7, 8, 9], LONG, rid=stem + digit)))
        await client.abort(stem + "1")
        cut = await ends[0]
        assert cut.finish == "abort" and 0 < len(cut.output_ids) == len(cut.logprobs) < LONG
        near(cut.logprobs[:20], oracle.logprobs([7, 8, 9], cut.output_ids[:20]))
        assert not ends[1].done()
        await client.abort_all()
        assert (await ends[1]).finish == "abort"
        await client.wait_idle()

    place.drive(work)


def test_abort_reaches_the_queue(place: Place) -> None:
    """The engine's slots are full; what waits ends with no output."""

    async def work(client: EngineClient) -> None:
        slots = int((await client.server_info())["max_running_requests"])
        running = [await started(client, ask([i + 1, 2], LONG)) for i in range(slots)]
        queued = ask([1, 2, 3], 5)
        waiting = asyncio.create_task(client.generate_once(queued))
        while (await client.loads()).waiting == 0:
            await asyncio.sleep(0)
        await client.abort(queued.rid)
        got = await waiting
        assert (got.finish, got.output_ids, got.versions) == ("abort", [], [])
        await client.abort_all()
        assert {(await task).finish for task in running} == {"abort"}

    place.drive(work)


def test_a_client_that_leaves_ends_its_request(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        stream = client.generate(ask([4, 5, 6], LONG))
        await anext(stream)
        assert (await client.loads()).running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await client.wait_idle()

    place.drive(work)


def test_pause_abort_ends_all_and_holds_new(place: Place, changes: None) -> None:
    async def work(client: EngineClient) -> None:
        running = await started(client, ask([1, 2, 3], LONG))
        await client.pause("abort")
        assert (await running).finish == "abort"
        held = asyncio.create_task(client.generate_once(ask([1, 2, 3], 4)))
        await client.wait_idle()
        assert not held.done()
        await client.resume_generation()
        assert (await held).finish == "length"

    place.drive(work)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_keeps_requests(place: Place, oracle: Oracle, mode: str, changes: None) -> None:
    async def work(client: EngineClient) -> None:
        prompt = [11, 12, 13]
        running = await started(client, ask(prompt, middling(place)))
        await client.pause(mode)  # type: ignore[arg-type]
        assert not running.done()
        if mode == "in_place":
            with pytest.raises(EngineRefused, match="Flush cache failed"):
                await client.flush_cache(0)
        else:
            await client.flush_cache(0)
        await client.resume_generation()
        got = await running
        assert got.finish == "length" and len(got.output_ids) == middling(place)
        near(got.logprobs, oracle.logprobs(prompt, got.output_ids))

    place.drive(work)


# -- the prefix cache


def test_a_shared_prefix_is_reused_within_a_salt(place: Place, oracle: Oracle) -> None:
    async def work(client: EngineClient) -> None:
        shared, one, two = prompts(place, 9, [200, 20, 20])
        await client.flush_cache()
        cold = await client.generate_once(ask(shared + one, 8, cache_salt="a"))
        warm = await client.generate_once(ask(shared + two, 8, cache_salt="a"))
        turn = shared + one + cold.output_ids + two
        follow = await client.generate_once(ask(turn, 8, cache_salt="a"))
        other = await client.generate_once(ask(shared + two, 8, cache_salt="b"))
        assert cold.cached_tokens == 0 and other.cached_tokens == 0
        assert 176 <= warm.cached_tokens <= 200
        assert 200 <= follow.cached_tokens <= 228
        near(warm.logprobs, oracle.logprobs(shared + two, warm.output_ids))
        near(follow.logprobs, oracle.logprobs(turn, follow.output_ids))
        await client.flush_cache()
        assert (await client.generate_once(ask(shared + two, 1, cache_salt="a"))).cached_tokens == 0

    place.drive(work)


# -- weights and memory


def test_tensors_outside_an_update_are_refused(place: Place, oracle: Oracle) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(EngineRefused, match="begin_weight_update") as refusal:
            await client.update_tensors([serialize_bucket(oracle.named()[:1])])
        assert refusal.value.status == 400

    place.drive(work)


def test_push_equals_loading_from_disk(place: Place, oracle: Oracle, other_model: str, changes: None) -> None:
    async def work(client: EngineClient) -> None:
        other = Oracle(other_model)
        before = await client.weights_checksum()
        pushed = await push_weights(client, other.named(), "1.1-abc", bucket_bytes=40_000)
        assert pushed != before and await client.weight_version() == "1.1-abc"
        got = await client.generate_once(ask([5, 6, 7], 12))
        assert got.versions == [("1.1-abc", 12)]
        near(got.logprobs, other.logprobs([5, 6, 7], got.output_ids))
        assert await push_weights(client, oracle.named(), "1.2-def", bucket_bytes=1 << 30) == before
        await client.update_from_disk(other_model, "1.1-abc")
        assert await client.weights_checksum() == pushed
        with pytest.raises(EngineRefused):
            await client.update_from_disk("/no/such/folder", "bad")
        assert (await client.weights_checksum(), await client.weight_version()) == (pushed, "1.1-abc")

    place.drive(work)


def test_an_update_in_place_shows_in_the_spans(place: Place, oracle: Oracle, other_model: str, changes: None) -> None:
    async def work(client: EngineClient) -> None:
        await client.set_version("old")
        running = await started(client, ask([1, 2, 3], middling(place)))
        await client.pause("in_place")
        await client.begin_weight_update()
        await client.update_tensors([serialize_bucket(Oracle(other_model).named())], weight_version="new")
        await client.end_weight_update()
        await client.resume_generation()
        got = await running
        assert [version for version, _ in got.versions] == ["old", "new"]
        assert sum(count for _, count in got.versions) == middling(place)
        count = got.versions[0][1]
        near(got.logprobs[:count], oracle.logprobs([1, 2, 3], got.output_ids[:count]))

    place.drive(work)


def test_an_interrupted_push_is_healed_by_the_next(
    place: Place, oracle: Oracle, other_model: str, changes: None
) -> None:
    async def work(client: EngineClient) -> None:
        def torn():  # type: ignore[no-untyped-def]
            yield from Oracle(other_model).named()[:5]
            raise RuntimeError("the pusher died")

        before = await client.weights_checksum()
        with pytest.raises(RuntimeError, match="died"):
            await push_weights(client, torn(), "1.3-torn", bucket_bytes=1000)
        assert await client.weight_version() == UPDATING
        held: list[asyncio.Task[Generation]] = []

        def whole():  # type: ignore[no-untyped-def]
            """A call comes in the middle of it: after the pause, which cuts those that are there."""
            yield from oracle.named()[:5]
            held.append(asyncio.create_task(client.generate_once(ask([1, 2, 3], 4))))
            yield from oracle.named()[5:]

        assert await push_weights(client, whole(), "1.4-whole", bucket_bytes=1000) == before
        got = await held[0]
        assert got.versions == [("1.4-whole", 4)]
        near(got.logprobs, oracle.logprobs([1, 2, 3], got.output_ids))

    place.drive(work)


def test_memory_is_not_released_while_busy(place: Place) -> None:
    async def work(client: EngineClient) -> None:
        running = await started(client, ask([1, 2, 3], LONG))
        with pytest.raises(EngineRefused, match="not released: "):
            await client.release_memory(["weights", "kv_cache"])
        await client.abort_all()
        assert (await running).finish == "abort"

    place.drive(work)


def test_release_resume_and_push_restore(place: Place, oracle: Oracle, changes: None) -> None:
    async def work(client: EngineClient) -> None:
        before = await client.weights_checksum()
        await client.pause("abort")
        await client.wait_idle()
        await client.release_memory(["kv_cache", "weights"])
        assert await client.health()
        await client.resume_memory(["weights", "kv_cache"])
        assert await push_weights(client, oracle.named(), "1.5-back", bucket_bytes=1 << 20) == before
        got = await client.generate_once(ask([5, 6, 7], 12))
        assert got.versions == [("1.5-back", 12)]
        near(got.logprobs, oracle.logprobs([5, 6, 7], got.output_ids))

    place.drive(work)
