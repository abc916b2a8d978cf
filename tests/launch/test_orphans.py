"""Orphans are buried and ended, whatever session they fled to. In a process of their own: it adopts for good."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, time
from gyre.launch.orphans import adopt_orphans, bury, children_of, end_orphans

def until(condition):
    while not condition():
        time.sleep(0.01)

adopt_orphans()
stranger = subprocess.Popen(["sleep", "600"])
spawn = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid, flush=True)"
parent = subprocess.Popen([sys.executable, "-c", spawn], stdout=subprocess.PIPE)
orphan = int(parent.stdout.readline())
parent.wait()
until(lambda: orphan in children_of(os.getpid()))

bury([stranger.pid])
assert orphan in children_of(os.getpid()), "it was buried alive"
os.kill(orphan, signal.SIGKILL)
until(lambda: bury([stranger.pid]) or orphan not in children_of(os.getpid()))

parent = subprocess.Popen([sys.executable, "-c", spawn], stdout=subprocess.PIPE)
orphan = int(parent.stdout.readline())
parent.wait()
assert end_orphans([stranger.pid], 30.0) == []
assert children_of(os.getpid()) == [stranger.pid]
assert stranger.poll() is None
stranger.kill()
stranger.wait()
bury([])  # without any child
print("done")
"""


def test_orphans_come_to_us_and_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
