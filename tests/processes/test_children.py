"""Children with real processes: they end with their parent; their last words arrive whatever became of their log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gyre.errors import UserError
from gyre.processes.children import Child, ChildDied
from tests.chaos import procs

READER = "import sys; sys.stdin.read()"
PARENT = f"""
import asyncio, sys
from pathlib import Path
from gyre.processes.children import Child

async def main():
    child = await Child.start("child", [sys.executable, "-c", {READER!r}], Path(sys.argv[1]))
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while procs.alive(pid):
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.01)


def words(text: str, code: int) -> list[str]:
    program = f"from gyre.processes.children import say_last_words; say_last_words({text!r}); raise SystemExit({code})"
    return [sys.executable, "-c", program]


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert procs.alive(child)
    parent.send_signal(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    until_gone(child)


async def test_end_leaves_nothing_of_the_childs_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    child = await Child.start("child", [sys.executable, "-c", program], log)
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    grandchild = int(log.read_text())
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert procs.alive(grandchild)
    await child.end()
    until_gone(grandchild)
    await child.end()  # again: nothing happens


async def test_last_words_need_no_log() -> None:
    child = await Child.start("rank", words("rank: the disk is full", 1), Path("/dev/full"))
    death = await child.death()
    assert isinstance(death, UserError)
    assert (str(death), death.code) == ("rank: the disk is full", 1)
    await child.end()


async def test_the_log_has_the_last_words_too(tmp_path: Path) -> None:
    child = await Child.start("rank", words("rank: no such model", 2), tmp_path / "log")
    assert await child.wait() == 2
    assert child.last_words() == "rank: no such model"
    assert (tmp_path / "log").read_text() == "gyre: rank: no such model\n"
    await child.end()


async def test_an_end_without_words_or_by_another_status_is_a_death(tmp_path: Path) -> None:
    silent = await Child.start("rank", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log")
    assert str(await silent.death()) == "rank ended with status 1; see its log"
    defect = await Child.start("rank", words("rank: it broke", 70), tmp_path / "log")
    assert isinstance(await defect.death(), ChildDied)
    for child in (silent, defect):
        await child.end()
