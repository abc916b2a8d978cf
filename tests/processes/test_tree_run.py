"""A run whose executions branch, packed as trees: what is on disk is audited and trained again, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.ledger.microstep_files import read_microstep
from tests.chaos.harness import SMALL_MICROSTEPS, Drill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def drill(tmp_path: Path, cache: Path) -> Iterator[Drill]:
    """Each execution gives the instruction twice, in two conversations that begin alike."""
    twice = "harness.environment.SHELL_CONVERSATIONS=2"
    made = Drill(tmp_path / "runs", cache, settings=(*SMALL_MICROSTEPS, "trajectory.packing=tree", twice))
    made.home.mkdir()
    yield made
    made.stop()


def test_a_run_with_trees_is_audited_and_replays(drill: Drill) -> None:
    drill.submit()
    drill.assert_completed()
    names = [name for step in drill.state.steps.values() for name in step.microsteps]
    microsteps = [read_microstep(drill.run.microsteps / f"{name}.arrow")[0] for name in names]
    assert any((each.parents >= 0).any() for each in microsteps), "no tree was packed"
    for each in microsteps:
        assert len(each.executions) == len(set(each.target_samples.tolist()))
    assert drill.command("verify", "drill").returncode == 0
    drill.assert_replays(2)
