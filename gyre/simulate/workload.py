"""A workload: what is simulated, as typed structs; TOML, overrides, errors that name the key.

Owns the names and types of a workload's keys. Durations are seconds once loaded. Invariant: a workload that loads is
complete and possible. Times of training are cell-seconds: what one cell needs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from gyre.errors import UserError
from gyre.recipe.keys import known_keys, unknown_keys
from gyre.recipe.schema import Natural, Positive, Recipe, Seconds
from gyre.recipe.units import parse_seconds

NonNegative = Annotated[float, Meta(ge=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Group(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    executions: Positive = 16
    """N"""
    groups_per_step: Positive = 8
    """B"""
    min_graded: Positive = 2

    @classmethod
    def of(cls, recipe: Recipe) -> Group:
        group = recipe.group
        return cls(executions=group.executions, groups_per_step=group.groups_per_step, min_graded=group.min_graded)


class Schedule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps_per_burst: Positive = 1
    """mu"""
    lead_steps: Natural = 0
    """phi"""
    max_overtake: Natural = 64
    """0: groups are consumed strictly in the order of their dispatch."""
    room: Annotated[float, Meta(gt=0.0)] = 1.0
    """The C_e that the scheduler reckons with, as a multiple of the true one: what misjudging it costs."""

    @classmethod
    def of(cls, recipe: Recipe) -> Schedule:
        schedule = recipe.schedule
        return cls(
            steps_per_burst=schedule.steps_per_burst,
            lead_steps=schedule.lead_steps,
            max_overtake=schedule.max_overtake,
        )


class Cells(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: Positive = 8
    executions_per_cell: Positive = 64
    """C_e"""
    overload: Literal["queue", "slow"] = "queue"
    """More executions than rooms: the rest waits its turn (at dispatch), or all of the cell's share its speed."""
    generation_share: Share = 1.0
    """The part of an execution's time that a slow engine stretches; the rest is tools."""
    to_training: Seconds = 8.52
    to_rollout: Seconds = 3.46
    refresh: Seconds = 3.46
    """A serving cell takes new weights."""
    rejoin: Seconds = 0.0
    """A training cell takes the weights of the next step (the publication's time is in training.optimizer)."""
    reroute: Seconds = 0.0
    """An execution's delay when its cell leaves, whatever it has done by then."""
    prefill: Seconds = 0.0
    """Until another cell has an execution's whole context; a part of it in proportion. Without KV moved this is what
    the prefill takes, with KV moved what the move takes."""
    latency: Seconds = 0.0
    """From a fact to the act that it causes, through the ledger."""


class Executions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Durations are exp(spread_group * z_group + spread_execution * z_execution), scaled to `mean` after timeouts."""

    mean: Seconds
    spread_group: NonNegative = 0.4
    spread_execution: NonNegative = 0.3
    timeout: Seconds
    """Then the execution is cut and graded as it stands."""
    timeout_clock: Literal["wall", "service"] = "wall"
    """Does time without service count? `service` is what no clock on a wall measures."""


class Turns(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An execution as turns of generation and tool time. Its duration stays the one drawn, at full speed."""

    seconds: Seconds = 0.0
    """Mean of a turn, generation and tool; 0: turns are not simulated one by one."""
    generation: Share = 0.6
    """The part of it that generates."""
    spread: NonNegative = 1.0
    """Generations and tools are log-normal about their means, with this spread of the logarithm: a heavy tail."""
    curve: list[tuple[float, float]] = []
    """(calls that a cell generates at once, speed of each), rising in calls; straight lines in between, and beyond the
    last point the engine is full. Empty: full speed up to C_e calls."""


class Training(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    work: Seconds
    """W: mean cell-seconds of an execution's training, proportional to duration ** exponent."""
    exponent: NonNegative = 0.7
    microstep: Seconds = 20.0
    """Cell-seconds of a micro-step. Work is in whole ones."""
    microsteps_per_grant: Positive = 1
    optimizer: Seconds = 20.0
    """Optimizer and publication of a step."""
    merge: Seconds = 0.0
    """The core adds one contribution."""


class Failures(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    between: Seconds = 0.0
    """Mean time between losses of a cell, each cell by itself; 0: none."""
    restart: Seconds = 600.0
    """Until a lost cell is back."""
    preemption: Seconds = 0.0
    """Mean time between preemptions of the whole job, workers too: open executions start anew; 0: none."""
    requeue: Seconds = 1800.0
    """Until a preempted job runs again."""


class Workload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    steps: Positive
    group: Group = field(default_factory=Group)
    schedule: Schedule = field(default_factory=Schedule)
    cells: Cells = field(default_factory=Cells)
    executions: Executions
    turns: Turns = field(default_factory=Turns)
    training: Training
    failures: Failures = field(default_factory=Failures)

    @property
    def groups(self) -> int:
        """Groups that the run consumes."""
        return self.steps * self.group.groups_per_step


def load_workload(path: Path, overrides: Sequence[str] = ()) -> Workload:
    """Reads a workload's TOML file and applies overrides ("cells.count=4"). Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the workload {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    return workload_of(table, overrides, str(path))


def override(workload: Workload, overrides: Sequence[str]) -> Workload:
    """The workload with keys set anew. Raises UserError."""
    return workload_of(msgspec.to_builtins(workload), overrides, workload.name) if overrides else workload


def workload_of(table: dict[str, Any], overrides: Sequence[str], where: str) -> Workload:
    for assignment in overrides:
        _override(table, assignment)
    for key in unknown_keys(table, Workload):
        known = ", ".join(".".join(k) for k, _, _ in known_keys(Workload) if k[:-1] == key[:-1])
        raise UserError(f"{where}: {'.'.join(key)}: unknown key; here there are {known}")
    for key, _, duration in known_keys(Workload):
        inner = table
        for part in key[:-1]:
            inner = inner.get(part, {})
        if duration and key[-1] in inner:
            try:
                inner[key[-1]] = parse_seconds(inner[key[-1]])
            except ValueError as error:
                raise UserError(f"{where}: {'.'.join(key)}: {error}") from None
    try:
        found = msgspec.convert(table, Workload)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None
    return _checked(found, where)


def _override(table: dict[str, Any], assignment: str) -> None:
    dotted, equals, value = assignment.partition("=")
    *path, last = (part.strip() for part in dotted.split("."))
    if not equals or not last or not all(path):
        raise UserError(f"--set {assignment}: expected key=value, such as cells.count=4")
    inner = table
    for part in path:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {assignment}: {part} is a value, not a table")
    try:
        inner[last] = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        inner[last] = value.strip()


def _checked(workload: Workload, where: str) -> Workload:
    executions, training = workload.executions, workload.training
    if not 0.0 < executions.mean < executions.timeout:
        raise UserError(f"{where}: executions.mean: must be above 0 and below executions.timeout")
    if training.microstep <= 0.0:
        raise UserError(f"{where}: training.microstep: must be above 0")
    calls = [point[0] for point in workload.turns.curve]
    if any(speed <= 0.0 for _, speed in workload.turns.curve) or calls != sorted({*calls} - {0.0}):
        raise UserError(f"{where}: turns.curve: [calls, speed] with calls rising from above 0 and speeds above 0")
    if workload.group.min_graded > workload.group.executions:
        raise UserError(f"{where}: group.min_graded: more than group.executions, so every group would be void")
    return workload
