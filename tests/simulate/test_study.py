"""Studies: what the command shows, in which shape, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli.simulate_ import app
from gyre.errors import UserError
from gyre.simulate.source import find_source, parse_cells, parse_modes
from gyre.simulate.study import best_split, drawn, study
from gyre.simulate.workload import load_workload
from tests.simulate.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = sorted(
    set((ROOT / "recipes" / "workloads").glob("*.toml")) - {ROOT / "recipes" / "workloads" / "emulated.toml"}
)


def toml(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(
        """
        name = "tiny"
        steps = 2
        group = { executions = 4, groups_per_step = 4 }
        cells = { count = 2, executions_per_cell = 12 }
        executions = { mean = "10m", timeout = "1h" }
        training = { work = "40s" }
        """
    )
    return path


def test_a_study_compares_modes_on_the_same_executions() -> None:
    found = study(tiny(), ["elastic", "colocate", "async"], [2, 3], seeds=2)
    assert [(row.mode, row.cells, row.streaming) for row in found.modes] == [
        (mode, cells, streaming)
        for cells in (2, 3)
        for mode, streaming in (("elastic", True), ("colocate", True), ("async", True), ("async", False))
    ]
    assert found.bound_hours == found.bounds["2"] >= found.bounds["3"]
    for row in found.modes:
        assert row.hours_min <= row.hours <= row.hours_max
        assert row.over_bound >= 1.0
        assert row.training_share + row.serving_share + row.switching_share == pytest.approx(1.0)
    elastic, streaming, batches = (found.modes[place] for place in (4, 6, 7))
    assert elastic.speedup == 1.0
    assert streaming.hours <= batches.hours


@pytest.mark.parametrize(("work", "split"), [(400, 3), (4, 1)])
def test_async_is_shown_at_its_best_split(work: int, split: int) -> None:
    """Where training takes most of the time most cells train, and the other way round."""
    workload = tiny("cells.count=4", f"training.work={work}", "training.microstep=40", "steps=4")
    assert best_split(workload, True, [drawn(workload, 0)]).plan.split == split


def test_the_command_prints_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(toml(tmp_path)), "--seeds", "1", "--modes", "elastic,colocate", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["mode"] for row in found["modes"]] == ["elastic", "colocate"]
    assert found["bound_hours"] <= min(row["hours"] for row in found["modes"])
    assert 0 <= found["modes"][0]["idle_share"] < 1


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "run.html"
    done = CliRunner().invoke(app, [str(toml(tmp_path)), "--seeds", "1", "--html", str(picture)])
    assert done.exit_code == 0, done.output
    assert all(name in done.stdout for name in ("elastic", "colocate", "async", "bound"))
    assert picture.read_text().count("<svg") == 4


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_the_public_workloads_load(path: Path) -> None:
    workload = load_workload(path)
    assert workload.name == path.stem
    assert workload.cells.to_training == 8.52


def test_a_recipe_is_simulated_on_stated_assumptions() -> None:
    source = find_source(str(ROOT / "recipes" / "terminalbench.toml"), ["executions.mean=1h"])
    assert source.workload.executions.mean == 3600.0
    assert source.workload.cells.executions_per_cell == 96
    assert "executions.mean=1h" in source.notes[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cells.cuont=3", "cells.cuont: unknown key"),
        ("cells.count=0", "count"),
        ("executions.mean=2h", "executions.mean: must be above 0 and below executions.timeout"),
        ("executions.timeout=soon", "executions.timeout: expected seconds"),
        ("group.min_graded=9", "group.min_graded"),
        ("steps", "expected key=value"),
    ],
)
def test_mistakes_are_named(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(setting)


def test_wrong_modes_and_counts_are_refused() -> None:
    with pytest.raises(UserError, match="'elastik' is none of elastic"):
        parse_modes("elastik")
    with pytest.raises(UserError, match="expected counts"):
        parse_cells("4,x")
    with pytest.raises(UserError, match="one cell or more"):
        parse_cells("0")
    with pytest.raises(UserError, match=r"nosuch.toml does not exist"):
        find_source("nosuch.toml", [])
    with pytest.raises(UserError, match="two cells or more"):
        study(tiny(), ["async"], [1], seeds=1)
