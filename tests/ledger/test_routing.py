"""Records of experts: what was written is read, from any file that a killed writer can leave."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.errors import UserError
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.layout import RunFolder
from gyre.ledger.routing import Mixture, Routing, RoutingReader, RoutingWriter, read_routing
from gyre.ledger.shards import TurnReader, TurnWriter

from .samples import turn
from .test_shards import fresh_run

SMALL, LARGE = (Mixture(layers=2, experts=experts, chosen=3) for experts in (256, 257))


def record(number: int, mixture: Mixture = SMALL, rows: int = 4) -> Routing:
    numbers = np.arange(rows * 6, dtype=np.int32) * 29 % mixture.experts
    packed = mixture.pack(numbers, rows)
    assert packed is not None
    return Routing(
        execution="g00001-00", attempt=1, turn=number, start=number * 3, layers=2, chosen=3,
        item_size=mixture.item_size, experts=packed,
    )  # fmt: skip


def writer_of(run: RunFolder, incarnation: int = 1) -> RoutingWriter:
    run.shard_dir("w").mkdir(exist_ok=True)
    return RoutingWriter(run, "w", incarnation)


@pytest.mark.parametrize(("mixture", "size"), [(SMALL, 1), (LARGE, 2)])
def test_experts_are_kept_in_the_smallest_number(mixture: Mixture, size: int) -> None:
    numbers = np.array([[[0, 1, 2], [3, 4, mixture.experts - 1]]], dtype=np.int32)
    packed = mixture.pack(numbers, 1)
    assert packed is not None and len(packed) == mixture.row_size == 6 * size
    found = Routing(
        execution="e", attempt=1, turn=0, start=0, layers=2, chosen=3, item_size=mixture.item_size, experts=packed
    )
    assert found.rows == 1 and np.array_equal(found.table(), numbers)
    assert (
        mixture.pack(numbers, 2) is None and mixture.pack(numbers + 1, 1) is None and mixture.pack(-numbers, 1) is None
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data(), count=st.integers(1, 4))
def test_any_prefix_reads_as_its_whole_records(tmp_path: Path, data: st.DataObject, count: int) -> None:
    """Cut at every byte, and zeros after it, as the loss of a node leaves them: not in the schema, which is durable."""
    run = fresh_run(tmp_path)
    writer = writer_of(run)
    records = [record(i, LARGE if i % 2 else SMALL) for i in range(count)]
    path, ends = run.routing_path("w", 1), []
    start = path.stat().st_size
    for one in records:
        writer.append(one)
        ends.append(path.stat().st_size)
    writer.sync()
    assert list(read_routing(run, "w")) == records
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.sampled_from([0, 64])) if cut >= start else 0
    path.write_bytes(whole[:cut] + bytes(zeros))
    assert list(read_routing(run, "w")) == records[: sum(end <= cut for end in ends)]


def test_incarnations_come_in_order_and_turns_are_read_without_them(tmp_path: Path) -> None:
    run = fresh_run(tmp_path)
    turns = TurnWriter(run, "w", 1)
    for incarnation in (10, 9):
        writer_of(run, incarnation).append(record(incarnation))
    turns.append(turn(0))
    assert [one.turn for one in read_routing(run, "w")] == [9, 10]
    assert TurnReader(run, "w").read_all() == [turn(0)]


def test_a_full_disk_breaks_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fresh_run(tmp_path)
    writer = writer_of(run)
    writer.append(record(0))

    def fail(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(LedgerWriteError, match="is full"):
            writer.append(record(1))
    with pytest.raises(LedgerWriteError):
        writer.append(record(2))
    writer.close()
    assert list(read_routing(run, "w")) == [record(0)]


def test_a_file_of_turns_is_refused(tmp_path: Path) -> None:
    run = fresh_run(tmp_path)
    TurnWriter(run, "w", 1).append(turn(0))
    (run.shard_dir("w") / "1-00000.arrows").rename(run.routing_path("w", 1))
    with pytest.raises(UserError, match="is not a trajectory shard"):
        list(read_routing(run, "w"))


def test_a_reader_goes_on_where_it_was_and_waits_for_what_is_torn(tmp_path: Path) -> None:
    run = fresh_run(tmp_path)
    reader = RoutingReader(run, "w")
    assert reader.poll() == []
    writer = writer_of(run)
    for number in range(3):
        writer.append(record(number))
    path = run.routing_path("w", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert reader.poll() == [record(0), record(1)]
    assert reader.poll() == []
    path.write_bytes(whole)
    writer_of(run, 2).append(record(3))
    assert reader.poll() == [record(2), record(3)]
    assert list(read_routing(run, "w")) == [record(number) for number in range(4)]
