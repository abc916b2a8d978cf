"""job.toml: how a run was launched, and which processes are expected.

Owns `Job`. Frozen at submission, but for what a resume adds (attempt, launcher). Invariant: every writer of the run is
named here, so nobody ever lists a folder to find journals.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.files import write_atomic
from gyre.ledger.layout import RunFolder


class Job(Struct, frozen=True, kw_only=True):
    launcher: str
    """local or slurm"""
    code: str
    """version of gyre that was submitted"""
    created: float
    """seconds since the epoch, for display"""
    attempt: int = 1
    """1, and one more with each resume or requeue; names the folder of logs"""
    model: str
    """Hugging Face folder that was resolved from the recipe"""
    workers: list[str]
    cells: list[str]
    tasks: list[str]
    eval_tasks: list[str]
    job_ids: list[str] = []
    stores: list[str] = []
    """the process that keeps the store of KV pages, if the run has one"""
    guests: list[str] = []
    """cells that other jobs may start (gyre join): named from the beginning, since nobody lists folders"""
    nodes_per_cell: int = 1
    """a cell's lead is on the first one; each further one has an agent"""

    def all_cells(self) -> list[str]:
        return [*self.cells, *self.guests]

    def processes(self) -> list[str]:
        """Those that the run's own launcher keeps going."""
        return ["scheduler", "processor", *self.stores, *self.workers, *self.of_cells(self.cells)]

    def of_cells(self, cells: Iterable[str]) -> list[str]:
        """The processes of these cells: each one's lead, then its agents, node by node."""
        return [name for cell in cells for name in (cell, *agents_of(cell, self.nodes_per_cell))]

    def writers(self) -> list[str]:
        """Every journal of the run."""
        return [*self.processes(), *self.of_cells(self.guests), "supervisor", "control"]


def agents_of(cell: str, nodes: int) -> list[str]:
    """The agents on a cell's further nodes: agent-2-1 is on the second node of cell-2."""
    return [f"agent-{cell.removeprefix('cell-')}-{node}" for node in range(1, nodes)]


def place_of(name: str) -> tuple[str, int]:
    """The cell of a lead or an agent, and which of its nodes it is on."""
    _, cell, *node = name.split("-")
    return f"cell-{cell}", int(node[0]) if node else 0


def write_job(run: RunFolder, job: Job) -> None:
    write_atomic(run.job, _toml(job).encode())


def read_job(run: RunFolder) -> Job:
    """Raises UserError naming the file when it is absent or broken."""
    try:
        return msgspec.toml.decode(run.job.read_bytes(), type=Job)
    except FileNotFoundError:
        raise UserError(f"{run.job} does not exist: {run.path} is not a run folder") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UserError(f"{run.job}: {error}") from None


def _toml(job: Job) -> str:
    lines = []
    for name, value in msgspec.to_builtins(job).items():
        # TOML's strings, numbers and flat lists are written as JSON writes them
        lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"
