"""A finished run on the disk, small and whole: two groups, one step, a core, a satellite's contribution merged."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gyre.ledger import checkpoints, events as ev
from gyre.ledger.checkpoints import CheckpointMeta
from gyre.ledger.chunks import ArraySpec, write_chunk
from gyre.ledger.files import write_atomic
from gyre.ledger.job import Job, write_job
from gyre.ledger.journal import Journal, create_index, encode_line
from gyre.ledger.layout import RunFolder
from gyre.ledger.shards import TurnWriter
from gyre.ledger.tail import read_journal
from gyre.ledger.turns import Span, Turn
from gyre.recipe.load import dump_toml
from gyre.recipe.schema import Cells, Train
from tests.views.ledgers import WORKER, Ledger

ARRAY = ArraySpec("weight", (4, 3), (2, 3), "float32")
OPENED = ev.Opened(pid=1, pid_start=1.0, host="h", code="0")
CORE, SATELLITE = "cell-0", "cell-1"


class Finished(Ledger):
    """What is said is journalled too."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        train = Train(steps=1, tokens_per_microstep=64)
        rollout = msgspec.structs.replace(self.recipe.rollout, context=64)
        cells = Cells(count=2, gpus_per_node=0)
        self.recipe = msgspec.structs.replace(self.recipe, train=train, cells=cells, rollout=rollout)
        write_atomic(self.run.recipe, dump_toml(self.recipe).encode())
        job = Job(
            launcher="local", code="0", created=0.0, model="/m", workers=[WORKER], cells=[CORE, SATELLITE],
            tasks=["task"], eval_tasks=[],
        )  # fmt: skip
        write_job(self.run, job)
        self._journals: dict[str, Journal] = {}
        for writer in job.writers():
            create_index(self.run, writer)
        for writer in ("scheduler", "processor", WORKER, CORE, SATELLITE):
            self._journals[writer] = Journal.open(self.run, writer, lambda: 1.0)
            self.say(writer, OPENED)

    def say(self, writer: str, *events: Any) -> None:
        super().say(writer, *events)
        for event in events:
            self._journals[writer].append(event, durable=False)

    def make(self) -> None:
        plans = [ev.GroupPlan(group=f"g0000{i}", task="task", purpose="train", executions=2) for i in range(2)]
        self.dispatch(plans)
        for number, name in enumerate(f"g0000{i}-0{j}" for i in range(2) for j in range(2)):
            self.record([_turn(name, number)])
            said = ev.Finished(execution=name, attempt=1, outcome="graded", reward=float(number % 2), turns=1)
            self.say(WORKER, ev.Started(execution=name, attempt=1), said)
        self._writer.close()
        self.pack([plan.group for plan in plans])
        self._train(list(self.state.steps[1].microsteps))
        self.say("scheduler", ev.RunEnded(state="finished"))

    def _train(self, names: list[str]) -> None:
        assert len(names) == 4
        halves = {CORE: names[:2], SATELLITE: names[2:]}
        self.say(CORE, ev.LineageOpened(lineage=1, step=0, version=0, weight_version="w", manifest="m0"))
        for grant, (cell, half) in enumerate(halves.items(), start=1):
            granted = ev.Granted(grant=grant, lineage=1, step=1, cell=cell, incarnation=1, microsteps=half)
            self.say("scheduler", granted)
            self.say(cell, ev.Done(grant=grant, lineage=1, step=1, microsteps=half))
        about: dict[str, Any] = {"lineage": 1, "step": 1, "number": 1, "microsteps": halves[SATELLITE]}
        self.say(SATELLITE, ev.Offered(**about, manifest="g1"))
        self.say(CORE, ev.Merged(**about, source=SATELLITE, source_incarnation=1))
        write_checkpoint(self.run, 1, 1, names)
        committed = ev.Committed(lineage=1, step=1, version=1, weight_version="w1", manifest="m1", checkpointed=True)
        self.say(CORE, committed)


def _turn(name: str, number: int) -> Turn:
    output = list(range(100 * number, 100 * number + 30))
    return Turn(
        execution=name, attempt=1, turn=0, context=[1, 2, 3], output=output, logprobs=[-1.0] * 30,
        spans=[Span(1, 0, 30)]
    )  # fmt: skip


def write_checkpoint(run: RunFolder, lineage: int, step: int, merged: Iterable[str], nonce: str = "n") -> Path:
    path = checkpoints.temporary_path(run.checkpoints, step, lineage, nonce)
    checkpoints.create(path, [ARRAY])
    half = np.arange(6, dtype=np.float32).reshape(2, 3)
    records = [write_chunk(path, ARRAY, (row, 0), half + row) for row in (0, 2)]
    return checkpoints.finish(path, CheckpointMeta(lineage, step, step, tuple(merged)), [ARRAY], records)


def rewrite_turns(run: RunFolder, change: dict[str, Any]) -> None:
    """The shards anew, with sound bytes and another content: `change` applies to the first turn."""
    from gyre.ledger.shards import TurnReader

    turns = TurnReader(run, WORKER).read_all()
    shutil.rmtree(run.shard_dir(WORKER))
    writer = TurnWriter(run, WORKER, 1)
    for number, turn in enumerate(turns):
        writer.append(msgspec.structs.replace(turn, **change) if number == 0 else turn)
    writer.close()


def rewrite_journal(run: RunFolder, writer: str, events: list[Any]) -> None:
    """A sound journal that says `events`."""
    encode = msgspec.json.Encoder().encode
    data = b"".join(encode_line(n, 1.0, encode(event)) for n, event in enumerate(events))
    run.journal_path(writer, 1).write_bytes(data)


def said(run: RunFolder, writer: str) -> list[Any]:
    return [line.event for line in read_journal(run.journal_path(writer, 1))]
