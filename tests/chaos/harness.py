"""A run under test: start it, follow its ledger to a moment, kill something, and check what must hold at its end.

Invariant: nothing is timed. Moments are conditions on the folded state; a deadline only tells that they never came.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.ledger.view import LedgerView
from gyre.views.audit import audit
from gyre.views.runs import read_run
from tests.chaos import moments, procs
from tests.tasks import graded_at_random

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "short.toml"
DEADLINE = 400.0
POLL = 0.02
PATIENT = ("tasks.harness_timeout=200s", "tasks.execution_timeout=300s")
"""A busy machine, or a harness that is held, must not change what happens."""
HARNESS_PROCESSES = 2
"""bwrap's first process, and the harness."""
SMALL_MICROSTEPS = ("rollout.context=384", "train.tokens_per_microstep=384")
"""Several micro-steps a step, so that both cells have something to train."""


def gyre(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gyre.cli.main", *arguments]


class Drill:
    """One run, of recipes/short.toml or another recipe, in a GYRE_RUNS of its own, with rewards that make every group
    train. `deadline`: seconds that anything may take to come."""

    def __init__(
        self,
        home: Path,
        cache: Path,
        steps: int = 2,
        settings: tuple[str, ...] = SMALL_MICROSTEPS,
        recipe: Path = RECIPE,
        deadline: float = DEADLINE,
    ) -> None:
        self.home = home
        self.recipe, self.deadline = recipe, deadline
        self.run = RunFolder(home / "drill")
        self.steps = steps
        tasks = graded_at_random(home.parent / f"{home.name}.tasks")
        self.settings = [f"train.steps={steps}", f"tasks.path={tasks}", *PATIENT, *settings]
        self.env = {**os.environ, "GYRE_RUNS": str(home), "GYRE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        self.output = home.parent / f"{home.name}.output"
        self.process: subprocess.Popen[bytes] | None = None
        self.view: LedgerView | None = None
        self.seen_sockets: set[str] = set()

    # ---- starting and following ----

    def start_submit(self) -> None:
        words = [word for setting in self.settings for word in ("--set", setting)]
        self._start(gyre("submit", str(self.recipe), "--local", "--name", "drill", *words))

    def submit(self) -> None:
        self.start_submit()
        self.wait(lambda: self.run.job.exists())
        self.view = LedgerView(self.run)

    def resume(self) -> None:
        self._start(gyre("resume", "drill"))

    def _start(self, words: list[str]) -> None:
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            gyre(*arguments), cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=self.deadline, check=False
        )

    @property
    def state(self) -> RunState:
        assert self.view is not None
        return self.view.state

    def wait(self, condition: Callable[[], Any], running: bool = True) -> Any:
        """Until `condition` holds. With `running`, the run must not end before that."""
        deadline = time.monotonic() + self.deadline
        while True:
            found = condition()
            if found:
                return found
            if running and self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode}:\n{self.report()}")
            assert time.monotonic() < deadline, f"the moment never came:\n{self.report()}"
            time.sleep(POLL)

    def until(self, condition: Callable[[RunState], Any]) -> Any:
        """Follow the ledger until `condition(state)` holds; what it gave."""

        def look() -> Any:
            assert self.view is not None
            self.view.poll()
            return condition(self.view.state)

        return self.wait(look)

    # ---- processes ----

    def pid(self, name: str) -> int:
        return self.state.processes[name].pid

    def rank(self, cell: str, number: int = 0) -> int:
        pid = procs.child_of(self.pid(cell), f"--rank {number} ", "gyre.processes.trainer_rank")
        assert pid, f"{cell} has no rank {number}"
        return pid

    def engine(self, cell: str, number: int = 0) -> int:
        found = self.state.cell(cell)
        assert found is not None
        return found.engines[number].pid

    def kill(self, *victims: int) -> None:
        """SIGKILL, and wait until they are gone. What listens now is remembered, to be looked for at the end."""
        procs.freeze(*victims)  # the moment is now; looking takes longer
        self.look_at_sockets()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not any(procs.alive(pid) for pid in victims), running=False)

    def hold_one(self, cell: str = "") -> tuple[str, list[int]]:
        """Stop the harness of one execution, routed to `cell`, while it runs: (execution, processes).

        The other group gets ready, is trained, and waits with its step for this one.
        """
        while True:
            for name in self.until(lambda state: moments.live(state, cell)):
                inside = procs.sandboxes(self.run.path, name)
                if len(inside) >= HARNESS_PROCESSES and procs.freeze(*inside):
                    return name, inside

    def until_both_train(self) -> None:
        """Hold the processor until both cells wait for micro-steps: then both get some."""
        processor = self.pid("processor")
        procs.freeze(processor)
        self.until(lambda state: all(moments.current(state, cell).state == "training" for cell in moments.CELLS))
        procs.thaw(processor)

    def look_at_sockets(self) -> None:
        ours = list(procs.belonging(self.run.path))
        self.seen_sockets |= procs.listening(procs.sockets(ours))

    def end(self) -> int:
        """Wait for the command's end, and that it leaves nothing behind; its exit code."""
        assert self.process is not None
        code = self.process.wait(self.deadline)
        if self.view is not None:
            self.view.poll()
        self.assert_gone()
        return code

    def assert_gone(self) -> None:
        left = procs.belonging(self.run.path)
        assert not left, f"left behind: {left}"
        assert not procs.listening(self.seen_sockets), "a port of the run still listens"

    def stop(self) -> None:
        """After a test, whatever it came to."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in procs.belonging(self.run.path):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it was on its way out

    # ---- what must hold ----

    def report(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()[-15:]
        for log in sorted(self.run.logs.glob("*/*.log")):
            text = log.read_text(errors="replace").splitlines()[-6:]
            lines += [f"--- {log.name}", *text]
        return "\n".join(lines)

    def assert_completed(self) -> None:
        """The run finished, and nothing was lost, counted twice or done again."""
        code = self.end()
        assert code == 0, self.report()
        state = self.state
        assert state.ended is not None
        assert state.ended.state == "finished"
        last = max(state.lineages.values(), key=lambda lineage: lineage.step()).step()
        assert last == self.steps
        self.assert_sound()
        assert set(state.history()) <= set(range(1, self.steps + 1))
        assert all(group.plan.purpose == "train" for name, group in state.groups.items() if name in state.consumed)
        assert not state.open

    def assert_sound(self) -> None:
        """The ledger as far as it goes: no breach of any rule, and no completed execution was dispatched again."""
        breaches = {rule.rule: rule.breaches for rule in audit(read_run(self.run)) if rule.breaches}
        assert not breaches, breaches
        for name, execution in self.state.executions.items():
            outcome = execution.outcome()
            if outcome is not None and outcome.outcome == "graded":
                assert outcome.attempt == max(execution.attempts), f"{name} was done, and dispatched again"
        for number, step in self.state.steps.items():
            if step.packed is not None:
                dropped = sum(step.packed.tokens_dropped.values())
                assert step.packed.tokens_sampled == step.packed.tokens_trained + dropped, number

    def assert_replays(self, step: int) -> None:
        """Trained again from the shards, the step's weights are those that the run published, bit by bit."""
        done = self.command("replay", "drill", "--steps", f"1:{step}", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(done.stdout)
        assert [row["step"] for row in rows] == list(range(1, step + 1))
        assert all(row["microsteps_equal"] for row in rows), rows
        assert all(row["weights_equal"] in (True, None) for row in rows), rows
        assert any(row["weights_equal"] for row in rows), "nothing was compared"
