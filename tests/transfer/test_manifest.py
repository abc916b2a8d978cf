"""Manifests: their digests, their files, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import xxhash

from gyre.errors import UserError
from gyre.transfer.manifest import (
    Manifest,
    RankBuffer,
    digest_of,
    make_manifest,
    read_manifest,
    whole_digest,
    write_manifest,
)


def rank_buffer(rank: int, content: bytes) -> RankBuffer:
    return RankBuffer(rank, "10.0.0.1:12000", 4096, len(content), digest_of(content), "life", 12001)


def manifest(**changes) -> Manifest:
    made = make_manifest(
        "weights",
        lineage=1,
        step=12,
        version=3,
        cell="cell-0",
        incarnation=2,
        number=0,
        ranks=[rank_buffer(1, b"b"), rank_buffer(0, b"a")],
    )
    return msgspec.structs.replace(made, **changes)


def test_digests():
    assert digest_of(b"abc") == xxhash.xxh3_128_hexdigest(b"abc")
    assert digest_of(np.frombuffer(b"abcd", np.float32)) == digest_of(b"abcd")
    a, b = rank_buffer(0, b"a"), rank_buffer(1, b"b")
    joined = xxhash.xxh3_128_hexdigest((a.digest + b.digest).encode())
    assert whole_digest([b, a]) == whole_digest([a, b]) == joined
    assert whole_digest([a, rank_buffer(1, b"c")]) != joined


def test_names():
    made = manifest()
    assert made.version_name == f"1.3-{made.digest[:16]}"
    assert made.file_name == "weights-0001-step-000012-cell-0.2-00000.json"
    assert [buffer.rank for buffer in made.ranks] == [0, 1]
    peer = made.ranks[0].peer
    assert (peer.host, peer.session, peer.incarnation, peer.beacon) == (
        "10.0.0.1",
        "10.0.0.1:12000",
        "life",
        12001,
    )


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 2]])
def test_ranks_are_complete(ranks):
    with pytest.raises(ValueError, match="ranks 0..n-1"):
        make_manifest(
            "gradients",
            lineage=1,
            step=1,
            version=1,
            cell="cell-1",
            incarnation=1,
            number=1,
            ranks=[rank_buffer(rank, b"x") for rank in ranks],
        )


def test_file_is_whole_and_alone(tmp_path):
    path = tmp_path / manifest().file_name
    write_manifest(path, manifest())
    assert read_manifest(path) == manifest()
    assert [child.name for child in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "weights.json"
    with pytest.raises(UserError, match="does not exist"):
        read_manifest(path)
    write_manifest(path, manifest())
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"weights\.json"):
            read_manifest(path)
    write_manifest(path, manifest(digest="0" * 32))
    with pytest.raises(UserError, match="digest"):
        read_manifest(path)
