"""A real writer, killed at any moment or stopped by a full disk: what it acknowledged is there, and nothing is torn."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.ledger.events import Started
from gyre.ledger.journal import create_index
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import read_microstep
from gyre.ledger.shards import TurnReader, seal_dead
from gyre.ledger.tail import JournalTail

from .samples import turn

WRITER = Path(__file__).parent / "crash_writer.py"
ROOT = Path(__file__).parents[2]


def start(run: RunFolder) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(WRITER), str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def check(run: RunFolder, incarnation: int, acknowledged: int) -> None:
    """The ledger holds rounds 0, 1, ... of the incarnation: all that were acknowledged, at most one more."""
    lines = [line for line in JournalTail(run, ["w"]).poll() if line.incarnation == incarnation]
    assert [line.event for line in lines] == [
        Started(execution=f"g{incarnation}", attempt=i) for i in range(len(lines))
    ]
    assert acknowledged <= len(lines) <= acknowledged + 1
    files = sorted(run.microstep_dir(1).glob(f"{incarnation}-*.arrow"))
    assert acknowledged <= len(files) <= len(lines)
    for path in files:
        read_microstep(path)
    rows = TurnReader(run, "w").read_all()
    assert acknowledged <= len(rows) <= len(lines)
    assert rows == [turn(i, tokens=500) for i in range(len(rows))]


def test_kill_9_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    for round_ in range(6):
        run = RunFolder(tmp_path / f"run-{round_}").create()
        create_index(run, "w")
        reader = TurnReader(run, "w")
        seen = []
        process = start(run)
        assert process.stdout is not None and process.stderr is not None
        with process:
            acknowledged = 0
            for _ in range(rng.randrange(1, 25)):  # the writer goes on between the last line and the signal
                acknowledged = int(process.stdout.readline())
                seen += reader.poll()
            process.kill()
            rest = process.stdout.read().split("\n")[:-1]
            assert process.wait() == -9, process.stderr.read()
        acknowledged = int(rest[-1]) if rest else acknowledged
        check(run, 1, acknowledged)
        seal_dead(run, "w", 1)
        check(run, 1, acknowledged)
        assert [*seen, *reader.poll()] == reader.read_all()
        assert not list(run.shard_dir("w").glob("[!.]*.arrows"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB. Needs root (skipped otherwise)."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "gyre-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_one_clear_line_and_nothing_is_lost(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run").create()
    create_index(run, "w")
    with start(run) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors == f"the file system of {run.path} is full: free space, then gyre resume run\n"
    acknowledged = int(output.split()[-1])
    assert acknowledged > 10
    check(run, 1, acknowledged)
    # space is freed, and the next incarnation goes on in files of its own
    for path in sorted(run.microstep_dir(1).glob("*.arrow"))[: acknowledged // 2]:
        path.unlink()
    seal_dead(run, "w", 1)
    assert len(TurnReader(run, "w").read_all()) in (acknowledged, acknowledged + 1)
    process = start(run)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "1\n"
        process.kill()
    assert {line.incarnation for line in JournalTail(run, ["w"]).poll()} == {1, 2}
