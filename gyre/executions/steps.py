"""Tasks of several steps: what each step asks, what happens before it, and how the steps' rewards become one.

Owns `Step`, `Part` and Harbor's reward rules as pure functions. Invariants: a step sees its own instruction, files and
tests and no other step's; the reward is a function of the steps that ran, each of which has a valid one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field, structs

from gyre.executions.healthcheck import UNHEALTHY, Healthcheck

if TYPE_CHECKING:
    from gyre.executions.tasks import Task

Strategy = Literal["mean", "final"]
REWARD = "reward"
"""The name of the reward among the numbers that a grader may give."""
FILES = "/run/gyre/step"
"""Where the sandbox shows a step's files before they are copied."""
FILES_VARIABLE = "GYRE_STEP_FILES"
AFRESH = 'rm -rf -- "${GYRE_ROOT-}/logs/agent" 2>/dev/null; mkdir -p "${GYRE_ROOT-}/logs/agent"\n'
COPY = f"""
cp -dR --remove-destination -- "${FILES_VARIABLE}/." . || exit {UNHEALTHY}
unset {FILES_VARIABLE}
"""
SETUP = f'bash "$PWD/setup.sh" || exit {UNHEALTHY}\n'


class Step(Struct, frozen=True, kw_only=True):
    """One step. Fields are those of `Task`, where they take the place of the task's own. Times in seconds."""

    name: str
    instruction: str
    agent_user: str = ""
    """"" here and below: the environment's own."""
    verifier_user: str = ""
    agent_timeout: float = 0.0
    verifier_timeout: float = 600.0
    verifier_env: dict[str, str] = field(default_factory=dict)
    separate: bool = False
    own_verifier: Task | None = None
    artifacts: tuple[str, ...] = ()
    test_folders: tuple[str, ...]
    test_file: str
    solution_folder: str
    solve_file: str
    healthcheck: Healthcheck | None = None
    """Beside the environment's, which is the first step's too."""
    files: Path | None = None
    """A folder that is copied into the work directory before the step; its `setup.sh` is run there."""
    min_reward: dict[str, float] = field(default_factory=dict)
    """Below one of these, or without it, the step is the last one."""


class Part(Struct, frozen=True, kw_only=True):
    """What one session of a harness gets: the whole task, or one step of it."""

    name: str = ""
    """The step's; "" for a task without steps."""
    task: Task
    before: str = ""
    """Bash that comes before the harness in its sandbox."""
    files: Path | None = None
    """Shown at FILES."""
    min_reward: dict[str, float] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """What `before` needs besides the task's own environment."""
        return {FILES_VARIABLE: FILES} if self.files is not None else {}

    def named(self, text: str) -> str:
        """`text`, with the step that it is about."""
        return ": ".join(filter(None, (f"step {self.name}" if self.name else "", text)))


def parts(task: Task) -> tuple[Part, ...]:
    """The sessions of an execution of `task`, in order."""
    if not task.steps:
        return (Part(task=task, before=task.before),)
    return tuple(_part(task, step, AFRESH if number else task.before) for number, step in enumerate(task.steps))


def _part(task: Task, step: Step, before: str) -> Part:
    if step.files is not None:
        before += COPY + (SETUP if (step.files / "setup.sh").is_file() else "")
    if step.healthcheck is not None:
        before += step.healthcheck.script()
    own = structs.replace(
        task,
        instruction=step.instruction,
        agent_user=step.agent_user or task.agent_user,
        verifier_user=step.verifier_user or task.verifier_user,
        agent_timeout=step.agent_timeout,
        verifier_timeout=step.verifier_timeout,
        verifier_env=step.verifier_env,
        separate=step.separate,
        own_verifier=step.own_verifier,
        artifacts=step.artifacts,
        test_folders=step.test_folders,
        test_file=step.test_file,
        solution_folder=step.solution_folder,
        solve_file=step.solve_file,
        healthcheck=None,
        steps=(),
    )
    return Part(name=step.name, task=own, before=before, files=step.files, min_reward=step.min_reward)


def below(rewards: Mapping[str, float], least: Mapping[str, float]) -> str:
    """Which of the rewards is missing, or below what `least` asks of it, in words; "" when none is."""
    for name, threshold in least.items():
        if name not in rewards:
            return f"no {name}, of which min_reward asks {threshold:g}"
        if rewards[name] < threshold:
            return f"{name} {rewards[name]:g}, below min_reward {threshold:g}"
    return ""


def one_number(rewards: Mapping[str, float]) -> float:
    """The number of this name, else the mean of all."""
    return rewards[REWARD] if REWARD in rewards else mean(rewards.values())


def combined(ran: Sequence[Mapping[str, float]], strategy: Strategy) -> float:
    """The reward of an execution from those of the steps that ran, one or more, as Harbor makes it.

    `final`: the last one's. `mean`: of each name the mean over the steps that ran, 0 where a step does not give it;
    steps after a stop at `min_reward` are no part of it. Exact before it is rounded: it knows no order of the numbers,
    and lies between the least and the greatest.
    """
    if strategy == "final":
        return one_number(ran[-1])
    names = {name for rewards in ran for name in rewards}
    return one_number({name: mean([rewards.get(name, 0.0) for rewards in ran]) for name in names})
