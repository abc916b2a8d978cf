"""Which node each process of a job has: at its start, and after nodes were lost.

Pure. Invariant: the core has its nodes as long as so many of its component are left: it takes those of the last
satellite, which goes without. A lost node does not come back into a job: Slurm has taken it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.launch.slurm_script import CPU_GROUP, GPU_GROUP
from gyre.ledger.job import place_of


def group_of(name: str) -> int:
    """The component of a process: cells, on all their nodes, run on GPU nodes, all else on CPU nodes."""
    return GPU_GROUP if name.startswith(("cell-", "agent-")) else CPU_GROUP


@dataclass
class Places:
    """`homes`: process -> node, "" for none."""

    groups: tuple[tuple[str, ...], ...]
    processes: list[str]
    homes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Scheduler and processor on the first CPU node, workers, and cells with their agents, in turn on the nodes of
        their component: a cell's nodes are neighbours."""
        for group in (CPU_GROUP, GPU_GROUP):
            numbered = [n for n in self.processes if group_of(n) == group and n.partition("-")[2]]
            for index, name in enumerate(numbered):
                self.homes[name] = self.groups[group][index % len(self.groups[group])]
        for name in self.processes:
            self.homes.setdefault(name, self.groups[CPU_GROUP][0])

    def lose(self, left: tuple[tuple[str, ...], ...]) -> list[str]:
        """Take out the nodes that are not in `left`; the processes that have to leave a node that is there still."""
        for name, node in self.homes.items():
            if node not in left[group_of(name)]:
                self.homes[name] = ""
        cells: dict[str, list[str]] = {}
        for name in self.processes:
            if group_of(name) == GPU_GROUP:
                cells.setdefault(place_of(name)[0], []).append(name)
        core, *satellites = cells.values() if cells else [[]]
        leaving = []
        for name in core:
            donor = "" if self.homes[name] else self._donor(satellites)
            if donor:
                self.homes[name], self.homes[donor] = self.homes[donor], ""
                leaving.append(donor)
        return leaving

    def _donor(self, satellites: list[list[str]]) -> str:
        """Who gives up its node: of a cell that has lost another one already, else of the last; "" for nobody."""
        having = [[name for name in names if self.homes[name]] for names in reversed(satellites)]
        whole = max((len(names) for names in satellites), default=0)
        ordered = [*(names for names in having if len(names) < whole), *having]
        return next((names[-1] for names in ordered if names), "")
