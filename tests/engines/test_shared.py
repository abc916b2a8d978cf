"""Weights that another process on this node reads from shared memory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
import torch

from gyre.engines.shared import SharedBuckets

READER = """
import base64, multiprocessing, pickle, sys
import torch
multiprocessing.current_process().authkey = sys.argv[1].encode()
for line in sys.stdin:
    named = pickle.loads(base64.b64decode(line))
    torch.save([(name, tensor.clone()) for name, tensor in named], sys.argv[2])
    print("read", flush=True)
"""
WHOLE = torch.arange(100_000, dtype=torch.float32)
FIRST = [
    ("view", WHOLE[10:20]),
    ("bf16", torch.arange(12).reshape(3, 4).to(torch.bfloat16)),
    ("turned", torch.arange(6).reshape(2, 3).T),
    ("parameter", torch.nn.Parameter(torch.ones(2))),
    ("odd", torch.arange(3, dtype=torch.uint8)),
]
SECOND = [("larger", WHOLE), ("single", torch.tensor(2.5))]


@pytest.fixture(autouse=True)
def own_key() -> Iterator[None]:
    before = multiprocessing.current_process().authkey
    yield
    resource_sharer.stop()
    multiprocessing.current_process().authkey = before


class Reader:
    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / "read"
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, key, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self, encoded: str) -> list[tuple[str, torch.Tensor]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(encoded + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "read\n"
        found: list[tuple[str, torch.Tensor]] = torch.load(self.path)
        return found


def same(found: list[tuple[str, torch.Tensor]], wanted: list[tuple[str, torch.Tensor]]) -> bool:
    return [name for name, _ in found] == [name for name, _ in wanted] and all(
        one.dtype == other.dtype and torch.equal(one, other) for (_, one), (_, other) in zip(found, wanted, strict=True)
    )


def test_every_receiver_reads_each_bucket_though_its_place_is_used_again(tmp_path: Path) -> None:
    for key in ("one engine", "its successor"):
        shared = SharedBuckets(key)
        readers = [Reader(tmp_path, key) for _ in range(2)]
        for bucket in (FIRST, SECOND, FIRST):
            encoded = shared.serialize(bucket, 2)
            assert max(map(len, encoded)) < 4000
            assert all(same(reader.read(one), bucket) for reader, one in zip(readers, encoded, strict=True))
        assert not [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]  # nothing could be left
        for reader in readers:
            reader.process.communicate()
    assert torch.equal(WHOLE, torch.arange(100_000, dtype=torch.float32))
    assert not WHOLE.is_shared()


def test_engines_of_one_secret_read_the_same_memory(tmp_path: Path) -> None:
    """A bucket is laid out once, whoever else is to read it."""
    shared = SharedBuckets("of a cell")
    readers = [Reader(tmp_path / name, "of a cell") for name in "ab"]
    for reader in readers:
        reader.path.parent.mkdir()
    for bucket in (SECOND, FIRST):
        places = []
        for reader in readers:
            (encoded,) = shared.serialize(bucket, 1)
            places.append(shared._laid)
            assert same(reader.read(encoded), bucket)
        assert places[0] is places[1]
    for reader in readers:
        reader.process.communicate()


def test_who_has_not_the_key_reads_nothing(tmp_path: Path) -> None:
    (encoded,) = SharedBuckets("secret").serialize(FIRST, 1)
    reader = Reader(tmp_path, "guessed")
    _, said = reader.process.communicate(encoded + "\n")
    assert reader.process.returncode == 1
    assert "AuthenticationError" in said
    assert not reader.path.exists()
