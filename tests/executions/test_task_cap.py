"""The kernel's cap on a sandbox's tasks, for the machine's root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gyre.executions.limits import MIB, Limits
from gyre.executions.task_cap import WIDER, TaskCap, own_cgroup

V1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"


@pytest.mark.parametrize(
    ("memberships", "mounts", "folder"),
    [
        ("8:pids:/\n1:cpu:/a\n0::/\n", V1, "/sys/fs/cgroup/pids"),
        ("8:cpu,pids:/slice/job\n0::/\n", V1 + V2, "/sys/fs/cgroup/pids/slice/job"),
        ("0::/slice/job\n", V2, "/sys/fs/cgroup/slice/job"),
        ("0::/\n", V2, "/sys/fs/cgroup"),
        ("0::/\n", V1, None),
        ("8:pids:/\n", V2, None),
        ("", "proc /proc proc rw 0 0\n", None),
    ],
)
def test_which_cgroup_is_its_own(memberships: str, mounts: str, folder: str | None) -> None:
    assert own_cgroup(memberships, mounts) == (Path(folder) if folder else None)


@pytest.fixture
def cap_folder() -> Path:
    """Skips where this user cannot have such a cgroup: the rlimit or the watchdog alone holds there."""
    with subprocess.Popen(["sleep", "60"]) as sleep:
        cap = TaskCap.around(sleep.pid, 16)
        sleep.kill()
        sleep.wait()
    if cap is None:
        pytest.skip("no cgroup with a pids controller for this user")
    cap.remove()
    assert not cap.folder.exists()
    return cap.folder.parent


@pytest.mark.every_kind
async def test_no_more_tasks_than_the_cap_whatever_the_watchdog_sees(lab: Any, cap_folder: Path) -> None:
    """Threads are no processes to the watchdog, so the kernel alone refuses these."""
    program = (
        "import threading, time\n"
        "n = 0\n"
        "try:\n"
        "    while n < 1000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        n += 1\n"
        "except RuntimeError as e:\n"
        "    print(n, e, flush=True)\n"
    )
    limits = Limits(processes=20, memory=512 * MIB)
    status, output, _ = await lab.run(f"exec /usr/bin/python3 -c '{program}'", limits=limits)
    count, _, why = output.strip().partition(" ")
    assert (status.code, why) == (0, "can't start new thread")
    assert WIDER * limits.processes - 5 < int(count) < WIDER * limits.processes


@pytest.mark.every_kind
async def test_a_cgroup_is_gone_with_its_sandbox(lab: Any, cap_folder: Path) -> None:
    mine = f"gyre-{os.getpid()}-*"
    running, _ = await lab.start("sleep 60")
    (folder,) = cap_folder.glob(mine)
    assert (folder / "pids.max").read_text() == f"{WIDER * lab.limits.processes}\n"
    await running.kill()
    assert list(cap_folder.glob(mine)) == []


async def test_what_a_killed_worker_left_goes_with_the_next_sandbox(lab: Any, cap_folder: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    left, another = cap_folder / f"gyre-{ended.pid}-dead", cap_folder / f"gyre-{os.getppid()}-alive"
    left.mkdir()
    another.mkdir()
    try:
        await lab.run("true")
        assert (left.exists(), another.exists()) == (False, True)
    finally:
        another.rmdir()
