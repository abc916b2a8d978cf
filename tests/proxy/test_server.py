"""Keys, listeners, paths."""

from __future__ import annotations

import gzip
import socket

import aiohttp
import openai
import pytest

KEY, OTHER = "a-key-of-one-execution", "the-key-of-another-one"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def test_unknown_keys_are_refused(world):
    with pytest.raises(openai.AuthenticationError) as caught:
        await world.client(key="nobody").chat.completions.create(model="tiny", **BODY)
    assert caught.value.code == "invalid_api_key"
    async with aiohttp.ClientSession() as session, session.post(world.url + "/v1/chat/completions") as answer:
        assert answer.status == 401
    assert world.capture.stats.calls == 0


async def test_key_as_x_api_key_and_path_prefix(world):
    async with aiohttp.ClientSession(headers={"x-api-key": KEY}) as session:
        for prefix, status in (("", 200), ("/s/g00001-00.0", 200), ("/s/g00001-01.0", 401)):
            async with session.post(world.url + prefix + "/v1/chat/completions", json=BODY) as answer:
                assert answer.status == status


async def test_a_listener_serves_its_own_execution_only(world):
    world.proxy.register(world.told("g00001-01", OTHER))
    world.routes.set("g00001-01", "cell-0")
    url = await world.listen(OTHER)
    await world.client(OTHER, url).chat.completions.create(model="tiny", **BODY)
    with pytest.raises(openai.AuthenticationError):
        await world.client(KEY, url).chat.completions.create(model="tiny", **BODY)
    assert [row.execution for row in world.sink.rows] == ["g00001-01"]


async def test_removed_listeners_and_executions_are_gone(world):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1)
    port = sock.getsockname()[1]
    await world.proxy.add_listener(sock, KEY)
    await world.proxy.remove_listener(sock)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://127.0.0.1:{port}/v1/models")
    await world.proxy.unregister(KEY)
    assert (await world.post(BODY))[0] == 401


async def test_a_paused_execution_is_served_again_by_the_same_capture(world):
    await world.client().chat.completions.create(model="tiny", **BODY)
    await world.proxy.pause(KEY)
    assert (await world.post(BODY))[0] == 401
    with pytest.raises(ValueError, match="a key of its own"):
        world.proxy.register(world.told("g00001-01", KEY))
    world.proxy.resume(KEY)
    world.proxy.resume(KEY)
    other = {"messages": [{"role": "user", "content": "and now?"}]}
    await world.client().chat.completions.create(model="tiny", **other)
    assert [row.turn for row in world.sink.rows if row.status == "committed"] == [0, 1]
    assert world.capture.stats.calls == 2
    await world.proxy.pause(KEY)
    assert (await world.proxy.unregister(KEY)).turns == 2
    world.proxy.resume(KEY)
    assert (await world.post(BODY))[0] == 401


async def test_models_and_unknown_paths(world):
    client = world.client()
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await world.post(BODY, path="/v1/embeddings"))[0] == 404
    async with aiohttp.ClientSession(headers={"x-api-key": KEY}) as session:
        async with session.get(world.url + "/v1/chat/completions") as answer:
            assert answer.status == 404


async def test_a_body_that_cannot_be_decompressed_is_the_clients_mistake(world):
    headers = {"x-api-key": KEY, "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(world.url + "/v1/chat/completions", data=b"not gzip at all") as answer:
            assert answer.status == 400
    assert world.capture.stats.server_errors == 0


async def test_a_small_body_that_grows_is_bounded(worlds, renderer):
    world = await worlds(renderer, body_bytes=100_000)
    headers = {"x-api-key": KEY, "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession(headers=headers) as session:
        packed = gzip.compress(b" " * 50_000_000)
        async with session.post(world.url + "/v1/chat/completions", data=packed) as answer:
            assert answer.status == 413


def test_keys_must_be_long_and_unique(world):
    with pytest.raises(ValueError, match="key of its own"):
        world.proxy.register(world.told("g00001-02", "short"))
    with pytest.raises(ValueError, match="key of its own") as caught:
        world.proxy.register(world.told("g00001-02", KEY))
    assert KEY not in str(caught.value)
    assert KEY not in repr(world.told("g00001-02", KEY))
