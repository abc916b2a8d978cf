"""The test cluster and runs on it, for the tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gyre.ledger.job import read_job
from gyre.views.runs import OpenRun, open_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "cluster"
POLL_SECONDS = 0.5
WAIT_SECONDS = 1200.0
"""Only tells that a moment never came: no test measures time."""
NODES = ("cpu1", "cpu2", "gpu1", "gpu2", "gpu3", "gpu4")
PLACES = (
    "slurm.cpu.nodes=2",
    "slurm.cpu.partition=cpu",
    "slurm.gpu.partition=gpu",
    "slurm.gpu.gres=gpu:4",
    "slurm.signal_before_end=600s",
)
PATIENT = (
    "local.liveness=20s",
    "schedule.phase_timeout=300s",
    "tasks.harness_timeout=200s",
    "tasks.execution_timeout=300s",
)
"""A busy machine must not change what happens."""
SMALL = (
    "group.executions=2",
    "harness.max_turns=1",
    "harness.max_tokens=24",
    "rollout.executions_per_cell=3",
    "rollout.context=384",
    "train.tokens_per_microstep=384",
)
"""Four short executions a step, several micro-steps, and one cell alone does not carry them all."""
ENDLESS = "train.steps=100000"
"""So that no moment comes too late: these runs go on until they are cancelled."""


class Cluster:
    """`slurm/cluster` under a root of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "etc" / "slurm.conf")}

    def call(self, *arguments: str) -> str:
        """Raises RuntimeError with what it said."""
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments, "--root", str(self.root)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return done.stdout

    def slurm(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def on(self, node: str, *command: str) -> str:
        """A command as on that node: its name, its hosts file."""
        pid = (self.root / "run" / f"slurmd.{node}.pid").read_text().strip()
        return self.slurm("nsenter", f"--target={pid}", "--mount", "--uts", *command)

    def heal(self) -> None:
        """No jobs, and every node up."""
        self.slurm("scancel", "-u", "root")
        for node in NODES:
            if not (self.root / "run" / f"slurmd.{node}.pid").exists():
                self.call("start", node)
        wait(lambda: not self.slurm("squeue", "-h"), "the queue is empty", explain=lambda: self.call("status"))
        wait(lambda: self.idle() == len(NODES), "every node is idle", explain=lambda: self.call("status"))

    def idle(self) -> int:
        lines = self.slurm("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return len({line for line in lines if line.endswith(" idle")})


class Submitted:
    """A run that was submitted to the test cluster."""

    def __init__(self, cluster: Cluster, home: Path, cache: Path, tasks: Path, *settings: str) -> None:
        self.cluster = cluster
        self.environment = {**cluster.environment, "GYRE_RUNS": str(home), "GYRE_CACHE": str(cache)}
        self.home = home
        chosen = (*PLACES, *PATIENT, *SMALL, f"tasks.path={tasks}", *settings)
        self.settings = [f"--set={setting}" for setting in chosen]

    def gyre(self, *arguments: str, code: int = 0) -> str:
        """A command of the command line; its output (the errors, when it is to fail)."""
        done = subprocess.run(
            [sys.executable, "-m", "gyre.cli.main", *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr or done.stdout
        return done.stderr if code else done.stdout

    def submit(self, code: int = 0) -> str:
        return self.gyre("submit", str(ROOT / "recipes" / "short.toml"), *self.settings, code=code)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.gyre("status", "--json"))
        return found

    @property
    def opened(self) -> OpenRun:
        return open_run(next(self.home.iterdir()))

    @property
    def job_id(self) -> str:
        return self.opened.job.job_ids[-1]

    def wait_for(self, condition: Callable[[OpenRun], bool], what: str, ending: bool = False) -> OpenRun:
        """Until the folded ledger says so. The run must not end before that, but with `ending` to go on."""
        opened = self.opened

        def told() -> bool:
            opened.view.poll()
            if condition(opened):
                return True
            ended, failure = opened.state.ended, opened.state.failure
            over = failure is not None or (ended is not None and not (ending and ended.state == "cancelled"))
            assert not over, f"the run ended before: {what}\n{self.explain()}"
            return False

        wait(told, what, explain=self.explain)
        return opened

    def wait_for_step(self, more: int = 1) -> int:
        """Until `more` steps are committed than now; the newest one."""
        wanted = reached(self.opened) + more
        return reached(self.wait_for(lambda run: reached(run) >= wanted, f"step {wanted} is committed"))

    def wait_for_attempt(self, attempt: int) -> OpenRun:
        """Until a scheduler of that attempt has opened."""

        def begun(opened: OpenRun) -> bool:
            return read_job(opened.run).attempt >= attempt and len(opened.state.opened["scheduler"]) >= attempt

        return self.wait_for(begun, f"attempt {attempt} has begun", ending=True)

    def wait_for_restart(self, name: str, how: Callable[[], object]) -> None:
        """Until a process that `how` ends has begun again."""
        self.wait_for_restarts([name], how)

    def wait_for_restarts(self, names: Sequence[str], how: Callable[[], object]) -> None:
        """Until all of these, which `how` ends, have begun again."""
        opened = self.opened.state.opened
        before = {name: max(opened[name]) for name in names}
        how()
        self.wait_for(
            lambda opened: all(max(opened.state.opened[name]) > before[name] for name in names),
            f"{', '.join(names)} start again",
        )

    def wait_for_state(self, *states: str) -> dict[str, Any]:
        """Until `gyre status` says so; asked for less often, for it takes a process."""
        found: dict[str, Any] = {}

        def told() -> bool:
            found.update(self.status())
            return found["state"] in states

        wait(told, f"the run is {' or '.join(states)}", explain=self.explain, poll=4 * POLL_SECONDS)
        return found

    def cancel(self) -> None:
        """End it in order; then nothing may be missing, and nothing done twice."""
        self.gyre("cancel")
        status = self.wait_for_state("cancelled", "failed")
        assert (status["state"], status["reason"]) == ("cancelled", "gyre cancel"), self.explain()
        self.sound()

    def finish(self, steps: int) -> None:
        """It ends well by itself, with every step."""
        status = self.wait_for_state("finished", "failed", "cancelled")
        assert status["state"] == "finished", self.explain()
        assert [step["step"] for step in status["steps"]] == list(range(1, steps + 1))
        self.sound()

    def sound(self) -> None:
        """Every step that stands is there once, the audit finds no breach, what was graded was not done again."""
        self.gyre("verify")
        opened = self.opened
        assert list(opened.state.history()) == list(range(1, reached(opened) + 1))
        for name, execution in opened.state.executions.items():
            outcome = execution.outcome()
            if outcome is not None and outcome.outcome == "graded":
                assert outcome.attempt == max(execution.attempts), f"{name} was done, and dispatched again"

    def explain(self) -> str:
        logs = sorted(self.opened.run.launch.glob("job-*.log"))
        return json.dumps(self.status()["slurm"]) + "\n" + "\n".join(log.read_text()[-2000:] for log in logs)


def reached(run: OpenRun) -> int:
    """The newest step that stands."""
    reign = run.state.reign()
    return reign.step() if reign is not None else 0


def wait(
    condition: Callable[[], bool], what: str, explain: Callable[[], str] | None = None, poll: float = POLL_SECONDS
) -> None:
    """Poll for a condition; the deadline only bounds a failing test."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_SECONDS:.0f} s in vain: {what}\n{explain() if explain else ''}")
        time.sleep(poll)
