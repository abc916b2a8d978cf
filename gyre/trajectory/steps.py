"""One step: consumed groups in, micro-steps and the account of every sampled token out.

Owns the loss denominator and the count of tokens. Invariants: sampled = trained + dropped, exactly; the
denominator is the graded executions of the groups that are not void, whether they yield samples or not;
micro-steps are a function of the journalled sequence alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gyre.ledger.microsteps import MicroStep
from gyre.ledger.turns import Turn
from gyre.trajectory.advantages import advantages
from gyre.trajectory.experts import Records
from gyre.trajectory.packing import Packer
from gyre.trajectory.samples import Sample, select_execution
from gyre.trajectory.settings import Settings
from gyre.trajectory.targets import REASONS, Reason
from gyre.trajectory.tree import TrajectoryError


@dataclass(frozen=True, kw_only=True)
class ExecutionRecord:
    """How an execution ended. `attempt` is the one that counts; `turns` are those of all its attempts, in any
    order. `reward` is a finite number exactly when the outcome is `graded`. `routing`: recorded experts, for replay."""

    execution: str
    attempt: int
    outcome: Literal["graded", "excluded"]
    reward: float | None = None
    turns: list[Turn] = field(default_factory=list)
    routing: Records = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConsumedGroup:
    """A group that the journal puts into the step. `void`: as journalled; a group with fewer than
    `min_graded` graded executions is void in any case."""

    group: str
    dispatch_version: int
    executions: list[ExecutionRecord]
    purpose: Literal["train", "eval"] = "train"
    void: bool = False


@dataclass(frozen=True)
class Flush:
    """A journalled flush: the micro-steps that are open close."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The account of a step. `executions` is the denominator; tokens are sampled ones; `reward` is the mean
    over the denominator, None without any. `dropped` has reasons with a count above zero only."""

    step: int
    groups: int
    void_groups: int
    executions: int
    reward: float | None
    microsteps: int
    samples: int
    sampled: int
    trained: int
    dropped: dict[str, int]


class StepBuilder:
    """A fold over the journalled sequence of one step."""

    def __init__(self, settings: Settings, step: int) -> None:
        self._settings = settings
        self._step = step
        self._packer = Packer(step, settings.tokens_per_microstep, settings.packing)
        self._groups: set[str] = set()
        self._void_groups = 0
        self._rewards: list[float] = []
        self._microsteps = 0
        self._samples = 0
        self._sampled = 0
        self._trained = 0
        self._dropped: Counter[Reason] = Counter()

    def add_group(self, group: ConsumedGroup) -> list[MicroStep]:
        """The micro-steps that this group closes.

        Raises `TrajectoryError` for turns or rewards that contradict each other, `ValueError` for a group or
        an execution that comes twice. The builder is of no use after an error.
        """
        if group.group in self._groups:
            raise ValueError(f"group {group.group} is consumed twice in step {self._step}")
        if len({record.execution for record in group.executions}) < len(group.executions):
            raise ValueError(f"group {group.group} has an execution twice")
        self._groups.add(group.group)
        samples: list[Sample] = []
        executions = sorted(group.executions, key=lambda record: record.execution)
        for record, verdict in zip(executions, self._judge(group, executions), strict=True):
            samples += self._add_execution(record, verdict, group.dispatch_version)
        self._samples += len(samples)
        return self._emit(self._packer.add_group(samples))

    def flush(self) -> list[MicroStep]:
        return self._emit(self._packer.flush())

    def end(self) -> tuple[list[MicroStep], StepRecord]:
        """The last micro-steps, and the record of the step."""
        last = self._emit(self._packer.end_step())
        if self._sampled != self._trained + self._dropped.total():
            raise AssertionError(
                f"step {self._step}: {self._sampled} tokens sampled, but {self._trained} trained and "
                f"{dict(self._dropped)} dropped"
            )
        graded = len(self._rewards)
        return last, StepRecord(
            step=self._step,
            groups=len(self._groups),
            void_groups=self._void_groups,
            executions=graded,
            reward=math.fsum(self._rewards) / graded if graded else None,
            microsteps=self._microsteps,
            samples=self._samples,
            sampled=self._sampled,
            trained=self._trained,
            dropped={reason: self._dropped[reason] for reason in REASONS if self._dropped[reason]},
        )

    def _judge(self, group: ConsumedGroup, executions: list[ExecutionRecord]) -> list[float | Reason]:
        """The verdict of each execution. Counts the denominator."""
        verdicts = judge(self._settings, group)
        if group.purpose == "train" and is_void(self._settings, group):
            self._void_groups += 1
        elif group.purpose == "train":
            self._rewards += [_reward(record) for record in executions if record.outcome == "graded"]
        return [verdicts[record.execution] for record in executions]

    def _add_execution(self, record: ExecutionRecord, verdict: float | Reason, dispatch_version: int) -> list[Sample]:
        _check_turns(record)
        counting = [turn for turn in record.turns if turn.attempt == record.attempt]
        sampled = sum(len(turn.output) for turn in counting)
        others = sum(len(turn.output) for turn in record.turns) - sampled
        self._sampled += sampled + others
        if isinstance(verdict, str):
            self._dropped["evaluation" if verdict == "evaluation" else "aborted_attempt"] += others
            self._dropped[verdict] += sampled
            return []
        self._dropped["aborted_attempt"] += others
        samples, dropped = select_execution(
            counting,
            self._settings,
            execution=record.execution,
            attempt=record.attempt,
            advantage=verdict,
            dispatch_version=dispatch_version,
            routing=record.routing,
        )
        self._dropped.update(dropped)
        self._trained += sum(sample.targets for sample in samples)
        return samples

    def _emit(self, microsteps: list[MicroStep]) -> list[MicroStep]:
        self._microsteps += len(microsteps)
        return microsteps


def is_void(settings: Settings, group: ConsumedGroup) -> bool:
    """A group that is not trained and not in the denominator."""
    graded = sum(record.outcome == "graded" for record in group.executions)
    return group.void or graded < settings.min_graded


def judge(settings: Settings, group: ConsumedGroup) -> dict[str, float | Reason]:
    """For each execution its advantage, or why none of it is trained."""
    if group.purpose == "eval":
        return {record.execution: "evaluation" for record in group.executions}
    graded = sorted(
        (record for record in group.executions if record.outcome == "graded"), key=lambda record: record.execution
    )
    verdicts: dict[str, float | Reason] = {record.execution: "excluded" for record in group.executions}
    if is_void(settings, group):
        return verdicts | {record.execution: "void_group" for record in graded}
    values = advantages([_reward(record) for record in graded], settings.advantage, settings.std_floor)
    for record, value in zip(graded, values, strict=True):
        verdicts[record.execution] = value or "zero_advantage"
    return verdicts


def build_step(
    settings: Settings, step: int, journalled: Iterable[ConsumedGroup | Flush]
) -> tuple[list[MicroStep], StepRecord]:
    """All micro-steps of a step, in order, and its record: what replay and a restarted processor derive again."""
    builder = StepBuilder(settings, step)
    microsteps: list[MicroStep] = []
    for entry in journalled:
        microsteps += builder.flush() if isinstance(entry, Flush) else builder.add_group(entry)
    last, record = builder.end()
    return microsteps + last, record


def _reward(record: ExecutionRecord) -> float:
    if record.reward is None or not math.isfinite(record.reward):
        problem = f"graded with reward {record.reward}, not a finite number"
        raise TrajectoryError(record.execution, record.attempt, None, problem)
    return float(record.reward)


def _check_turns(record: ExecutionRecord) -> None:
    """Rows that were read twice, or of another execution, would falsify the count of tokens."""
    seen: set[tuple[int, int]] = set()
    for turn in record.turns:
        if turn.execution != record.execution:
            problem = f"belongs to execution {turn.execution}"
            raise TrajectoryError(record.execution, turn.attempt, turn.turn, problem)
        if (turn.attempt, turn.turn) in seen:
            raise TrajectoryError(record.execution, turn.attempt, turn.turn, "is recorded twice")
        seen.add((turn.attempt, turn.turn))
