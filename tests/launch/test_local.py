"""The supervisor, with small processes in place of a run's: budgets, the words of a failure, what it reaps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre.launch.local import Supervisor, reap
from gyre.ledger import events as ev
from gyre.ledger.files import write_atomic
from gyre.ledger.identity import process_start
from gyre.ledger.job import Job, write_job
from gyre.ledger.journal import create_index
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.ledger.tail import JournalTail
from gyre.processes.children import Child
from gyre.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
STAY = "import sys; sys.stdin.read()"
END = """
import sys, time
from pathlib import Path
from gyre.ledger import events as ev
from gyre.ledger.journal import Journal
from gyre.ledger.layout import RunFolder
journal = Journal.open(RunFolder(Path(sys.argv[1])), "scheduler", time.time)
journal.append(ev.Opened(pid=1, pid_start=1.0, host="h", code="0"))
journal.append(ev.RunEnded(state="finished"))
"""


@dataclass
class Program:
    """Python text in place of a process; the others stay until their stdin ends."""

    name: str
    text: str


def make_run(folder: Path, restarts: int = 1, liveness: str = "15s") -> RunFolder:
    run = RunFolder(folder / "run").create()
    recipe = load_recipe(ROOT / "recipes/short.toml", [f"local.restarts={restarts}", f"local.liveness={liveness}"])
    from gyre.recipe.load import dump_toml

    write_atomic(run.recipe, dump_toml(recipe).encode())
    job = Job(
        launcher="local",
        code="0",
        created=0.0,
        model="m",
        workers=["worker-0"],
        cells=["cell-0"],
        tasks=[],
        eval_tasks=[],
    )
    for writer in job.writers():
        create_index(run, writer)
    write_job(run, job)
    return run


def supervisor(run: RunFolder, *programs: Program) -> Supervisor:
    texts = {program.name: program.text for program in programs}

    class Small(Supervisor):
        async def _start(self, name: str) -> Child:
            argv = [sys.executable, "-c", texts.get(name, STAY), str(run.path)]
            child = await Child.start(name, argv, self._log(name))
            self._children[name] = child
            return child

    return Small(run, load_recipe(run.recipe, folders=False))


def written(run: RunFolder) -> list[ev.Event]:
    return [line.event for line in JournalTail(run, ["supervisor"]).poll()]


async def test_a_process_is_started_again_within_its_budget(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    small = supervisor(run, Program("worker-0", "raise SystemExit(70)"))
    assert await small.supervise() == "failed"
    assert small.failure.startswith("worker-0 ended 2 times (last status 70); see ")
    ended = [event for event in written(run) if isinstance(event, ev.ProcessEnded) and event.name == "worker-0"]
    assert [event.code for event in ended] == [70, 70]
    gave_up = [event for event in written(run) if isinstance(event, ev.GaveUp)]
    assert [event.reason for event in gave_up] == [small.failure]


@pytest.mark.parametrize("code", [1, 2])
async def test_a_users_mistake_ends_the_run_in_its_own_words(tmp_path: Path, code: int) -> None:
    say = "from gyre.processes.children import say_last_words\n"
    run = make_run(tmp_path)
    text = f"{say}say_last_words('cell-0: model.path: it is broken')\nraise SystemExit({code})"
    small = supervisor(run, Program("cell-0", text))
    assert await small.supervise() == "failed"
    assert small.failure == "cell-0: model.path: it is broken"
    assert not [event for event in written(run) if isinstance(event, ev.ProcessEnded) and event.name == "cell-0"]


async def test_a_traceback_is_no_users_mistake(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    small = supervisor(run, Program("processor", "raise RuntimeError('ours')"))
    assert await small.supervise() == "failed"
    assert small.failure.startswith("processor ended 2 times (last status 1); see ")


async def test_a_process_that_never_gets_ready_is_not_tried_for_long(tmp_path: Path) -> None:
    say = "from gyre.processes.children import say_last_words\nsay_last_words('its engine does not start')\n"
    small = supervisor(make_run(tmp_path, restarts=20), Program("cell-0", f"{say}raise SystemExit(75)"))
    assert await small.supervise() == "failed"
    assert small.failure.startswith("cell-0 ended 3 times before it was ready (its engine does not start); see ")


async def test_a_process_that_hangs_is_killed(tmp_path: Path) -> None:
    beat = "import sys; from pathlib import Path; from gyre.ledger.liveness import Heartbeat\n"
    text = f"{beat}Heartbeat(Path(sys.argv[1]) / 'alive' / 'worker-0').beat()\n{STAY}"
    small = supervisor(make_run(tmp_path, restarts=0, liveness="0.2s"), Program("worker-0", text))
    assert await small.supervise() == "failed"
    assert small.failure.startswith("worker-0 ended 1 times (last status -9); see ")


async def test_a_scheduler_that_is_away_does_not_end_the_run(tmp_path: Path) -> None:
    small = supervisor(make_run(tmp_path, restarts=4), Program("worker-0", "raise SystemExit(4)"))
    assert await small.supervise() == "failed"
    assert small.failure.startswith("worker-0 ended 5 times (last status 4); see ")  # the budget alone


async def test_the_schedulers_word_ends_the_run_and_all_its_processes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    small = supervisor(run, Program("scheduler", END))
    small._let_go_seconds = 0.2
    assert await small.supervise() == "finished"
    assert small.failure == ""
    assert all(not child.running for child in small._children.values())


def test_reap_ends_what_is_left_and_spares_a_recycled_pid() -> None:
    left, other, ended = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3))
    try:
        start = process_start(left.pid)
        state = RunState(
            processes={
                "worker-0": ev.ProcessStarted(name="worker-0", pid=left.pid, pid_start=start),
                "cell-0": ev.ProcessStarted(name="cell-0", pid=other.pid, pid_start=process_start(other.pid) - 1),
                "cell-1": ev.ProcessStarted(name="cell-1", pid=ended.pid, pid_start=process_start(ended.pid)),
                "gone": ev.ProcessStarted(name="gone", pid=2**22 - 1, pid_start=1.0),
            },
            processes_ended={"cell-1": ev.ProcessEnded(name="cell-1", pid=ended.pid, code=0)},
        )
        reap(state)
        assert left.wait(30) == -9
        assert other.poll() is None
        assert ended.poll() is None
    finally:
        for process in (left, other, ended):
            process.kill()
            process.wait()
