"""The processor: recorded turns in, micro-step files out, in the journalled order of consumption.

Owns the journal `processor` and the files of `microsteps/`. Invariants: a file is complete before it is announced; what
a step consists of follows from the journal and the shards alone, so a new incarnation derives the same micro-steps,
checks those that its predecessor announced, and goes on after them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import digest, write_microstep
from gyre.ledger.microsteps import MicroStep
from gyre.ledger.routing import Routing, RoutingReader
from gyre.ledger.shards import TurnReader, seal_dead
from gyre.ledger.state import RunState, Step, execution_names
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.processes.base import POLL_SECONDS, Process, run_process
from gyre.scheduling.settings import Settings as Plan, settings_of
from gyre.trajectory.experts import Records
from gyre.trajectory.settings import Settings
from gyre.trajectory.steps import ConsumedGroup, ExecutionRecord, StepBuilder, StepRecord

log = logging.getLogger("gyre")


class StepInHand:
    """Feeds one step's builder from the folded journal, entry by entry. Pure but for `turns_of` and `routing_of`."""

    def __init__(
        self,
        settings: Settings,
        step: int,
        turns_of: Callable[[str], list[Turn]],
        routing_of: Callable[[str], Records] = lambda _: {},
    ) -> None:
        self.step = step
        self._builder = StepBuilder(settings, step)
        self._turns_of = turns_of
        self._routing_of = routing_of
        self._fed = 0
        self._flushes = 0

    def advance(self, state: RunState) -> tuple[list[MicroStep], StepRecord | None]:
        """The micro-steps that the news closes, and the record once the step is filled and fed whole."""
        made = self.flush(state)
        while (group := self.next_group(state)) is not None:
            made += self.add(group)
            made += self.flush(state)
        last, record = self.end(state)
        return made + last, record

    def flush(self, state: RunState) -> list[MicroStep]:
        """To be asked before each group, and before the end: what was journalled between two groups comes there."""
        found, made = state.steps.get(self.step), list[MicroStep]()
        while found is not None and self._flushes < len(found.flushes) and found.flushes[self._flushes] <= self._fed:
            made += self._builder.flush()
            self._flushes += 1
        return made

    def next_group(self, state: RunState) -> ConsumedGroup | None:
        """The next consumed group with all its turns; None when there is none yet."""
        found = state.steps.get(self.step)
        if found is None or self._fed == len(found.consumed):
            return None
        return consumed_group(state, found.consumed[self._fed], self._turns_of, self._routing_of)

    def add(self, group: ConsumedGroup) -> list[MicroStep]:
        """Touches nothing but the builder, so that another thread may do it: a long group takes seconds."""
        made = self._builder.add_group(group)
        self._fed += 1
        return made

    def end(self, state: RunState) -> tuple[list[MicroStep], StepRecord | None]:
        """The last micro-steps and the record, of a step that is filled and fed whole; else nothing."""
        found = state.steps.get(self.step)
        if found is None or not found.filled or self._fed < len(found.consumed):
            return [], None
        return self._builder.end()


def consumed_group(
    state: RunState,
    consumed: ev.Consumed,
    turns_of: Callable[[str], list[Turn]],
    routing_of: Callable[[str], Records] = lambda _: {},
) -> ConsumedGroup:
    """A consumed group with its outcomes and the turns of all attempts, and their experts where routing is replayed."""
    group = state.groups[consumed.group]
    records = []
    for name in execution_names(group.plan):
        execution = state.executions[name]
        outcome = None if execution.excluded else execution.outcome()
        graded = outcome is not None and outcome.outcome == "graded"
        records.append(
            ExecutionRecord(
                execution=name,
                attempt=outcome.attempt if outcome is not None else max(execution.attempts, default=1),
                outcome="graded" if graded else "excluded",
                reward=outcome.reward if graded and outcome is not None else None,
                turns=turns_of(name),
                routing=routing_of(name),
            )
        )
    return ConsumedGroup(
        group=consumed.group,
        dispatch_version=group.version,
        executions=records,
        purpose=group.plan.purpose,
        void=consumed.void,
    )


class Processor(Process):
    """gyre's processor process."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        self.settings = Settings.from_recipe(self.recipe)
        self.plan = settings_of(self.recipe, (), (), ())
        self._readers = {worker: TurnReader(run, worker) for worker in self.job.workers}
        self._turns: dict[str, list[Turn]] = defaultdict(list)
        replayed = self.recipe.train.routing_replay
        self._routing_readers = [RoutingReader(run, worker) for worker in self.job.workers if replayed]
        self._routing: dict[str, dict[tuple[int, int], Routing]] = defaultdict(dict)
        self._sealed: dict[str, int] = {}
        self._emitted = 0

    async def work(self) -> None:
        await self.until_accepted()
        step = self._first_step()
        in_hand = StepInHand(self.settings, step, self._turns_of, self._routing_of)
        while True:
            self._seal_dead()
            self._announce(step, in_hand.flush(self.state))
            group = in_hand.next_group(self.state)
            if group is not None:
                self._announce(step, await asyncio.to_thread(in_hand.add, group))  # we beat meanwhile
                continue
            last, record = in_hand.end(self.state)
            self._announce(step, last)
            if record is not None:
                self._end(step, record)
                step += 1
                in_hand = StepInHand(self.settings, step, self._turns_of, self._routing_of)
            else:
                await asyncio.sleep(POLL_SECONDS)

    def _first_step(self) -> int:
        packed = [step for step, found in self.state.steps.items() if found.packed is not None]
        return max(packed, default=0) + 1

    def _announce(self, step: int, made: list[MicroStep]) -> None:
        for microstep in made:
            self._announce_one(step, microstep)

    def _announce_one(self, step: int, microstep: MicroStep) -> None:
        known = list(self.state.steps[step].microsteps.values())
        number = self._emitted
        self._emitted += 1
        if number < len(known):
            if digest(microstep) != known[number].digest:
                raise RuntimeError(f"{known[number].microstep} comes out different: the shards have changed")
            return
        name = f"step-{step:06d}/{self.incarnation}-{number:05d}"
        path = self.run.microsteps / f"{name}.arrow"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        content = write_microstep(path, microstep)
        self.say(
            ev.MicroStepReady(
                step=step,
                microstep=name,
                digest=content,
                tokens=len(microstep.tokens),
                targets=microstep.targets,
                samples=len(microstep.executions),
            )
        )

    def _end(self, step: int, record: StepRecord) -> None:
        self.view.poll()  # the announcements above, by the journal
        found = self.state.steps[step]
        staleness, lag = group_ages(self.state, found, step, self.plan)
        self.say(
            ev.Packed(
                step=step,
                microsteps=list(found.microsteps),
                executions=record.executions,
                tokens_sampled=record.sampled,
                tokens_trained=record.trained,
                tokens_dropped=record.dropped,
                reward=record.reward,
                staleness_max=max(staleness, default=0),
                staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
                lag_max=max(lag, default=0),
                lag_mean=sum(lag) / len(lag) if lag else 0.0,
                seconds_mean=_mean_seconds(self.state, found),
            )
        )
        self._emitted = 0
        for consumed in found.consumed:
            for name in execution_names(self.state.groups[consumed.group].plan):
                self._turns.pop(name, None)
                self._routing.pop(name, None)

    def _turns_of(self, execution: str) -> list[Turn]:
        """All recorded turns of an execution. Its shard was fsynced before its end was journalled."""
        for reader in self._readers.values():
            for turn in reader.poll():
                self._turns[turn.execution].append(turn)
        return latest_rows(self._turns.get(execution, []))

    def _routing_of(self, execution: str) -> Records:
        """All recorded experts of an execution, where they are replayed; fsynced before its end, as its turns."""
        for reader in self._routing_readers:
            for record in reader.poll():
                self._routing[record.execution][record.attempt, record.turn] = record
        return self._routing.get(execution, {})

    def _seal_dead(self) -> None:
        for worker in self.job.workers:
            current = self.state.incarnation(worker)
            for incarnation in range(self._sealed.get(worker, 0) + 1, current):
                seal_dead(self.run, worker, incarnation)
                self._sealed[worker] = incarnation


def group_ages(state: RunState, found: Step, step: int, plan: Plan) -> tuple[list[int], list[int]]:
    """Staleness (in versions) and lag (in optimizer steps) of each group that is not void."""
    groups = [state.groups[c.group] for c in found.consumed if not c.void]
    trained = plan.burst_of(step) - 1
    staleness = [trained - group.version for group in groups]
    lag = [step - 1 - group.version * plan.steps_per_burst for group in groups]
    return staleness, lag


def _mean_seconds(state: RunState, found: Step) -> float:
    seconds = [outcome.seconds for c in found.consumed for _, outcome in state.graded(c.group)]
    return sum(seconds) / len(seconds) if seconds else 0.0


if __name__ == "__main__":
    run_process(Processor)
