"""The least time that any policy can take: work over capacity, and the critical path under the staleness rule.

Owns no state. Invariant: no mode's simulated time is below the bound of the same jobs (switches, latency, losses and
slow-downs can only add). Pure.

Both bounds are of the same form. Suppose everything is known and divisible, and some executions start together at 0:
for every moment r, what is left at r is at least the training of the groups that are not ready by r (a group is trained
only when its last execution has ended), and of each execution what exceeds r. K cells need that long, then the last
optimizer step follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.simulate.jobs import Jobs
from gyre.simulate.workload import Workload


@dataclass(frozen=True)
class Bound:
    """Seconds. `capacity`: all work over all cells; `critical`: bursts one after the other, as staleness wants."""

    capacity: float
    critical: float

    @property
    def seconds(self) -> float:
        return max(self.capacity, self.critical)


def bound(workload: Workload, jobs: Jobs) -> Bound:
    """The bound for one seed's jobs."""
    mu, phi = workload.schedule.steps_per_burst, workload.schedule.lead_steps
    per_step = workload.group.groups_per_step
    opened = [0.0]
    """The earliest opening of each burst, from the first."""
    finish, planned = 0.0, 0
    burst = 0
    while planned < workload.groups or burst * mu < workload.steps:
        until = min(workload.groups, (burst * mu + phi + mu) * per_step)
        numbers = range(planned, until)
        due = min(workload.steps, burst * mu + phi + mu)
        least = min(mu, max(1, workload.steps - burst * mu)) * workload.training.optimizer
        if numbers:
            committed = opened[burst] + _least(workload, jobs, numbers, workload.training.optimizer)
            finish = max(finish, committed)
            _later(opened, -(-due // mu), committed)
        _later(opened, burst + 1, opened[burst] + least)
        finish = max(finish, opened[burst] + least)
        planned, burst = max(planned, until), burst + 1
    everything = range(workload.groups)
    rollout, training = _work(workload, jobs, everything)
    optimizer = workload.steps * workload.training.optimizer
    slack = 0.5 * workload.training.microstep * workload.steps
    return Bound((rollout + training - slack + optimizer) / workload.cells.count, finish)


def _later(opened: list[float], burst: int, at: float) -> None:
    """Burst number `burst` (from 0) opens no earlier than `at`."""
    while len(opened) <= burst:
        opened.append(opened[-1])
    for index in range(burst, len(opened)):
        opened[index] = max(opened[index], at)


def _work(workload: Workload, jobs: Jobs, numbers: range) -> tuple[float, float]:
    """(rollout, training) of these groups in cell-seconds."""
    rollout = sum(job.seconds for number in numbers for job in jobs.group(number))
    return rollout / workload.cells.executions_per_cell, sum(_training(workload, jobs, number) for number in numbers)


def _training(workload: Workload, jobs: Jobs, number: int) -> float:
    graded = [job.work for job in jobs.group(number) if job.graded]
    return sum(graded) if len(graded) >= workload.group.min_graded else 0.0


def _least(workload: Workload, jobs: Jobs, numbers: range, optimizer: float) -> float:
    """From the dispatch of these groups until the last of them is committed."""
    cells, room = workload.cells.count, workload.cells.executions_per_cell
    ready = sorted((max(job.seconds for job in jobs.group(n)), _training(workload, jobs, n)) for n in numbers)
    seconds = sorted(job.seconds for number in numbers for job in jobs.group(number))
    # micro-steps are whole: a step's last one may round its work down
    slack = 0.5 * workload.training.microstep * (len(ready) / workload.group.groups_per_step + 1.0)
    best = 0.0
    training = sum(work for _, work in ready)
    over, count = sum(seconds), len(seconds)
    index = 0
    for moment, work in [(0.0, 0.0), *ready]:
        while index < len(seconds) and seconds[index] <= moment:
            over -= seconds[index]
            count -= 1
            index += 1
        left = training + max(0.0, over - count * moment) / room - slack
        best = max(best, moment + max(0.0, left) / cells)
        training -= work
    return best + optimizer
