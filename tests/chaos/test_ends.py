"""Ends that were not planned: Ctrl-C, cancel, a supervisor that is killed. Nothing is left, and resume goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from tests.chaos import moments, procs
from tests.chaos.harness import Drill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Drills = Callable[..., Drill]


def interrupt(drill: Drill) -> None:
    assert drill.process is not None
    drill.process.send_signal(signal.SIGINT)


def test_ctrl_c_ends_the_run_in_order_and_resume_completes_it(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.look_at_sockets()
    assert drill.seen_sockets
    interrupt(drill)
    assert drill.end() == 1
    assert drill.state.ended is not None
    assert drill.state.ended.state == "cancelled"
    assert "Traceback" not in drill.output.read_text()
    drill.assert_sound()
    drill.resume()
    drill.assert_completed()


def test_a_second_ctrl_c_ends_it_at_once(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.look_at_sockets()
    interrupt(drill)
    drill.wait(lambda: "once more" in drill.output.read_text(), running=False)
    interrupt(drill)
    assert drill.end() == 1
    assert "Traceback" not in drill.output.read_text()
    drill.assert_sound()


def test_ctrl_c_twice_ends_a_run_whose_scheduler_is_stopped(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.look_at_sockets()
    procs.freeze(drill.pid("scheduler"))
    interrupt(drill)
    drill.wait(lambda: "once more" in drill.output.read_text(), running=False)
    interrupt(drill)
    assert drill.end() == 1
    drill.assert_sound()


def test_cancel_from_outside(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.look_at_sockets()
    refused = drill.command("resume", "drill")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0].startswith("gyre: drill is still alive")
    assert len(refused.stderr.splitlines()) == 1
    cancelled = drill.command("cancel", "drill")
    assert cancelled.returncode == 0, cancelled.stderr
    assert drill.end() == 1
    assert drill.state.ended is not None
    assert drill.state.ended.state == "cancelled"
    again = drill.command("cancel", "drill")
    assert (again.returncode, again.stderr) == (2, "gyre: drill is cancelled already\n")


def test_the_supervisor_is_killed_and_resume_completes_the_run(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(lambda state: moments.core_training(state, step=1))
    assert drill.process is not None
    ours = procs.belonging(drill.run.path)
    drill.kill(drill.process.pid)
    drill.process.wait()
    drill.wait(lambda: not procs.belonging(drill.run.path), running=False)
    drill.assert_gone()
    assert len(ours) >= 8
    status = json.loads(drill.command("status", "drill", "--json").stdout)
    assert (status["state"], status["reason"]) == ("failed", "nobody keeps it going; gyre resume goes on")
    drill.resume()
    drill.assert_completed()
    drill.assert_replays(2)
