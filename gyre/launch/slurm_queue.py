"""What Slurm says of a job: asked of squeue, with or without accounting.

Owns the calls to Slurm's commands but for sbatch and srun. Invariant: an answer is "this is what Slurm says", or "it is
not known any more", or SlurmSilent with Slurm's own words; it is never guessed. Dates are as Slurm prints them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ANSWER_SECONDS = 20.0
FORMAT = "%i|%A|%T|%N|%S|%r"
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)


class SlurmSilent(Exception):
    """A command of Slurm failed, or did not answer. The message is its own."""


@dataclass(frozen=True)
class ComponentState:
    shown: str
    """such as 12+1"""
    raw: str
    """the component's own id"""
    state: str
    nodes: str
    start: str
    """when it started, or is expected to; "" when Slurm does not know"""
    reason: str
    """why it waits; "" when it does not"""


@dataclass(frozen=True)
class JobState:
    """All components of a job. `state` is the first component's, unless another one still waits."""

    job_id: str
    components: tuple[ComponentState, ...]

    @property
    def state(self) -> str:
        states = [component.state for component in self.components]
        return "PENDING" if "PENDING" in states else states[0]

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def reason(self) -> str:
        """Why it waits. A component that waits for the other ones says nothing of interest."""
        return next((c.reason for c in self.components if c.state == "PENDING" and c.reason), "")

    @property
    def start(self) -> str:
        """When the last component is expected to start."""
        return max((c.start for c in self.components if c.state == "PENDING"), default="")


def command(*argv: str) -> str:
    """The output of a command of Slurm. Raises SlurmSilent."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        raise SlurmSilent(f"there is no {argv[0]} here") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{argv[0]} did not answer in {ANSWER_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise SlurmSilent((done.stderr.strip().splitlines() or [f"{argv[0]}: status {done.returncode}"])[-1])
    return done.stdout


def ask(job_ids: Iterable[str]) -> dict[str, JobState]:
    """What squeue says of these jobs, by id; a job that Slurm has forgotten is not in it."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    # each id twice: a single one that is unknown fails the command, among several it is left out
    names = ",".join(wanted + wanted)
    return parse(command("squeue", "-h", "-a", "-t", "all", "-o", FORMAT, "-j", names))


def parse(text: str) -> dict[str, JobState]:
    """Lines of FORMAT, by leader."""
    found: dict[str, list[ComponentState]] = {}
    for line in text.splitlines():
        shown, raw, state, nodes, start, reason = line.split("|", 5)
        component = ComponentState(shown, raw, state, nodes, _known(start), _known(reason))
        leader = shown.partition("+")[0]
        if component not in found.setdefault(leader, []):
            found[leader].append(component)
    return {
        leader: JobState(leader, tuple(sorted(components, key=lambda c: int(c.raw))))
        for leader, components in found.items()
    }


def _known(value: str) -> str:
    return "" if value in ("N/A", "None", "(null)") else value


def last_state(job_id: str) -> str:
    """What accounting keeps of a job that slurmctld has forgotten; "" without accounting."""
    try:
        text = command("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State")
    except SlurmSilent:
        return ""
    words = text.split()
    return words[0] if words else ""


def expand(nodes: str) -> list[str]:
    """gpu[1-2] -> gpu1, gpu2."""
    return command("scontrol", "show", "hostnames", nodes).split()


def requeue(job_id: str) -> None:
    """Put the whole job back into the queue; only its leader may be named. Raises SlurmSilent."""
    command("scontrol", "requeue", job_id)


def cancel(job_id: str) -> None:
    command("scancel", job_id)


@dataclass(frozen=True)
class Allocation:
    """Where this job runs: what the batch script's environment says."""

    job_id: str
    restart: int
    """how often Slurm has requeued it"""
    groups: tuple[tuple[str, ...], ...]
    """nodes of each component"""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Allocation:
        size = int(environment.get("SLURM_HET_SIZE", "1"))
        names = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(size)]
        lists = [environment.get(name) or environment["SLURM_JOB_NODELIST"] for name in names]
        return cls(
            job_id=environment["SLURM_JOB_ID"],
            restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
            groups=tuple(tuple(expand(nodes)) for nodes in lists),
        )
