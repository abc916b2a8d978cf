"""From a trainer's shards to a server's weights: by tensor buckets, equal to what a load from disk gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from tests.engines.place import Oracle, Place
from tests.engines.test_conformance import ask, near
from tests.sglang.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("push_program.py")


def push_from_ranks(work: Path, place: Place, model: str, ranks: int, engine_ranks: int, version: str) -> str:
    """A trainer of `ranks` tensor-parallel ranks loads `model` and pushes it; the checksum that it was told."""
    order = {
        "model": model,
        "ranks": ranks,
        "engine_ranks": engine_ranks,
        "version": version,
        "url": place.url,
        "api_key": place.api_key,
        "admin_key": place.admin_key,
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
) -> None:
    """TP1 and TP2 trainers feed TP1 and TP2 servers; each time the checksum is the one after a load from disk."""
    found: Server = request.getfixturevalue("server" if engine_ranks == 1 else "second")
    place = found.place
    version = f"1.{ranks}-abcd"
    pushed = push_from_ranks(tmp_path / "work", place, other_model, ranks, engine_ranks, version)

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
