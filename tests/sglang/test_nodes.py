"""A run whose one cell lies on two nodes, and its engine too: a part of SGLang on each, one of which dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.engines.sglang.install import interpreter
from tests.chaos import moments, procs
from tests.chaos.harness import SMALL_MICROSTEPS, Drill
from tests.chaos.moments import CORE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SETTINGS = (
    *SMALL_MICROSTEPS,
    "cells.count=1",
    "cells.nodes_per_cell=2",
    "train.data_parallel=2",
    "schedule.mode=colocate",
    "schedule.phase_timeout=15m",
    "rollout.engine=sglang",
    "rollout.tensor_parallel=2",
    "rollout.executions_per_cell=16",
    "local.liveness=60s",
    "tasks.harness_timeout=900s",
    "tasks.grader_timeout=300s",
    "tasks.execution_timeout=1600s",
)


def test_an_engine_over_two_nodes_serves_and_starts_again_when_a_part_dies(
    installed: None, tmp_path: Path, cache: Path
) -> None:
    settings = (*SETTINGS, f"rollout.python={interpreter()}")
    drill = Drill(tmp_path / "runs", cache, steps=1, settings=settings, deadline=1200.0)
    drill.home.mkdir()
    try:
        drill.submit()
        drill.until(moments.live)
        first = drill.engine(CORE)
        part = procs.child_of(drill.pid("agent-0-1"), "--node-rank 1 ", "serve.py")
        assert part
        drill.kill(part)
        drill.until(lambda _: drill.engine(CORE) != first)
        drill.assert_completed()
        assert drill.state.incarnation(CORE) == 1  # an engine's end is no cell's
        assert len(drill.state.lineages) == 1
        drill.assert_replays(1)
    finally:
        drill.stop()
