"""Checks a folder of tasks: each is readable, its image is there, its solution earns the full reward, and an
untouched workspace earns none.

Owns `check_tasks`, behind `gyre tasks check`. Everything runs in the sandbox, as in an execution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gyre.errors import UserError
from gyre.executions.ends import finish
from gyre.executions.grading import Grade, grade, script_command
from gyre.executions.healthcheck import UNHEALTHY
from gyre.executions.images.store import Images, unpacked
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import Limits
from gyre.executions.sandbox import Bind, ExitStatus, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.tasks import NO_IMAGES, Task, load_task, task_folders

DEFAULT_LIMITS = Limits()


class TaskCheck(Struct, frozen=True, kw_only=True):
    """One task's result.

    `solution` and `untouched` are rewards (None: no valid one); seconds are wall time of grading.
    """

    name: str
    image: str = ""
    """Where its image lies; "": the host's own system."""
    solution: float | None
    untouched: float | None
    solve_seconds: float
    grade_seconds: float
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


async def check_tasks(
    path: Path,
    sandbox: Sandbox,
    root: Path,
    limits: Limits = DEFAULT_LIMITS,
    parallel: int = 2,
    done: Callable[[TaskCheck], None] = lambda check: None,
    images: Images = NO_IMAGES,
) -> list[TaskCheck]:
    """Check all tasks below `path`, with workspaces in `root`; `done` is called as each one ends.

    A task that cannot be read, or whose image is not there, has that problem. Raises UserError when there are no tasks.
    """
    folders = task_folders(path)
    free = asyncio.Semaphore(parallel)

    async def one(folder: Path) -> TaskCheck:
        async with free:
            try:
                task = load_task(folder, images=images)
                for image in filter(None, task.images):
                    await asyncio.to_thread(unpacked, image)
                for place, name in ((task, task.agent_user), (task.grader, task.grader.verifier_user)):
                    sandbox.user(root, place, name)
            except (UserError, OSError) as error:
                check = _unfit(folder.name, str(error))
            else:
                check = await check_task(task, sandbox, root, limits)
        done(check)
        return check

    return list(await asyncio.gather(*(one(folder) for folder in folders)))


def _unfit(name: str, problem: str) -> TaskCheck:
    return TaskCheck(
        name=name, solution=None, untouched=None, solve_seconds=0.0, grade_seconds=0.0, problems=(problem,)
    )


async def check_task(task: Task, sandbox: Sandbox, root: Path, limits: Limits) -> TaskCheck:
    """Grade the untouched workspace and the one that the task's solution leaves."""
    loop = asyncio.get_running_loop()
    workspace = root / "checks" / task.name
    remove_tree(workspace)
    limits = limits.narrowed(task.memory, task.storage)
    problems: list[str] = []
    try:
        untouched = await _grade_after(task, sandbox, root, workspace / "untouched", limits, ("true",), (), problems)
        started = loop.time()
        solved: Grade | None = None
        if task.solution.is_file():
            argv, binds = script_command(task.solution, task.folder / "solution", "/solution")
            solved = await _grade_after(task, sandbox, root, workspace / "solved", limits, argv, binds, problems)
        else:
            problems.append(f"{task.solve_file} is missing: it cannot be shown that the task can be solved")
        seconds = loop.time() - started
    finally:
        remove_tree(workspace)
    if untouched and untouched.reward is not None and untouched.reward > 0:
        problems.append(f"an untouched workspace earns {untouched.reward:g}, not 0")
    if solved and solved.reward is not None and solved.reward != 1:
        problems.append(f"the solution earns {solved.reward:g}, not 1")
    return TaskCheck(
        name=task.name,
        image=str(task.image.path) if task.image is not None else "",
        solution=solved.reward if solved else None,
        untouched=untouched.reward if untouched else None,
        solve_seconds=seconds - (solved.seconds if solved else 0.0),
        grade_seconds=solved.seconds if solved else 0.0,
        problems=tuple(problems),
    )


async def _grade_after(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    workspace: Path,
    limits: Limits,
    argv: tuple[str, ...],
    binds: tuple[Bind, ...],
    problems: list[str],
) -> Grade | None:
    """Run `argv` in a fresh sandbox of `task` and grade what it leaves; what goes wrong is added to
    `problems`.
    """
    what = workspace.name
    upper, scratch = (private_folder(workspace / name) for name in ("upper", "scratch"))
    try:
        spec = SandboxSpec(
            lowers=sandbox.lowers(root, task),
            upper=upper,
            scratch=scratch,
            workdir=task.workdir,
            argv=argv,
            log=workspace / "log",
            binds=binds,
            env={**task.env, **task.solution_env},
            limits=limits,
            before=task.before,
            image=task.on_image,
            user=sandbox.user(root, task, task.agent_user),
        )
        running = await sandbox.start(spec)
    except (SandboxFailure, OSError) as failure:
        problems.append(f"{what}: {failure}")
        return None
    status = ExitStatus()
    try:
        status = await running.wait(task.agent_timeout or task.verifier_timeout)
    finally:
        await finish(running.kill())
    if status.code == UNHEALTHY and task.healthcheck is not None:
        problems.append(f"{what}: the environment's healthcheck failed")
    elif status.code != 0:
        problems.append(f"{what}: {argv[-1]} ended with {status}")
    snapshot = running.snapshot(workspace / "snapshot")
    result = await grade(task, sandbox, root, snapshot, workspace / "grading", limits)
    if result.reward is None:
        problems.append(f"{what}: {result.reason}: {result.detail}")
    return result
