"""Trajectory shards: each turn once, whole, from any file that a killed writer can leave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.errors import UserError
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.layout import RunFolder
from gyre.ledger.shard_files import float32, stream_start
from gyre.ledger.shards import TurnReader, TurnWriter, seal_dead
from gyre.ledger.turns import ARROW_SCHEMA, SCHEMA_VERSION, Turn

from .samples import turn, turns

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)

_fresh: Iterator[int] = count()


def fresh_run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / f"run-{next(_fresh)}").create()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def files(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.shard_dir("w").iterdir())


def test_a_turn_is_there_when_append_returns(run: RunFolder) -> None:
    writer, reader = TurnWriter(run, "w", 1), TurnReader(run, "w")
    assert reader.poll() == []
    for i in range(5):
        writer.append(turn(i))
        assert reader.poll() == [turn(i)]
    assert reader.poll() == []
    assert reader.read_all() == [turn(i) for i in range(5)]
    assert files(run) == ["1-00000.arrows", "index"]


@SHARED
@given(st.lists(turns(), max_size=5))
def test_every_field_survives_growing_and_sealed(tmp_path: Path, rows: list[Turn]) -> None:
    run = fresh_run(tmp_path)
    writer, reader = TurnWriter(run, "w", 1), TurnReader(run, "w")
    for row in rows:
        writer.append(row)
    assert reader.poll() == rows
    writer.close()
    assert TurnReader(run, "w").poll() == rows == reader.read_all()
    assert reader.poll() == []


def test_full_shards_are_sealed_and_stay_in_order(run: RunFolder) -> None:
    writer, reader = TurnWriter(run, "w", 2, max_rows=3), TurnReader(run, "w")
    seen: list[Turn] = []
    for i in range(8):
        writer.append(turn(i))
        if i in (1, 6):
            seen += reader.poll()
    assert files(run) == ["2-00000.arrow", "2-00001.arrow", "2-00002.arrows", "index"]
    writer.close()
    assert files(run) == ["2-00000.arrow", "2-00001.arrow", "2-00002.arrow", "index"]
    assert [*seen, *reader.poll()] == [turn(i) for i in range(8)]
    table = reader.read_table()
    assert table.schema.equals(ARROW_SCHEMA) and table.column("turn").to_pylist() == list(range(8))


def test_a_shard_is_sealed_by_bytes_too(run: RunFolder) -> None:
    writer = TurnWriter(run, "w", 1, max_bytes=20_000)
    for i in range(4):
        writer.append(turn(i, tokens=3000))
    assert files(run) == ["1-00000.arrow", "1-00001.arrow", "1-00002.arrows", "index"]


def test_sealed_buffers_are_compressed(run: RunFolder) -> None:
    writer = TurnWriter(run, "w", 1)
    writer.append(turn(0, tokens=100_000))
    writer.close()
    assert (run.shard_dir("w") / "1-00000.arrow").stat().st_size < 4 * 100_000


@SHARED
@given(rows=st.lists(turns(), min_size=1, max_size=4), data=st.data())
def test_any_prefix_of_a_shard_reads_as_its_whole_turns(tmp_path: Path, rows: list[Turn], data: st.DataObject) -> None:
    """Cut at every byte: never half a turn; reading goes on when the rest comes, and a dead one seals to the same."""
    run = fresh_run(tmp_path)
    writer = TurnWriter(run, "w", 1)
    path = run.shard_dir("w") / "1-00000.arrows"
    ends = [path.stat().st_size]
    for row in rows:
        writer.append(row)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    complete = sum(end <= cut for end in ends[1:])
    path.write_bytes(whole[:cut])
    reader = TurnReader(run, "w")
    assert reader.poll() == rows[:complete]
    assert reader.poll() == []
    path.write_bytes(whole)
    assert reader.poll() == rows[complete:]
    path.write_bytes(whole[:cut])
    assert seal_dead(run, "w", 1) == 1
    assert files(run) == ["1-00000.arrow", "index"]
    assert TurnReader(run, "w").poll() == rows[:complete]
    assert reader.poll() == []


@SHARED
@given(rows=st.lists(turns(), min_size=1, max_size=3), data=st.data())
def test_a_tail_that_the_disk_never_got_is_ignored(tmp_path: Path, rows: list[Turn], data: st.DataObject) -> None:
    """After a node is lost the end of a file may be zeros from any point of its last turn's message on."""
    run = fresh_run(tmp_path)
    writer = TurnWriter(run, "w", 1)
    path = run.shard_dir("w") / "1-00000.arrows"
    for row in rows[:-1]:
        writer.append(row)
    start = path.stat().st_size
    writer.append(rows[-1])
    whole = path.read_bytes()
    there = data.draw(st.integers(start, len(whole) - 1))
    torn = whole[:there].ljust(len(whole), b"\0")
    path.write_bytes(torn)
    reader = TurnReader(run, "w")
    # A message ends in padding: what differs from the whole in no byte is the whole.
    assert reader.poll() == (rows if torn == whole else rows[:-1])
    path.write_bytes(whole)
    assert TurnReader(run, "w").poll() == rows


@SHARED
@given(data=st.data(), sealed=st.booleans())
def test_a_damaged_byte_never_gives_a_wrong_turn(tmp_path: Path, data: st.DataObject, sealed: bool) -> None:
    run = fresh_run(tmp_path)
    writer = TurnWriter(run, "w", 1)
    rows = [turn(i) for i in range(3)]
    for row in rows:
        writer.append(row)
    if sealed:
        writer.close()
    path = run.shard_dir("w") / ("1-00000.arrow" if sealed else "1-00000.arrows")
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        read = TurnReader(run, "w").poll()
    except UserError as error:
        read, message = None, str(error)
    if read is None:
        assert path.name in message
    else:
        assert read == rows if sealed else read == rows[: len(read)]


def test_two_incarnations_come_in_order(run: RunFolder) -> None:
    reader = TurnReader(run, "w")
    first = TurnWriter(run, "w", 1)
    first.append(turn(0))
    second = TurnWriter(run, "w", 2)
    second.append(turn(1))
    first.append(turn(2))
    assert reader.poll() == [turn(0), turn(2), turn(1)]
    assert seal_dead(run, "w", 1) == 1
    assert seal_dead(run, "w", 1) == 0
    second.append(turn(3))
    assert reader.poll() == [turn(3)]
    assert reader.read_all() == [turn(0), turn(2), turn(1), turn(3)]
    assert files(run) == ["1-00000.arrow", "2-00000.arrows", "index"]


def test_a_writer_that_died_between_seal_and_removal_gives_each_turn_once(run: RunFolder) -> None:
    writer, reader = TurnWriter(run, "w", 1), TurnReader(run, "w")
    writer.append(turn(0))
    assert reader.poll() == [turn(0)]
    stream = run.shard_dir("w") / "1-00000.arrows"
    growing = stream.read_bytes()
    writer.append(turn(1))
    writer.close()
    stream.write_bytes(growing)
    assert reader.poll() == [turn(1)]
    assert reader.read_all() == [turn(0), turn(1)]
    assert seal_dead(run, "w", 1) == 1
    assert not stream.exists() and reader.read_all() == [turn(0), turn(1)]


def test_a_writer_that_died_at_once_leaves_an_empty_shard(run: RunFolder) -> None:
    TurnWriter(run, "w", 1)
    (run.shard_dir("w") / "1-00000.arrows").write_bytes(stream_start(ARROW_SCHEMA)[:100])
    reader = TurnReader(run, "w")
    assert reader.poll() == []
    seal_dead(run, "w", 1)
    assert reader.poll() == [] and reader.read_table().num_rows == 0


def test_a_torn_index_line_spoils_no_other(run: RunFolder) -> None:
    TurnWriter(run, "w", 1)
    index = run.shard_dir("w") / "index"
    os.truncate(index, 4)
    reader = TurnReader(run, "w")
    assert reader.poll() == []
    TurnWriter(run, "w", 2).append(turn(0))
    assert reader.poll() == [turn(0)]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_newer_schema_is_refused(run: RunFolder, sealed: bool) -> None:
    TurnWriter(run, "w", 1)
    schema = ARROW_SCHEMA.with_metadata({"gyre.table": "turns", "gyre.schema": str(SCHEMA_VERSION + 1)})
    path = run.shard_dir("w") / "1-00000.arrows"
    if sealed:
        path.unlink()
        path = path.with_suffix(".arrow")
    with (pa.ipc.new_file if sealed else pa.ipc.new_stream)(str(path), schema):
        pass
    with pytest.raises(UserError, match="has turns of schema 2; this gyre reads up to 1: use a newer gyre"):
        TurnReader(run, "w").poll()


def test_a_damaged_sealed_shard_is_named(run: RunFolder) -> None:
    writer = TurnWriter(run, "w", 1)
    writer.append(turn(0))
    writer.close()
    path = run.shard_dir("w") / "1-00000.arrow"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"1-00000\.arrow is damaged"):
        TurnReader(run, "w").poll()
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"1-00000\.arrow is damaged"):
        TurnReader(run, "w").read_all()


def test_a_foreign_table_is_refused(run: RunFolder) -> None:
    TurnWriter(run, "w", 1)
    with pa.ipc.new_stream(str(run.shard_dir("w") / "1-00000.arrows"), pa.schema([("a", pa.int32())])):
        pass
    with pytest.raises(UserError, match="is not a trajectory shard"):
        TurnReader(run, "w").poll()


@pytest.mark.parametrize("short", [False, True])
def test_a_broken_writer_stays_broken_and_loses_nothing(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    writer = TurnWriter(run, "w", 1)
    writer.append(turn(0))
    real_write = os.write

    def fail(fd: int, data: Any) -> int:
        if short:
            return real_write(fd, memoryview(data)[:50])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(LedgerWriteError, match="is full: free space, then gyre resume run"):
            writer.append(turn(1))
    with pytest.raises(LedgerWriteError):
        writer.append(turn(2))
    with pytest.raises(LedgerWriteError):
        writer.sync()
    writer.close()
    successor = TurnWriter(run, "w", 2)
    successor.append(turn(3))
    assert TurnReader(run, "w").poll() == [turn(0), turn(3)]


def test_a_closed_writer_takes_nothing(run: RunFolder) -> None:
    writer = TurnWriter(run, "w", 1)
    writer.append(turn(0))
    writer.sync()
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(turn(1))


def test_logprobs_are_kept_in_single_precision(run: RunFolder) -> None:
    writer = TurnWriter(run, "w", 1)
    writer.append(Turn(execution="e", attempt=1, turn=0, output=[1], logprobs=[-0.1]))
    (row,) = TurnReader(run, "w").poll()
    assert row.logprobs == float32([-0.1]) != [-0.1]
