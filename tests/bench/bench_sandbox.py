"""What executions wait for, by kind of sandbox.

Run: python tests/bench/bench_sandbox.py [--kinds bubblewrap,apptainer,enroot] [--counts 1,16,64] [--rounds 3]

Prints, for N executions that start at once on this node: seconds from the order to the first model call (p50, p99),
from the timeout to the snapshot, and how many gradings a second N graders do (a bash script of five lines). Beside it
the same start of a plain child process, N at once: the part that is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.grading import grade
from gyre.executions.harnesses import Launch, LaunchRequest
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import Limits
from gyre.executions.sandbox import Sandbox, SandboxSpec, make_sandbox
from gyre.executions.tasks import Task, load_task

TASK = Path(__file__).parents[2] / "recipes/tasks/quickstart/sort-01"
LONG = Timeouts(harness=600, grader=600, execution=3600)


class Caller:
    """A harness that does nothing but its first call."""

    name, dialect = "caller", "openai-chat"

    def check(self, version: str) -> str:
        return version

    def prepare(self, request: LaunchRequest) -> Launch:
        return Launch(argv=("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{request.port}; cat <&3"))


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered):8.3f} {ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]:8.3f}"


async def first_calls(sandbox: Sandbox, task: Task, root: Path, count: int) -> list[float]:
    async def one(number: int) -> float:
        began, called = time.perf_counter(), []
        servers: list[asyncio.Server] = []

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.append(time.perf_counter() - began)
            writer.close()

        async def listen(listener: socket.socket) -> None:
            servers.append(await asyncio.start_server(accepted, sock=listener))

        request = ExecutionRequest(name=f"first-{number}", task=task, key="k", model="m", timeouts=LONG)
        await run_execution(request, Caller(), sandbox, root, listen, lambda: CallReport(0))
        for server in servers:
            server.close()
        return called[0]

    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def snapshots(sandbox: Sandbox, task: Task, root: Path, count: int) -> tuple[list[float], list[Path]]:
    async def one(number: int) -> tuple[float, Path]:
        place = private_folder(root / f"timeout-{number}")
        upper, scratch = (private_folder(place / name) for name in ("upper", "scratch"))
        spec = SandboxSpec(
            lowers=sandbox.lowers(root, task),
            upper=upper,
            scratch=scratch,
            workdir=task.workdir,
            argv=("bash", "-c", "trap '' TERM; (setsid sleep 1000 &); sleep 1000; true"),
            log=place / "log",
        )
        running = await sandbox.start(spec)
        await running.wait(0.5)
        began = time.perf_counter()
        await running.kill()
        snapshot = running.snapshot(place / "snapshot")
        return time.perf_counter() - began, snapshot

    both = await asyncio.gather(*(one(number) for number in range(count)))
    return [seconds for seconds, _ in both], [path for _, path in both]


async def gradings(sandbox: Sandbox, task: Task, root: Path, found: list[Path]) -> float:
    began = time.perf_counter()
    work = (grade(task, sandbox, root, path, path.parent / "grading", Limits(), 600) for path in found)
    grades = await asyncio.gather(*work)
    assert all(grade.reward == 0.0 for grade in grades), grades
    return len(found) / (time.perf_counter() - began)


async def plain(count: int) -> list[float]:
    async def one() -> float:
        began = time.perf_counter()
        await (await asyncio.create_subprocess_exec("bash", "-c", "true")).wait()
        return time.perf_counter() - began

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def main(kinds: list[str], counts: list[int], rounds: int) -> None:
    print(f"{os.cpu_count()} cores; medians over {rounds} rounds, pooled")
    print("sandbox        N   first call p50, p99   timeout to snapshot   gradings/s   plain process p50, p99   load")
    for kind in kinds:
        for count in counts:
            calls, ends, rates, bare = [], [], [], []
            for _ in range(rounds):
                root = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
                sandbox, task = await make_sandbox(kind, root), load_task(TASK)
                sandbox.lowers(root, task)
                bare += await plain(count)
                calls += await first_calls(sandbox, task, root, count)
                seconds, found = await snapshots(sandbox, task, root, count)
                ends += seconds
                rates.append(await gradings(sandbox, task, root, found))
                remove_tree(root)
            rate = statistics.median(rates)
            print(
                f"{kind:10} {count:5}   {spread(calls)}     {spread(ends)}     {rate:8.1f}   {spread(bare)}"
                f"   {os.getloadavg()[0]:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="bubblewrap,process")
    parser.add_argument("--counts", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    asyncio.run(main(chosen.kinds.split(","), [int(count) for count in chosen.counts.split(",")], chosen.rounds))
