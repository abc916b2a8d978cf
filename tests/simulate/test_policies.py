"""Who starts next: the rules, and that a run under them keeps every law."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from gyre.simulate.jobs import Drawn
from gyre.simulate.policies import Progress, order, probe
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.study import trial
from tests.simulate.tiny import tiny


def test_the_scheduler_starts_whole_groups_in_their_order() -> None:
    groups = [Progress("a", 1, 4, started=3, ended=3), Progress("b", 1, 4)]
    assert order(groups).group == "a"


def test_probes_of_each_group_come_first() -> None:
    groups = [Progress("a", 1, 16, started=6), Progress("b", 1, 16, started=5), Progress("c", 1, 16)]
    assert probe(groups).group == "b"


def test_then_the_group_of_which_the_least_share_has_ended() -> None:
    groups = [Progress("a", 1, 4, started=2, ended=1), Progress("b", 1, 4, started=3, ended=1)]
    assert probe(groups).group == "b"
    groups[0].ended = 0
    assert probe(groups).group == "a"


def test_an_earlier_bursts_group_starts_before_all() -> None:
    groups = [Progress("a", 1, 4, started=3, ended=3), Progress("b", 2, 4)]
    assert probe(groups).group == "a"


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), phi=st.integers(0, 2))
def test_probing_trains_the_same_work_within_the_same_staleness(seed: int, phi: int) -> None:
    short = ("cells.executions_per_cell=6", f"schedule.lead_steps={phi}", "training.microstep=4")
    workload = tiny(*short)
    jobs = Drawn(workload, seed)
    usual, probing = (trial(workload, jobs, Plan("elastic", probing=on), seed) for on in (False, True))
    assert probing.executions == usual.executions == workload.groups * workload.group.executions
    assert abs(probing.work / usual.work - 1.0) < 0.005
    assert probing.staleness_max <= -(-(phi + 2) // 2)


def test_with_rooms_for_all_probing_changes_nothing() -> None:
    workload = tiny("cells.executions_per_cell=24")
    runs = [
        Simulation(workload, Drawn(workload, 2), Plan("elastic", probing=on), keep=True).run() for on in (False, True)
    ]
    assert runs[0].seconds == runs[1].seconds
