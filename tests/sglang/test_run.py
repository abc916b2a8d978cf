"""A run of recipes/quickstart-sglang.toml in small: two cells that switch, and engines that die and that hang.

In each of the first bursts, while every execution is held in the middle of its work, one fault is done to an engine
that has some of them; they go on at once, and the burst ends only after that engine serves again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.engines.sglang.install import interpreter
from gyre.ledger import events as ev
from gyre.ledger.state import RunState
from gyre.ledger.tail import JournalTail
from tests.chaos import moments, procs
from tests.chaos.harness import HARNESS_PROCESSES, ROOT, SMALL_MICROSTEPS, Drill
from tests.chaos.moments import CORE, SATELLITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

FAULTS = [(part, number) for number in (signal.SIGKILL, signal.SIGSTOP) for part in ("server", "scheduler")]
STEPS = len(FAULTS) + 1
SERVED = ("rollout", "draining", "releasing", "joining", "training")
"""States of a cell that has served since its engine came back."""
SMALL = (
    'model.build_arguments=["--steps", "240"]',  # the model of recipes/short.toml, which other tests have built
    "group.executions=4",
    "group.groups_per_step=2",
    "rollout.executions_per_cell=5",
    "rollout.liveness=30s",
    "schedule.phase_timeout=15m",
    "tasks.harness_timeout=900s",  # executions are held while an engine starts
    "tasks.grader_timeout=300s",
    "tasks.execution_timeout=1600s",
    "eval.path=",
    "local.liveness=60s",
)


class Held:
    """Executions of a burst whose harnesses are stopped."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill
        self.inside: dict[str, list[int]] = {}

    def take(self) -> str:
        """Hold every execution that runs, until both cells serve and two are held; a cell that carries one."""
        self.drill.until(self._took)
        return self._carriers()[0]

    def _took(self, state: RunState) -> bool:
        for name in moments.live(state):
            inside = procs.sandboxes(self.drill.run.path, name) if name not in self.inside else []
            if harness_runs(inside) and procs.freeze(*inside):
                self.inside[name] = inside
        return self._both_serve() and len(self.inside) > 1 and bool(self._carriers())

    def _both_serve(self) -> bool:
        return all(moments.current(self.drill.state, cell).serving is not None for cell in moments.CELLS)

    def _carriers(self) -> list[str]:
        """Cells that executions which are held have a route to, the satellite first."""
        return [cell for cell in (SATELLITE, CORE) if set(moments.live(self.drill.state, cell)) & set(self.inside)]

    def let_go(self, names: list[str]) -> None:
        for name in names:
            procs.thaw(*self.inside[name])


def harness_runs(inside: list[int]) -> bool:
    """Is the sandbox ready? Then its launcher is gone by exec (bwrap's own command line names it for ever); before that
    its worker waits for it."""
    commands = [procs.command(pid) for pid in inside]
    return len(inside) >= HARNESS_PROCESSES and any(words and "launcher.py" not in words for words in commands)


def family(server: int) -> list[int]:
    """An engine's processes: the server, and its children."""
    return [server, *(pid for pid in procs.pids() if procs.parent(pid) == server)]


def strike(drill: Drill, part: str, number: signal.Signals) -> tuple[str, list[int]]:
    """Do a fault to the engine of a cell that carries executions, and see it serve again: (cell, processes of before).

    They go on at once; one is held until then, so that the burst does not end before.
    """
    held = Held(drill)
    cell = held.take()
    server = drill.engine(cell)
    gone = family(server)
    victim = server if part == "server" else procs.child_of(server, "sglang::scheduler")
    assert victim, "SGLang's scheduler has another name"
    os.kill(victim, number)
    last, *others = held.inside
    held.let_go(others)
    drill.until(lambda state: drill.engine(cell) != server and moments.current(state, cell).state in SERVED)
    held.let_go([last])
    drill.until(lambda state: last not in state.open)
    return cell, gone


@pytest.fixture(scope="module")
def finished(installed: None, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Drill]:
    """A run that has ended, after every fault and a step that both cells trained."""
    settings = (*SMALL_MICROSTEPS, *SMALL, f"rollout.python={interpreter()}")
    recipe = ROOT / "recipes" / "quickstart-sglang.toml"
    drill = Drill(tmp_path_factory.mktemp("run") / "runs", cache, STEPS, settings, recipe, deadline=900.0)
    drill.home.mkdir()
    try:
        drill.submit()
        struck = [strike(drill, part, number) for part, number in FAULTS]
        drill.until_both_train()
        drill.assert_completed()
        assert not [pid for _, gone in struck for pid in gone if procs.alive(pid)], "a part of a struck engine is left"
        yield drill
    finally:
        drill.stop()


def test_both_cells_switch_and_train(finished: Drill) -> None:
    for cell in (CORE, SATELLITE):
        found = moments.current(finished.state, cell)
        entered = [what for what, _, _ in found.history]
        assert "training" in [*entered, found.state]
        assert {"draining", "releasing", "resuming"} <= set(entered)


def test_struck_engines_came_back_within_their_cells_incarnations(finished: Drill) -> None:
    assert len(finished.state.lineages) == 1
    started: set[int] = set()
    for cell in moments.CELLS:
        events = [line.event for line in JournalTail(finished.run, [cell]).poll()]
        assert len([event for event in events if isinstance(event, ev.Opened)]) == 1
        started |= {event.pid for event in events if isinstance(event, ev.EngineStarted)}
    assert len(started) >= len(moments.CELLS) + len(FAULTS)


def test_no_execution_was_lost_or_done_again(finished: Drill) -> None:
    outcomes = [execution.outcome() for execution in finished.state.executions.values()]
    assert len(outcomes) == 8 * STEPS
    assert all(found is not None and (found.outcome, found.attempt) == ("graded", 1) for found in outcomes)


def test_recorded_log_probabilities_are_the_trainers(finished: Drill) -> None:
    """fp32 on both sides: SGLang's, recorded when the tokens were sampled, and the trainer's own."""
    status = json.loads(finished.command("status", "drill", "--json").stdout)
    assert [step["step"] for step in status["steps"]] == list(range(1, STEPS + 1))
    assert all(step["logprob_difference"] <= 1e-4 for step in status["steps"])
    assert all(step["staleness"] == 0 for step in status["steps"])


def test_no_key_is_in_a_log(finished: Drill) -> None:
    logs = "".join(log.read_text(errors="replace") for log in finished.run.logs.glob("*/*.log"))
    found = [
        json.loads(path.read_text()) for path in finished.run.keys.iterdir() if path.suffix not in (".port", ".new")
    ]
    assert found
    assert not any(key in logs for keys in found for key in keys.values())


def test_replay_is_bit_equal(finished: Drill) -> None:
    finished.assert_replays(2)
