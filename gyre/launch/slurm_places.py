"""Which node each process of a job has: at its start, and after nodes were lost.

Pure. Invariant: the core has a node as long as any of its component is left: it takes that of the last satellite, which
goes without. A lost node does not come back into a job: Slurm has taken it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.launch.slurm_script import CPU_GROUP, GPU_GROUP


def group_of(name: str) -> int:
    """The component of a process: cells run on GPU nodes, all else on CPU nodes."""
    return GPU_GROUP if name.startswith("cell-") else CPU_GROUP


@dataclass
class Places:
    """`homes`: process -> node, "" for none."""

    groups: tuple[tuple[str, ...], ...]
    processes: list[str]
    homes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Scheduler and processor on the first CPU node, workers and cells in turn on the nodes of their component."""
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
        cells = [name for name in self.processes if group_of(name) == GPU_GROUP]
        if not cells or self.homes[cells[0]]:
            return []
        for satellite in reversed(cells[1:]):
            if self.homes[satellite]:
                self.homes[cells[0]], self.homes[satellite] = self.homes[satellite], ""
                return [satellite]
        return []
