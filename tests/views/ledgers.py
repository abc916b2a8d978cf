"""Small run folders, written by the code that writes real ones, for what people look at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.job import Job
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import write_microstep
from gyre.ledger.shards import TurnWriter
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.ledger.turns import Turn
from gyre.processes.processor import StepInHand
from gyre.recipe.schema import Cells, Group, Model, Recipe, Tasks, Train
from gyre.trajectory.settings import Settings
from gyre.trajectory.steps import StepRecord
from gyre.views.runs import OpenRun

WORKER = "worker-0"


class Ledger:
    """A run of one worker whose step 1 is packed on demand. Executions are g00000-00, g00000-01, ..."""

    def __init__(self, root: Path, model: str = "/m", tokens_per_microstep: int = 64, template: str = "qwen3") -> None:
        self.recipe = Recipe(
            name="x",
            seed=7,
            model=Model(path=model, template=template),
            tasks=Tasks(path="/t"),
            group=Group(executions=2),
            train=Train(steps=2, tokens_per_microstep=tokens_per_microstep),
            cells=Cells(count=1, gpus_per_node=0),
        )
        self.settings = Settings.from_recipe(self.recipe)
        self.run = RunFolder(root / "x").create()
        self.state = RunState()
        self._lines = 0
        self._turns: dict[str, list[Turn]] = {}
        self._writer = TurnWriter(self.run, WORKER, 1)

    def say(self, writer: str, *events: Any) -> None:
        for event in events:
            fold(self.state, Line(writer, 1, self._lines, float(self._lines), event))
            self._lines += 1

    def dispatch(self, plans: list[ev.GroupPlan]) -> None:
        executions = [
            ev.Dispatch(f"{plan.group}-{n:02}", 1, plan.task, plan.purpose)
            for plan in plans
            for n in range(plan.executions)
        ]
        self.say("scheduler", ev.BurstOpened(burst=1, lineage=1, version=0, groups=plans))
        self.say("scheduler", ev.Dispatched(worker=WORKER, incarnation=1, executions=executions))

    def record(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._writer.append(turn)
            self._turns.setdefault(turn.execution, []).append(turn)

    def pack(self, groups: list[str], void: tuple[str, ...] = ()) -> StepRecord:
        """Step 1 of these groups, as the processor packs it."""
        self.say("scheduler", *[ev.Consumed(step=1, group=group, void=group in void) for group in groups])
        self.say("scheduler", ev.StepFilled(step=1))
        hand = StepInHand(self.settings, 1, lambda name: self._turns.get(name, []))
        microsteps, record = hand.advance(self.state)
        assert record is not None
        names = []
        for number, made in enumerate(microsteps):
            names.append(f"step-000001/1-{number:05d}")
            digest = write_microstep(self.run.microsteps / f"{names[-1]}.arrow", made)
            ready = ev.MicroStepReady(
                step=1, microstep=names[-1], digest=digest, tokens=1, targets=made.targets, samples=1
            )
            self.say("processor", ready)
        self.say(
            "processor",
            ev.Packed(
                step=1,
                microsteps=names,
                executions=record.executions,
                tokens_sampled=record.sampled,
                tokens_trained=record.trained,
                tokens_dropped=record.dropped,
            ),
        )
        return record

    def opened(self) -> OpenRun:
        job = Job(
            launcher="local", code="0", created=0.0, model=self.recipe.model.path, workers=[WORKER], cells=["cell-0"],
            tasks=["task"], eval_tasks=[],
        )  # fmt: skip
        view: Any = SimpleNamespace(state=self.state)
        return OpenRun(self.run, self.recipe, job, view)
