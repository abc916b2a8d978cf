"""What resume refuses, and what it changes."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.launch.resume import prepare_resume
from gyre.ledger import events as ev
from gyre.ledger.identity import process_start
from gyre.ledger.job import read_job
from gyre.ledger.journal import Journal
from gyre.ledger.liveness import Heartbeat
from gyre.recipe.load import load_recipe
from gyre.views.runs import read_run
from tests.launch.test_local import make_run


def no_wait(seconds: float) -> None:
    """Nobody beats meanwhile."""


def test_a_run_that_beats_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    heart = Heartbeat(run.alive_path("cell-0"))
    with pytest.raises(UserError, match=r"^run is still alive \(cell-0 beats\): gyre cancel run first$"):
        prepare_resume(run, "failed", [], sleep=lambda seconds: heart.beat())
    assert read_job(run).attempt == 1


def test_a_run_whose_supervisor_lives_is_refused_though_nothing_beats(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    journal = Journal.open(run, "supervisor", time.time)
    journal.append(ev.Opened(pid=os.getpid(), pid_start=process_start(), host=socket.gethostname(), code="0"))
    with pytest.raises(
        UserError, match=rf"^run is still alive \(its supervisor is process {os.getpid()}\): gyre cancel"
    ):
        prepare_resume(run, "failed", [], sleep=no_wait)
    journal.append(ev.Opened(pid=os.getpid(), pid_start=1.0, host=socket.gethostname(), code="0"))
    prepare_resume(run, "failed", [], sleep=no_wait)  # another process has its number now
    journal.close()


def test_a_finished_run_needs_more_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UserError, match=r"--set train.steps=N"):
        prepare_resume(run, "finished", [], sleep=no_wait)
    recipe = prepare_resume(run, "finished", ["train.steps=5"], sleep=no_wait)
    assert recipe.train.steps == 5
    assert load_recipe(run.recipe, folders=False).train.steps == 5
    assert read_job(run).attempt == 2


def test_a_cancellation_no_longer_counts(tmp_path: Path) -> None:
    from gyre.launch.control import request_cancel

    run = make_run(tmp_path)
    request_cancel(run)
    assert read_run(run).state.cancel == 1
    prepare_resume(run, "cancelled", [], sleep=no_wait)
    assert read_run(run).state.cancel == 0


def test_of_two_at_the_same_moment_one_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def meanwhile(seconds: float) -> None:
        prepare_resume(run, "failed", [], sleep=no_wait)  # another command, that has looked and found nobody too

    with pytest.raises(UserError, match=rf"process {os.getpid()} on {socket.gethostname()}\) has just begun attempt 2"):
        prepare_resume(run, "failed", ["train.steps=9"], sleep=meanwhile)
    assert read_job(run).attempt == 2
    assert load_recipe(run.recipe, folders=False).train.steps != 9


def test_an_attempt_whose_claimant_died_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.launch / "attempt-2").write_text(f"{socket.gethostname()} {os.getpid()} 1\n")
    prepare_resume(run, "failed", [], sleep=no_wait)
    assert read_job(run).attempt == 3
