"""The test cluster and runs on it, for the tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.views.runs import OpenRun, open_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "cluster"
POLL_SECONDS = 0.5
WAIT_SECONDS = 240.0
SETTINGS = (
    "slurm.cpu.nodes=2",
    "slurm.cpu.partition=cpu",
    "slurm.gpu.partition=gpu",
    "slurm.gpu.gres=gpu:4",
    "slurm.signal_before_end=60s",
    "local.liveness=8s",
)


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

    def heal(self) -> None:
        """No jobs, and every node up."""
        self.slurm("scancel", "-u", "root")
        wait(lambda: not self.slurm("squeue", "-h"), "the queue is empty")
        down = {line.split()[0] for line in self.slurm("sinfo", "-h", "-N", "-o", "%N %t").splitlines() if "*" in line}
        for node in sorted(down) + [n for n in ("cpu1", "cpu2", "gpu1", "gpu2", "gpu3", "gpu4") if n not in down]:
            if not (self.root / "run" / f"slurmd.{node}.pid").exists():
                self.call("start", node)
        wait(lambda: self.idle() == 6, "every node is idle")

    def idle(self) -> int:
        return len(
            {line for line in self.slurm("sinfo", "-h", "-N", "-o", "%N %t").splitlines() if line.endswith("idle")}
        )


class Submitted:
    """A run that was submitted to the test cluster."""

    def __init__(self, cluster: Cluster, home: Path, cache: Path, recipe: Path, *settings: str) -> None:
        self.cluster = cluster
        self.environment = {**cluster.environment, "GYRE_RUNS": str(home), "GYRE_CACHE": str(cache)}
        self.home, self.recipe = home, recipe
        self.settings = [f"--set={setting}" for setting in (*SETTINGS, *settings)]

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

    def submit(self, *more: str) -> Submitted:
        self.gyre("submit", str(self.recipe), *self.settings, *more)
        return self

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.gyre("status", "--json"))
        return found

    @property
    def opened(self) -> OpenRun:
        return open_run(next(self.home.iterdir()))

    @property
    def job_id(self) -> str:
        return self.opened.job.job_ids[-1]

    def wait_for(self, condition: Callable[[OpenRun], bool], what: str, seconds: float = WAIT_SECONDS) -> OpenRun:
        """Until the folded ledger says so."""
        opened = self.opened

        def told() -> bool:
            opened.view.poll()
            if condition(opened):
                return True
            assert opened.state.ended is None, f"the run ended before: {what}\n{self.explain()}"
            return False

        wait(told, what, seconds, self.explain)
        return opened

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda run: reached(run) >= step, f"step {step} is committed")

    def wait_for_state(self, *states: str) -> dict[str, Any]:
        wait(lambda: self.status()["state"] in states, f"the run is {' or '.join(states)}", explain=self.explain)
        return self.status()

    def explain(self) -> str:
        logs = sorted(self.opened.run.launch.glob("job-*.log"))
        return json.dumps(self.status()["slurm"]) + "\n" + "\n".join(log.read_text()[-2000:] for log in logs)

    def verify(self) -> None:
        self.gyre("verify")


def reached(run: OpenRun) -> int:
    """The newest step that stands."""
    reign = run.state.reign()
    return reign.step() if reign is not None else 0


def wait(
    condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS, explain: Callable[[], str] | None = None
) -> None:
    """Poll for a condition; the deadline only bounds a failing test."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {what}\n{explain() if explain else ''}")
        time.sleep(POLL_SECONDS)
