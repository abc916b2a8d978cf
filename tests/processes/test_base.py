"""A process notices that its parent is gone, also while its event loop is busy; a full disk is a user's error."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger.layout import RunFolder
from gyre.processes.base import EXIT_PARENT_GONE, EndProcess, user_error

WATCHER = """
import asyncio, sys, time
from gyre.processes import base

base.GRACE_SECONDS = 0.2

async def main():
    watch = asyncio.create_task(base.parent_gone())
    await asyncio.sleep(0)
    print("ready", flush=True)
    if sys.argv[1] == "busy":
        time.sleep(600)
    try:
        await watch
    except base.EndProcess as end:
        print("in order", flush=True)
        raise SystemExit(end.code)

asyncio.run(main())
"""


@pytest.mark.parametrize(("kind", "said"), [("idle", "in order\n"), ("busy", "")])
def test_the_end_of_stdin_ends_the_process(kind: str, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("words that nobody reads")
    process.stdin.close()
    assert process.wait(60) == EXIT_PARENT_GONE
    assert process.stdout.read() == said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("whole_tree", [False, True])
def test_a_full_disk_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, whole_tree: bool
) -> None:
    run = RunFolder(tmp_path / "mine").create()
    error: OSError = OSError(number, os.strerror(number))
    if whole_tree:
        (tmp_path / "tree" / "sub").mkdir(parents=True)
        for name in ("absent", "sub/file"):
            (tmp_path / "tree" / name).touch()

        def copy(source: str, target: str) -> None:
            raise FileNotFoundError(errno.ENOENT, "gone", source) if source.endswith("absent") else error

        with pytest.raises(shutil.Error) as caught:
            shutil.copytree(tmp_path / "tree", tmp_path / "copy", copy_function=copy)
        error = caught.value
    full = user_error(run, error)
    assert full is not None
    assert (str(full), full.code) == (
        f"the file system of {run.path} is full: free space, then gyre resume mine",
        1,
    )


def test_who_can_mend_what(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine").create()
    own = UserError("model.path: no such folder", code=2)
    assert user_error(run, own) is own
    assert user_error(run, OSError(errno.EIO, os.strerror(errno.EIO))) is None
    assert user_error(run, ConnectionResetError()) is None
    assert user_error(run, shutil.Error([("a", "b", "[Errno 2] No such file or directory: 'a'")])) is None


def test_an_ordered_end_carries_its_status() -> None:
    assert EndProcess(75, "ordered to restart").code == 75
