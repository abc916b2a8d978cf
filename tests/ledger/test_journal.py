"""Journals and their readers: whole lines in order, from any file that a killed writer can leave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.errors import UserError
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.journal import Journal, create_index, encode_line
from gyre.ledger.layout import RunFolder
from gyre.ledger.tail import JournalTail, Line, read_journal

from .samples import EVENTS, started

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run").create()
    create_index(run, "w")
    return run


def clock() -> float:
    return 12.5


def open_journal(run: RunFolder, writer: str = "w") -> Journal:
    return Journal.open(run, writer, clock)


def keys(lines: list[Line]) -> list[tuple[str, int, int]]:
    return [(line.writer, line.incarnation, line.n) for line in lines]


_fresh: Iterator[int] = count()


def fresh_run(tmp_path: Path) -> RunFolder:
    """A run of its own for each example of hypothesis."""
    run = RunFolder(tmp_path / f"run-{next(_fresh)}").create()
    create_index(run, "w")
    return run


def test_what_is_appended_is_read(run: RunFolder) -> None:
    journal = open_journal(run)
    assert [journal.append(started(i), durable=i % 2 == 0) for i in range(5)] == [0, 1, 2, 3, 4]
    lines = JournalTail(run, ["w"]).poll()
    assert [line.event for line in lines] == [started(i) for i in range(5)]
    assert keys(lines) == [("w", 1, i) for i in range(5)]
    assert {line.t for line in lines} == {12.5}
    assert list(read_journal(journal.path)) == lines


def test_the_bytes_of_a_line(run: RunFolder) -> None:
    line = encode_line(7, 1.5, b'{"type":"x"}')
    assert line == b'{"n":7,"t":1.500,"e":{"type":"x"},"c":"91b9ec58"}\n'
    assert msgspec.json.decode(line)["n"] == 7


def test_incarnations_count_up_and_are_read_in_order(run: RunFolder) -> None:
    for incarnation in (1, 2, 3):
        journal = open_journal(run)
        assert journal.incarnation == incarnation
        assert journal.path == run.journal_path("w", incarnation)
        journal.append(started(incarnation))
        journal.close()
    assert keys(JournalTail(run, ["w"]).poll()) == [("w", 1, 0), ("w", 2, 0), ("w", 3, 0)]


def test_an_older_file_may_grow_after_a_newer_one_spoke(run: RunFolder) -> None:
    old, new = open_journal(run), open_journal(run)
    tail = JournalTail(run, ["w"])
    new.append(started(0))
    assert keys(tail.poll()) == [("w", 2, 0)]
    old.append(started(1))
    seen: list[Line] = []
    for _ in range(40):  # polls of a superseded file are spaced, by a bounded number of polls
        seen += tail.poll()
    assert keys(seen) == [("w", 1, 0)]


def test_an_incarnation_that_died_before_its_index_line_is_skipped(run: RunFolder) -> None:
    run.journal_path("w", 1).touch()
    journal = open_journal(run)
    assert journal.incarnation == 2
    journal.append(started(0))
    assert open_journal(run).incarnation == 3
    assert keys(JournalTail(run, ["w"]).poll()) == [("w", 2, 0)]


@pytest.mark.parametrize("cut", range(1, len("w.1.jsonl\n")))
def test_a_torn_index_line_spoils_no_other(run: RunFolder, cut: int) -> None:
    first = open_journal(run)
    index = run.index_path("w")
    os.truncate(index, cut)
    tail = JournalTail(run, ["w"])
    assert tail.poll() == []
    second = open_journal(run)
    second.append(started(0))
    assert second.incarnation > first.incarnation
    assert keys(tail.poll()) == [("w", second.incarnation, 0)]


def test_index_order_does_not_matter(run: RunFolder) -> None:
    for i in range(3):
        open_journal(run).append(started(i))
    run.index_path("w").write_text("w.3.jsonl\nw.1.jsonl\nw.2.jsonl\n")
    assert keys(JournalTail(run, ["w"]).poll()) == [("w", 1, 0), ("w", 2, 0), ("w", 3, 0)]


def test_the_file_exists_before_the_index_names_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gyre.ledger.journal._append_name", stop)
    with pytest.raises(KeyboardInterrupt):
        open_journal(run)
    assert run.journal_path("w", 1).exists()
    assert run.index_path("w").read_bytes() == b""


def test_an_unknown_writer_is_refused(run: RunFolder) -> None:
    with pytest.raises(UserError, match="stranger is not a process of this run"):
        open_journal(run, "stranger")
    with pytest.raises(UserError, match="stranger is not a process of this run"):
        JournalTail(run, ["stranger"]).poll()


def test_create_index_again_changes_nothing(run: RunFolder) -> None:
    open_journal(run)
    create_index(run, "w")
    assert run.index_path("w").read_bytes() == b"w.1.jsonl\n"


@SHARED
@given(events=st.lists(EVENTS, min_size=1, max_size=6), data=st.data())
def test_any_prefix_of_a_journal_reads_as_its_whole_lines(
    tmp_path: Path, events: list[Any], data: st.DataObject
) -> None:
    """Cut at every byte: never half a line, never a wrong one; and reading goes on when the rest comes."""
    run = fresh_run(tmp_path)
    journal = open_journal(run)
    for event in events:
        journal.append(event, durable=False)
    whole = journal.path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    journal.path.write_bytes(whole[:cut])
    tail = JournalTail(run, ["w"])
    first = tail.poll()
    complete = whole[:cut].count(b"\n")
    assert [line.event for line in first] == events[:complete]
    assert list(read_journal(journal.path)) == first
    assert tail.poll() == []
    journal.path.write_bytes(whole)
    assert [line.event for line in [*first, *tail.poll()]] == events


@SHARED
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_byte_ends_the_journal_there(tmp_path: Path, position: float, value: int) -> None:
    run = fresh_run(tmp_path)
    journal = open_journal(run)
    for i in range(4):
        journal.append(started(i), durable=False)
    good = journal.path.read_bytes()
    at = int(position * len(good))
    if good[at] == value:
        return
    journal.path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
    tail = JournalTail(run, ["w"])
    assert [line.event for line in tail.poll()] == [started(i) for i in range(good[:at].count(b"\n"))]
    assert [line.event for line in read_journal(journal.path)] == [started(i) for i in range(good[:at].count(b"\n"))]


def test_a_gap_in_the_numbers_ends_the_journal_there(run: RunFolder) -> None:
    journal = open_journal(run)
    event = msgspec.json.encode(started(0))
    journal.path.write_bytes(encode_line(0, 0.0, event) + encode_line(2, 0.0, event))
    tail = JournalTail(run, ["w"])
    assert keys(tail.poll()) == [("w", 1, 0)]
    assert [item[:2] for item in tail.stuck()] == [("w", 1)]


def test_a_bad_line_that_is_mended_is_read(run: RunFolder) -> None:
    """NFS may show a new size before the bytes: reading is tried again, at a bounded number of polls."""
    journal = open_journal(run)
    journal.append(started(0))
    good = journal.path.read_bytes()
    journal.path.write_bytes(b"\0" * (len(good) - 1) + b"\n")
    tail = JournalTail(run, ["w"])
    assert tail.poll() == []
    journal.path.write_bytes(good)
    seen: list[Line] = []
    for _ in range(40):
        seen += tail.poll()
    assert keys(seen) == [("w", 1, 0)]
    assert tail.stuck() == []


def test_an_event_of_a_newer_gyre_names_file_and_line_and_loses_nothing(run: RunFolder) -> None:
    create_index(run, "x")
    journal, other = open_journal(run), open_journal(run, "x")
    tail = JournalTail(run, ["x", "w"])
    other.append(started(0))
    journal.append(started(0))
    journal.append({"type": "from_the_future"})
    for _ in range(2):
        with pytest.raises(UserError, match=r"w\.1\.jsonl line 2: .*from_the_future.*another version"):
            tail.poll()
    with pytest.raises(UserError, match="line 2"):
        list(read_journal(journal.path))
    assert tail.offsets()["x"]["files"]["1"] == [0, 0]


@SHARED
@given(st.lists(st.sampled_from(["append", "other", "poll", "reopen", "restore"]), max_size=30))
def test_following_gives_each_line_once_and_in_order(tmp_path: Path, actions: list[str]) -> None:
    """Whatever writers and reader do in turn, also when the reader goes on from a snapshot of its offsets."""
    run = fresh_run(tmp_path)
    create_index(run, "v")
    journals = {"w": open_journal(run), "v": open_journal(run, "v")}
    tail = JournalTail(run, ["w", "v"])
    written: dict[str, list[tuple[str, int, int]]] = {"w": [], "v": []}
    seen: list[Line] = []
    for action in actions:
        if action in ("append", "other"):
            name = "w" if action == "append" else "v"
            n = journals[name].append(started(0), durable=False)
            written[name].append((name, journals[name].incarnation, n))
        elif action == "poll":
            seen += tail.poll()
        elif action == "reopen":
            journals["w"].close()
            journals["w"] = open_journal(run)
        else:
            saved = msgspec.json.decode(msgspec.json.encode(tail.offsets()))
            tail = JournalTail(run, ["w", "v"])
            tail.restore(saved)
    for _ in range(40):
        seen += tail.poll()
    for name in ("w", "v"):
        assert keys([line for line in seen if line.writer == name]) == written[name]


def test_a_writer_can_join_later(run: RunFolder) -> None:
    tail = JournalTail(run, ["w"])
    create_index(run, "v")
    open_journal(run, "v").append(started(0))
    tail.add_writer("v")
    tail.add_writer("v")
    assert keys(tail.poll()) == [("v", 1, 0)]


def test_a_large_journal_is_read_in_blocks(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.ledger.tail._BLOCK", 100)
    journal = open_journal(run)
    for i in range(300):
        journal.append(started(i), durable=False)
    assert [line.n for line in read_journal(journal.path)] == list(range(300))


@pytest.mark.parametrize("call", ["write", "short", "fsync"])
def test_a_broken_journal_stays_broken(run: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    journal = open_journal(run)
    journal.append(started(0))
    real_write = os.write

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        if call == "short":
            patch.setattr(os, "write", lambda fd, data: real_write(fd, data[:5]))
        else:
            patch.setattr(os, call, fail)
        with pytest.raises(LedgerWriteError, match="is full: free space, then gyre resume run"):
            journal.append(started(1))
    with pytest.raises(LedgerWriteError, match="is full"):
        journal.append(started(2))
    journal.close()
    with pytest.raises(LedgerWriteError):
        journal.append(started(3))
    successor = open_journal(run)
    successor.append(started(9))
    events = [line.event for line in JournalTail(run, ["w"]).poll()]
    assert events[0] == started(0) and events[-1] == started(9)


def test_a_closed_journal_takes_nothing(run: RunFolder) -> None:
    journal = open_journal(run)
    journal.append(started(0), durable=False)
    journal.sync()
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(started(1))


def test_read_journal_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a journal"):
        list(read_journal(tmp_path / "notes.txt"))


def test_a_newer_incarnation_is_never_heard_before_what_was_written_before_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one writes its last line, and the new one its first, while a poll is between their two files."""
    old, new = open_journal(run), open_journal(run)
    old.append(started(0))
    tail = JournalTail(run, ["w"])
    read = tail._read
    asked: list[int] = []

    def slow_read(writer: str, incarnation: int, file: Any) -> Any:
        asked.append(incarnation)
        if len(asked) == 2:  # between the first file and the second
            old.append(started(1))
            new.append(started(2))
        return read(writer, incarnation, file)

    monkeypatch.setattr(tail, "_read", slow_read)
    heard = tail.poll() + tail.poll()
    assert keys(heard) == [("w", 1, 0), ("w", 1, 1), ("w", 2, 0)]


def test_an_old_file_that_is_looked_at_less_often_is_still_heard_first(run: RunFolder) -> None:
    """An old incarnation that was silent for long writes on, then the newest does."""
    old, new = open_journal(run), open_journal(run)
    old.append(started(0))
    tail = JournalTail(run, ["w"])
    assert keys(tail.poll()) == [("w", 1, 0)]
    for _ in range(50):
        assert tail.poll() == []
    old.append(started(1))
    new.append(started(2))
    assert keys(tail.poll()) == [("w", 1, 1), ("w", 2, 0)]
