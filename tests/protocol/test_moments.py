"""One fault at every moment of the protocol: a process is killed, or stands still and is replaced, or loses a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.protocol.cells import RankedCell
from tests.protocol.moments import CORE, SATELLITE, at, fencing, merged_unheard, reach
from tests.protocol.world import Free
from tests.scheduling.settings import make

Moment = Callable[[Free], bool]

MOMENTS: dict[str, Moment] = {
    **{f"core {where}": lambda sim, where=where: at(sim, "cell-0", where) for where in CORE},
    **{f"satellite {where}": lambda sim, where=where: at(sim, "cell-1", where) for where in SATELLITE},
    "merged and not heard": merged_unheard,
}
SETTINGS = make(3, executions=2, groups_per_step=5, cell_room=12, steps=2, attempts=9, seed=3)


def world(seed: int) -> Free:
    return Free(SETTINGS, seed, ranks=2)


def killed(sim: Free, name: str) -> None:
    sim.kill(sim.procs[name])


def replaced(sim: Free, name: str) -> None:
    """It stands still, is taken for dead, and another is started; later both act."""
    sim.stall(name)
    sim.notice()
    for _ in range(40):
        sim.step(7)
    sim.restart(name)


def without_a_rank(sim: Free, name: str) -> None:
    proc = sim.procs[name]
    if isinstance(proc, RankedCell):
        proc.broken = True


@pytest.mark.parametrize("fault", [killed, replaced, without_a_rank], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fault_at_each_moment(moment: str, fault: Callable[[Free, str], None]) -> None:
    reached = 0
    for seed, victim in enumerate(["cell-0", "cell-1", "scheduler", "processor"]):
        if fault is not killed and victim in ("scheduler", "processor"):
            continue
        sim = world(seed)
        reached += reach(sim, MOMENTS[moment], seed)
        fault(sim, victim)
        sim.settle(seed)
    assert reached, "the moment never came: this test looks at nothing"


@pytest.mark.parametrize("victim", ["cell-0", "cell-2", "scheduler"])
def test_a_fault_while_a_fence_is_ordered(victim: str) -> None:
    for seed in range(3):
        sim = world(seed)
        assert reach(sim, MOMENTS["satellite offered"], seed) or sim.ended
        sim.kill(sim.procs["cell-1"])
        sim.notice()
        reach(sim, fencing, seed)
        sim.kill(sim.procs[victim])
        sim.settle(seed)


@pytest.mark.parametrize("lines", range(1, 13))
@pytest.mark.parametrize("after", [False, True])
def test_each_line_may_be_a_cores_or_a_satellites_last(lines: int, after: bool) -> None:
    """Counted from the moment at which both train."""
    for victim in ("cell-0", "cell-1", "scheduler"):
        sim = world(lines)
        reach(sim, MOMENTS["satellite summing"], lines)
        sim.armed[victim] = (lines, after)
        reach(sim, lambda sim, victim=victim: sim.procs[victim].gone, lines, most=600)
        sim.settle(lines)
