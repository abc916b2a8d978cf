"""Whole files: replaced whole or not at all, and one clear error when the file system refuses."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from gyre.errors import UserError
from gyre.ledger.files import LedgerWriteError, ledger_writes, read_json, write_atomic, write_new, written_aside
from gyre.ledger.layout import RunFolder


class Point(msgspec.Struct):
    x: int


def test_write_atomic_replaces_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_atomic(path, b"one")
    write_atomic(path, b"two", mode=0o640)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["key"]


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(RuntimeError), written_aside(path) as aside:
        aside.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_one_line_with_the_way_out(tmp_path: Path, number: int) -> None:
    run = RunFolder(tmp_path / "r1").create()
    with pytest.raises(LedgerWriteError) as caught, ledger_writes(run.microstep_dir(1) / "1-00000.arrow"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == 1
    assert str(caught.value) == f"the file system of {run.path} is full: free space, then gyre resume r1"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_refusing_file_system_names_the_file(tmp_path: Path, number: int) -> None:
    run = RunFolder(tmp_path / "r1").create()
    with pytest.raises(LedgerWriteError, match=r"cannot write .*/weights/m \(.*\): mend that, then gyre resume r1"):
        with ledger_writes(run.weights / "m"):
            raise OSError(number, os.strerror(number))


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "file", b"")


def test_write_new_gives_the_name_to_one(tmp_path: Path) -> None:
    path = tmp_path / "name"
    write_new(path, b"first")
    with pytest.raises(FileExistsError):
        write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_new_that_fails_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LedgerWriteError):
        write_new(tmp_path / "name", b"all of it")
    assert list(tmp_path.iterdir()) == []


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(UserError, match="does not exist"):
        read_json(path, Point)
    path.write_bytes(b'{"x":1}')
    assert read_json(path, Point) == Point(1)
    for bad in (b'{"x":', b'{"x":"1"}', b"\xff"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"p\.json: ") as caught:
            read_json(path, Point)
        assert caught.value.code == 1
