"""From a trainer's shards to a server's weights: by tensor buckets, and written by Mooncake into its memory. What
decides is the checksum that a load from disk gives."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import torch

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineRefused, EngineUnavailable
from gyre.engines.push import UPDATING, Carrier, Tensors, push_to_all, push_weights
from gyre.engines.shared import SharedBuckets
from gyre.engines.types import Parameter, RankMemory
from gyre.processes.placing import Placing
from gyre.transfer.engine import Piece, TransferSession
from gyre.transfer.manifest import Peer
from gyre.transfer.memory import Region
from tests.engines.place import Oracle, Place
from tests.engines.test_conformance import ask, near
from tests.sglang.server import WEIGHTS_KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("push_program.py")


def push_from_ranks(
    work: Path, place: Place, model: str, ranks: int, engine_ranks: int, version: str, written: bool
) -> str:
    """A trainer of `ranks` tensor-parallel ranks loads `model` and pushes it; the checksum that it was told."""
    order = {
        "model": model,
        "ranks": ranks,
        "engine_ranks": engine_ranks,
        "version": version,
        "written": written,
        "url": place.url,
        "api_key": place.api_key,
        "admin_key": place.admin_key,
        "weights_key": WEIGHTS_KEY,
    }
    work.mkdir()
    (work / "order.json").write_text(json.dumps(order))
    words = [sys.executable, str(PROGRAM), str(work)]
    running = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
    try:
        errors = [process.communicate(timeout=400)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(errors)[-3000:]
    return (work / "checksum").read_text()


@pytest.mark.parametrize("written", [False, True], ids=["tensors", "mooncake"])
@pytest.mark.parametrize(("ranks", "engine_ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_shards_of_a_trainer_are_the_folders_weights(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_model: str,
    other_model: str,
    oracle: Oracle,
    other_oracle: Oracle,
    ranks: int,
    engine_ranks: int,
    written: bool,
) -> None:
    """TP1 and TP2 trainers feed TP1 and TP2 servers; each time the checksum is the one after a load from disk."""
    found: Server = request.getfixturevalue("server" if engine_ranks == 1 else "second")
    place = found.place
    version = f"1.{ranks}-abcd"
    pushed = push_from_ranks(tmp_path / "work", place, other_model, ranks, engine_ranks, version, written)

    async def work(client: EngineClient) -> None:
        assert await client.weights_checksum() == pushed
        assert await client.weight_version() == version
        got = await client.generate_once(ask([5, 6, 7], 12))
        assert got.versions == [(version, 12)]
        near(got.logprobs, other_oracle.logprobs([5, 6, 7], got.output_ids))
        await client.update_from_disk(tiny_model, "disk")
        before = await client.weights_checksum()
        assert before != pushed
        await client.update_from_disk(other_model, "disk")
        assert await client.weights_checksum() == pushed
        # The same push again changes nothing, and the next one ends where it says.
        for _ in range(2):
            again = await push_weights(client, other_oracle.named(), version, 1 << 16, engine_ranks)
            assert again == pushed
        assert await push_weights(client, oracle.named(), "restored", 1 << 20, engine_ranks) == before

    place.drive(work)


@pytest.mark.parametrize("written", [False, True], ids=["tensors", "mooncake"])
def test_engines_of_a_cell_take_one_push(
    server: Server, second: Server, oracle: Oracle, other_oracle: Oracle, written: bool
) -> None:
    """Both read the same shared memory, or are written to at the same time; a single push to each gives the same."""

    async def work(one: EngineClient) -> None:
        async with aiohttp.ClientSession() as session:
            clients = [one, second.place.client(session)]
            with contextlib.ExitStack() as stack:
                shared = SharedBuckets(WEIGHTS_KEY)
                carriers: list[Carrier] = [Tensors(ranks, shared) for ranks in (1, 2)]
                if written:
                    into = [(server, 1), (second, 2)]
                    carriers = [stack.enter_context(placing_into(found, ranks)) for found, ranks in into]
                engines = list(zip(clients, carriers, strict=True))
                sums = await push_to_all(engines, other_oracle.named(), "1.1-aaaa", 1 << 16)
            assert [await client.weight_version() for client in clients] == ["1.1-aaaa"] * 2
            for client, ranks, checksum in zip(clients, (1, 2), sums, strict=True):
                got = await client.generate_once(ask([5, 6, 7], 12))
                near(got.logprobs, other_oracle.logprobs([5, 6, 7], got.output_ids))
                assert await push_weights(client, other_oracle.named(), "1.1-aaaa", 1 << 20, ranks) == checksum
                await push_weights(client, oracle.named(), "restored", 1 << 20, ranks)

    server.place.drive(work)


async def write(client: EngineClient, oracle: Oracle, version: str, placing: Placing) -> str:
    """The oracle's weights into the engine's memory."""
    with placing:
        return await push_weights(client, oracle.named(), version, 1 << 16, carrier=placing)


def placing_into(server: Server, ranks: int = 1) -> Placing:
    return Placing("127.0.0.1", Path(server.model), ranks, torch.float32)


def test_an_interrupted_write_ends_in_no_version_and_the_next_one_heals_it(
    second: Server, oracle: Oracle, other_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that does not arrive is found before the next bucket; the engine serves nothing until it has it all."""
    lost: list[Piece] = []
    write_all = TransferSession.write

    def write_but_one(session: TransferSession, peer: Peer, source: Region, pieces: list[Piece]) -> None:
        if not lost and len(pieces) > 1:
            lost.append(pieces[1])
            pieces = [pieces[0], *pieces[2:]]
        write_all(session, peer, source, pieces)

    async def work(client: EngineClient) -> None:
        before = await write(client, oracle, "1.1-aaaa", placing_into(second, 2))
        monkeypatch.setattr(TransferSession, "write", write_but_one)
        with pytest.raises(EngineUnavailable, match="has not what was written there"):
            await write(client, other_oracle, "1.2-bbbb", placing_into(second, 2))
        assert lost
        assert await client.weight_version() == UPDATING
        assert await client.weights_checksum() != before
        healed = await write(client, other_oracle, "1.2-bbbb", placing_into(second, 2))
        assert await client.weight_version() == "1.2-bbbb"
        assert healed == await push_weights(client, other_oracle.named(), "1.2-bbbb", 1 << 20, 2)
        assert await push_weights(client, oracle.named(), "restored", 1 << 20, 2) == before

    second.place.drive(work)


def test_a_layout_that_is_not_the_engines_is_seen(
    server: Server, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size is refused before anything is written there; tensors that were mixed up are another checksum."""
    one, two = (f"model.layers.{layer}.input_layernorm.weight" for layer in range(2))

    async def work(client: EngineClient) -> None:
        right = await write(client, oracle, "1.1-aaaa", placing_into(server))
        found = await client.memory(0)

        def told(**where: Parameter) -> None:
            """What the engine says from now on."""

            async def memory(_: int) -> RankMemory:
                return found._replace(parameters={**found.parameters, **where})

            monkeypatch.setattr(client, "memory", memory)

        parameter = found.parameters[one]
        told(**{one: parameter._replace(elements=parameter.elements // 2)})
        with pytest.raises(EngineRefused, match=f"do not fit {one}"):
            await write(client, oracle, "1.2-bbbb", placing_into(server))
        told(**{"model.more.weight": parameter})
        with pytest.raises(
            EngineRefused, match=r"elements of model\.more\.weight of the engine's rank 0 are of no tensor"
        ):
            await write(client, oracle, "1.2-bbbb", placing_into(server))
        assert await client.weight_version() == UPDATING
        weights = dict(oracle.named())
        weights[one] = weights[one] + 1
        told(**{one: found.parameters[two], two: parameter})
        with placing_into(server) as placing:
            wrong = await push_weights(client, weights.items(), "1.2-bbbb", 1 << 16, carrier=placing)
        monkeypatch.undo()
        assert wrong != await push_weights(client, weights.items(), "1.2-bbbb", 1 << 16)
        assert await write(client, oracle, "restored", placing_into(server)) == right

    server.place.drive(work)
