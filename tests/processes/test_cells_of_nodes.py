"""Runs whose cells have several nodes: on one machine each node's share is a process of its own, with its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import moments, procs
from tests.chaos.harness import SMALL_MICROSTEPS, Drill
from tests.chaos.moments import SATELLITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = "agent-1-1"
"""On the satellite's second node."""


@pytest.fixture
def drill(tmp_path: Path, cache: Path) -> Iterator[Drill]:
    settings = (
        *SMALL_MICROSTEPS,
        "cells.nodes_per_cell=2",
        "train.data_parallel=2",
        "rollout.engines_per_cell=2",  # one a node
    )
    made = Drill(tmp_path / "runs", cache, settings=settings)
    made.home.mkdir()
    yield made
    made.stop()


def test_two_nodes_train_as_one_does_and_the_end_of_a_nodes_agent_is_its_cells(drill: Drill) -> None:
    """The replay has the same ranks on one node: the same bits."""
    drill.submit()
    drill.until(moments.live)
    agents_engine = drill.engine(SATELLITE, 1)
    assert procs.parent(agents_engine) == drill.pid(AGENT)
    assert procs.parent(drill.engine(SATELLITE, 0)) == drill.pid(SATELLITE)
    drill.until_both_train()
    drill.until(moments.unmerged)
    on_second = procs.child_of(drill.pid(AGENT), "--rank 1 ", "gyre.processes.trainer_rank")
    assert on_second
    assert not procs.child_of(drill.pid(SATELLITE), "--rank 1 ", "gyre.processes.trainer_rank")
    drill.kill(drill.pid(AGENT))
    drill.wait(lambda: not procs.alive(on_second) and not procs.alive(agents_engine))  # nobody is left behind
    processor = drill.pid("processor")
    procs.freeze(processor)  # the run's end waits for the satellite
    drill.until(lambda state: state.incarnation(SATELLITE) == 2)
    procs.thaw(processor)
    drill.assert_completed()
    assert drill.state.incarnation(AGENT) == 2
    assert len(drill.state.lineages) == 1
    drill.assert_replays(2)
