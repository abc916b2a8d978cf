"""A paced cell: the real lead of a cell, whose engine and trainer take time instead of computing.

Owns the answers of the trainer that is not there. Invariant: everything that the scheduler can see is said by
`processes/cell.py`; here are only durations, and the names of micro-steps in the buffer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gyre.ledger.layout import RunFolder
from gyre.processes.base import run_process
from gyre.processes.cell import Cell
from gyre.processes.gang import Gang
from gyre.simulate.paced.engine import PacedEngine
from gyre.simulate.paced.pace import Pace, Script

NOTHING_MOVED = {"nbytes": 0, "seconds": 0.0, "free": 0}


class PacedCell(Cell):
    """gyre's cell agent, paced."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        self.pace = Pace.read(run.path)
        script = Script(run.path, self.pace, Tokenizer.from_file(str(Path(self.job.model) / "tokenizer.json")))
        self.gang = Gang(self, self.nodes, lambda *about: PacedEngine(*about, script=script))
        self.buffer: list[str] = []
        self.trains = False

    async def _start_ranks(self) -> None:
        """There are none."""

    async def _watch_ranks(self) -> None:
        await asyncio.Event().wait()

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """What a trainer would do: it takes its time."""
        answer: dict[str, Any] = await getattr(self, f"_rank_{op}")(**arguments)
        return answer

    async def _rank_open_lineage(self, lineage: int, openings: Any) -> dict[str, Any]:
        weights = f"{lineage}.0-{0:016x}"
        return {"step": 0, "version": 0, "weight_version": weights, "manifest": weights, "skipped": []}

    async def _rank_onload(self) -> dict[str, Any]:
        """A switch to training takes its time here; on the way to rollout it is part of what `offload` takes."""
        if self.current == "releasing":
            await asyncio.sleep(self.pace.to_training)
            self.trains = True
        return NOTHING_MOVED

    async def _rank_offload(self, weights: bool) -> dict[str, Any]:
        if weights:  # the last move of a switch to rollout, or of an update
            await asyncio.sleep(self.pace.to_rollout if self.trains else self.pace.refresh)
            self.trains = False
        return NOTHING_MOVED

    async def _rank_pull(self, manifest: str) -> dict[str, Any]:
        self.buffer = []
        return {"seconds": 0.0, "nbytes": 0}

    async def _rank_zero(self) -> dict[str, Any]:
        self.buffer = []
        return {}

    async def _rank_retire(self, keep: Any) -> dict[str, Any]:
        return {}

    async def _rank_push(self, weight_version: str, **_: Any) -> dict[str, Any]:
        for engine in self.gang.engines:
            await engine.client.pause("abort")
            await engine.client.wait_idle()
            await engine.client.set_version(weight_version)
            await engine.client.resume_generation()
        return {}

    async def _rank_train(self, microsteps: list[dict[str, str]]) -> dict[str, Any]:
        names = [each["microstep"] for each in microsteps]
        known = {name: ready for step in self.state.steps.values() for name, ready in step.microsteps.items()}
        tokens = [known[name].tokens for name in names]
        await asyncio.sleep(self.pace.token * sum(tokens))
        self.buffer += names
        return {"stats": [{"tokens": count, "units": 0.0, "targets": 0.0} for count in tokens]}

    async def _rank_freeze(self, **about: Any) -> dict[str, Any]:
        return {"microsteps": list(self.buffer), "manifest": f"{self.name}.{about['step']}.{about['number']}"}

    async def _rank_checkpoint(self, **_: Any) -> dict[str, Any]:
        return {}

    async def _rank_written(self, wait: bool) -> dict[str, Any]:
        return {"written": True}

    async def _rank_merge(self, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(self.pace.merge)
        return {}

    async def _rank_commit(self, lineage: int, step: int, version: int, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(self.pace.optimizer)
        self.buffer = []
        weights = f"{lineage}.{version}-{step:016x}"
        return {
            "weight_version": weights,
            "manifest": weights,
            "checkpointed": False,  # there are no weights to keep
            "writing": False,
            "skipped": False,
            "learning_rate": 0.0,
            "gradient_norm": 0.0,
        }


if __name__ == "__main__":
    run_process(PacedCell)
