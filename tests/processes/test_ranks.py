"""A cell's ranks as its lead sees them, with small programs in their place: one loss is the group's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger.liveness import LivenessWatch
from gyre.processes.children import Child, ChildDied
from gyre.processes.ranks import Ranks

ECHO = """
import os, sys
with os.fdopen(int(sys.argv[1]), "w") as replies:
    replies.write("{}\\n")
    replies.flush()
    for line in sys.stdin:
        if '"hang"' not in line:
            replies.write(line)
            replies.flush()
"""
WAIT = "import sys; sys.stdin.read()"
FULL = """
import sys
from gyre.processes.children import say_last_words
sys.stdin.readline()
say_last_words("the disk is full")
raise SystemExit(1)
"""
BEATS = """
import sys, time
from pathlib import Path
from gyre.ledger.liveness import Heartbeat
heart = Heartbeat(Path(sys.argv[1]))
while True:
    heart.beat()
    time.sleep(0.005)
"""


async def start(tmp_path: Path, other: str) -> Ranks:
    """Rank 0 echoes what it is asked, but for "hang"; rank 1 runs `other`."""
    ranks = Ranks(tempfile.TemporaryDirectory(dir=tmp_path))
    theirs = await ranks.reply_pipe()
    argv = [sys.executable, "-c", ECHO, str(theirs)]
    ranks.children.append(await Child.start("cell-0-rank-0", argv, tmp_path / "0.log", fds=(theirs,)))
    os.close(theirs)
    ranks.children.append(
        await Child.start(
            "cell-0-rank-1", [sys.executable, "-c", other, str(tmp_path / "cell-0-rank-1")], tmp_path / "1.log"
        )
    )
    await ranks.ready()
    return ranks


async def test_rank_0_answers_for_all(tmp_path: Path) -> None:
    ranks = await start(tmp_path, WAIT)
    assert await ranks.ask("train", microsteps=[1]) == {"op": "train", "microsteps": [1]}
    await ranks.end()
    assert not any(child.running for child in ranks.children)


async def test_the_loss_of_another_rank_ends_a_question_that_rank_0_cannot_answer(tmp_path: Path) -> None:
    ranks = await start(tmp_path, WAIT)
    asked = asyncio.create_task(ranks.ask("hang"))
    await asyncio.sleep(0)
    os.kill(ranks.children[1].pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="cell-0-rank-1 ended with status -9"):
        await asked
    with pytest.raises(ChildDied, match="cell-0-rank-1"):
        await ranks.ask("train")
    await ranks.end()


async def test_the_loss_of_any_rank_is_noticed_without_a_question(tmp_path: Path) -> None:
    ranks = await start(tmp_path, WAIT)
    watch = asyncio.create_task(ranks.death())
    os.kill(ranks.children[1].pid, signal.SIGKILL)
    assert "cell-0-rank-1" in str(await watch)
    await ranks.end()


async def test_a_mistake_that_one_rank_names_goes_before_the_end_of_another(tmp_path: Path) -> None:
    ranks = await start(tmp_path, FULL)
    os.kill(ranks.children[0].pid, signal.SIGKILL)
    stdin = ranks.children[1].process.stdin
    assert stdin is not None
    stdin.write(b"\n")
    for child in ranks.children:
        await child.wait()
    reason = await ranks.death()
    assert isinstance(reason, UserError)
    assert str(reason) == "the disk is full"
    assert str(await ranks.death()) == "the disk is full"  # whoever asks
    await ranks.end()


async def test_a_rank_that_stands_still_is_killed_and_one_that_is_only_slow_is_not(tmp_path: Path) -> None:
    ranks = await start(tmp_path, BEATS)
    now = [0.0]
    liveness = LivenessWatch(lambda: now[0], 10.0)
    ranks.watch(lambda name: tmp_path / name, liveness, every=0.001)
    asked = asyncio.create_task(ranks.ask("hang"))

    for _ in range(5):
        while liveness.silence("cell-0-rank-1") != 0.0:
            await asyncio.sleep(0.001)
        now[0] += 9.0
    assert ranks.children[1].running
    assert not asked.done()
    os.kill(ranks.children[1].pid, signal.SIGSTOP)
    while ranks.children[1].running:
        now[0] += 6.0
        await asyncio.sleep(0.01)
    with pytest.raises(ChildDied, match="cell-0-rank-1 ended with status -9"):
        await asked
    await ranks.end()
