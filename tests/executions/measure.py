"""Measures what one execution costs. Run: python tests/executions/measure.py [COUNT] [KIND]

Prints, for a sandbox that runs `true`, for the shell agent against a trivial model on the handed-out socket
(one command, one answer), and for grading: the median wall milliseconds from start to a dead namespace, and,
where the machine has the cpuacct controller and this is root, the CPU milliseconds of everything (this
process's share included).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.harnesses import find_harness
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.sandbox import SandboxSpec, make_sandbox
from gyre.executions.tasks import load_task

HERE = Path(__file__).parent
TASK = HERE.parents[1] / "recipes/tasks/quickstart/sort-01"
GROUP = Path("/sys/fs/cgroup/cpuacct/gyre-measure")


def cpu() -> float:
    """CPU seconds of this process and all its descendants."""
    if not GROUP.is_dir():
        return float("nan")
    return int((GROUP / "cpuacct.usage").read_text()) / 1e9


def support() -> ModuleType:
    specification = importlib.util.spec_from_file_location("support", HERE / "conftest.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["support"] = module
    specification.loader.exec_module(module)
    return module


async def repeat(what: str, count: int, once: Callable[[int], Awaitable[float]]) -> None:
    await once(-1)
    started, seconds = cpu(), [await once(number) for number in range(count)]
    spent = (cpu() - started) / count
    print(f"{what}: median {statistics.median(seconds) * 1e3:.0f} ms wall, {spent * 1e3:.0f} ms CPU")


async def main(count: int, kind: str) -> None:
    root = Path(tempfile.mkdtemp(prefix="gyre-measure-"))
    sandbox, task, model_kind = await make_sandbox(kind, root), load_task(TASK), support().ScriptedModel
    grades: list[float] = []

    async def true(number: int) -> float:
        place = private_folder(root / f"true-{number}")
        upper, scratch = (private_folder(place / name) for name in ("upper", "scratch"))
        lowers = sandbox.lowers(root, task)
        spec = SandboxSpec(
            lowers=lowers,
            upper=upper,
            scratch=scratch,
            workdir="/app",
            argv=("true",),
            log=place / "log",
            listen_port=8400,
        )
        started = time.perf_counter()
        running = await sandbox.start(spec)
        await running.wait(60)
        await running.kill()
        seconds = time.perf_counter() - started
        assert running.listener is not None
        running.listener.close()
        remove_tree(place)
        return seconds

    async def execution(number: int) -> float:
        model = model_kind(["true", None])
        request = ExecutionRequest(
            name=f"e{number}",
            task=task,
            key="k",
            model="m",
            timeouts=Timeouts(harness=60, grader=60, execution=90),
        )
        result = await run_execution(
            request,
            find_harness("shell"),
            sandbox,
            root,
            model.serve,
            lambda: CallReport(len(model.requests)),
        )
        model.close()
        assert (result.outcome, result.model_calls) == ("graded", 2), result
        grades.append(result.seconds.grade)
        return result.seconds.prepare + result.seconds.run

    await repeat("sandbox with true", count, true)
    await repeat("execution with the shell agent (wall: without grading; CPU: with it)", count, execution)
    print(f"grading: median {statistics.median(grades) * 1e3:.0f} ms wall")
    remove_tree(root)


if __name__ == "__main__":
    if GROUP.parent.is_dir() and os.geteuid() == 0:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    try:
        given = dict(enumerate(sys.argv[1:]))
        asyncio.run(main(int(given.get(0, "40")), given.get(1, "bubblewrap")))
    finally:
        if GROUP.is_dir():
            (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
            GROUP.rmdir()
