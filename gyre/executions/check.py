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
from gyre.executions.steps import FILES, Part, below, combined, parts
from gyre.executions.succession import Left, upper_after
from gyre.executions.tasks import NO_IMAGES, Task, load_task, task_folders

DEFAULT_LIMITS = Limits()
NOT_KEPT = "; processes that an earlier step left running are ended with it"
"""Said of a later step that goes wrong: in Harbor's own container they would be there."""


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
                for part in parts(task):
                    sandbox.user(root, part.task, part.task.agent_user)
                    sandbox.user(root, part.task.grader, part.task.grader.verifier_user)
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
    problems: list[str] = []
    try:
        untouched = await _rewards_after(task, sandbox, root, workspace / "untouched", limits, False, problems)
        started = loop.time()
        missing = sorted({part.task.solve_file for part in parts(task) if not part.task.solution.is_file()})
        problems += [f"{path} is missing: it cannot be shown that the task can be solved" for path in missing]
        solved = None
        if not missing:
            solved = await _rewards_after(task, sandbox, root, workspace / "solved", limits, True, problems)
        seconds = loop.time() - started
    finally:
        remove_tree(workspace)
    if untouched and untouched.reward > 0:
        problems.append(f"an untouched workspace earns {untouched.reward:g}, not 0{untouched.steps}")
    if solved and solved.reward != 1:
        problems.append(f"the solution earns {solved.reward:g}, not 1{solved.steps}")
    return TaskCheck(
        name=task.name,
        image=str(task.image.path) if task.image is not None else "",
        solution=solved.reward if solved else None,
        untouched=untouched.reward if untouched else None,
        solve_seconds=seconds - (solved.seconds if solved else 0.0),
        grade_seconds=solved.seconds if solved else 0.0,
        problems=tuple(problems),
    )


class _Earned(Struct, frozen=True):
    """`seconds` of grading; `steps` says what each step earned, for a task that has some."""

    reward: float
    seconds: float
    steps: str


async def _rewards_after(
    task: Task, sandbox: Sandbox, root: Path, workspace: Path, limits: Limits, solve: bool, problems: list[str]
) -> _Earned | None:
    """Run the solution of each part of `task`, or nothing, in one workspace and grade what each leaves; None when
    something goes wrong, which is added to `problems`.
    """
    ran = parts(task)
    grades: list[Grade] = []
    left: Left | None = None
    for part in ran:
        argv: tuple[str, ...] = ("true",)
        binds: tuple[Bind, ...] = ()
        if solve:
            argv, binds = script_command(part.task.solution, task.folder / part.task.solution_folder, "/solution")
        place = private_folder(workspace / (part.name or "whole"))
        graded, left = await _grade_after(part, sandbox, root, place, left, limits, argv, binds, problems)
        if graded is None or graded.reward is None:
            return None
        grades.append(graded)
        if short := below(graded.rewards, part.min_reward):
            if solve and part is not ran[-1]:
                problems.append(part.named(f"the solution earns {short}: no step follows"))
            break
    seconds = sum(grade.seconds for grade in grades)
    each = ", ".join(f"{part.name} {grade.reward:g}" for part, grade in zip(ran, grades))
    steps = f" ({each})" if task.steps else ""
    if solve and any(grade.reward != 1 for grade in grades[1:]):
        steps += NOT_KEPT
    return _Earned(combined([grade.rewards for grade in grades], task.step_reward), seconds, steps)


async def _grade_after(
    part: Part,
    sandbox: Sandbox,
    root: Path,
    workspace: Path,
    before: Left | None,
    limits: Limits,
    argv: tuple[str, ...],
    binds: tuple[Bind, ...],
    problems: list[str],
) -> tuple[Grade | None, Left | None]:
    """Run `argv` in a sandbox of `part`, on what the parts `before` left if there are some, and grade what it leaves,
    which is returned too; what goes wrong is added to `problems`.
    """
    task, what = part.task, workspace.parent.name + (f" ({part.named('')})" if part.name else "")
    upper, scratch = (workspace / name for name in ("upper", "scratch"))
    private_folder(scratch)
    if part.files is not None:
        binds = (*binds, Bind(part.files, FILES))
    try:
        user = sandbox.user(root, task, task.agent_user)
        below, resumed = upper_after(before, upper, user)
        spec = SandboxSpec(
            lowers=sandbox.lowers(root, task, below),
            upper=upper,
            scratch=scratch,
            workdir=task.workdir,
            argv=argv,
            log=workspace / "log",
            binds=binds,
            env={**task.env, **task.solution_env, **part.env},
            limits=limits.narrowed(task.memory, task.storage),
            before=part.before,
            resumed=resumed,
            image=task.on_image,
            user=user,
        )
        running = await sandbox.start(spec)
    except (SandboxFailure, OSError) as failure:
        problems.append(f"{what}: {failure}")
        return None, None
    status = ExitStatus()
    try:
        status = await running.wait(task.agent_timeout or task.verifier_timeout)
    finally:
        await finish(running.kill())
    if status.code == UNHEALTHY and part.before:
        failed = "the setup or a healthcheck" if part.name else "the environment's healthcheck"
        problems.append(f"{what}: {failed} failed{NOT_KEPT if before is not None else ''}")
    elif status.code != 0:
        problems.append(f"{what}: {argv[-1]} ended with {status}")
    snapshot = running.snapshot(workspace / "snapshot")
    result = await grade(task, sandbox, root, snapshot, workspace / "grading", limits, below=below)
    if result.reward is None:
        problems.append(f"{what}: {result.reason}: {result.detail}")
    return result, Left(snapshot=snapshot, below=below, user=user)
