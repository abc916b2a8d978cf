"""The run folder: private, made once, found by name, path or age."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger.layout import RunFolder, find_run, list_runs, runs_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYRE_RUNS", str(tmp_path / "home"))
    return tmp_path / "home"


def make(home: Path, name: str, age: int) -> RunFolder:
    run = RunFolder(home / name).create()
    run.recipe.write_text("")
    os.utime(run.recipe, (1000 - age, 1000 - age))
    return run


def test_every_place_is_private(home: Path) -> None:
    run = RunFolder(home / "r").create()
    folders = [run.path, *(path for path in run.path.iterdir() if path.is_dir())]
    assert len(folders) == 11
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert not run.snapshot.exists()


def test_a_run_is_made_once(home: Path) -> None:
    RunFolder(home / "r").create()
    with pytest.raises(UserError, match="exists already"):
        RunFolder(home / "r").create()


def test_paths() -> None:
    run = RunFolder(Path("/runs/r"))
    assert run.name == "r"
    assert str(run.index_path("cell-0")) == "/runs/r/journal/cell-0.index"
    assert str(run.journal_path("cell-0", 2)) == "/runs/r/journal/cell-0.2.jsonl"
    assert str(run.alive_path("worker-1")) == "/runs/r/alive/worker-1"
    assert str(run.shard_dir("worker-1")) == "/runs/r/trajectories/worker-1"
    assert str(run.microstep_dir(12)) == "/runs/r/microsteps/step-000012"
    assert str(run.checkpoint_path(12)) == "/runs/r/checkpoints/step-000012.zarr"
    assert str(run.log_dir(1)) == "/runs/r/logs/attempt-1"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a.1", "../x", "a b", "-x", "a\n"])
def test_a_name_cannot_leave_its_place(name: str) -> None:
    run = RunFolder(Path("/runs/r"))
    for place in (run.index_path, run.alive_path, run.shard_dir, lambda n: run.journal_path(n, 1)):
        with pytest.raises(UserError, match="not a name of a process"):
            place(name)


def test_runs_home_defaults_to_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GYRE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert runs_home() == tmp_path / "runs"
    assert list_runs() == []


def test_the_newest_run_is_the_default(home: Path) -> None:
    with pytest.raises(UserError, match="no runs in"):
        find_run()
    for name, age in (("b", 20), ("a", 5), ("c", 10)):
        make(home, name, age)
    (home / "not-a-run").mkdir()
    (home / "file").write_text("")
    assert [run.name for run in list_runs()] == ["a", "c", "b"]
    assert find_run().name == "a"


def test_a_run_is_found_by_name_and_by_path(home: Path) -> None:
    run = make(home, "quickstart-1", 0)
    assert find_run("quickstart-1") == run
    assert find_run(str(run.path)) == find_run(run.path) == run
    with pytest.raises(UserError, match="did you mean quickstart-1"):
        find_run("quickstart-2")
    with pytest.raises(UserError, match="see gyre list"):
        find_run("zzz")
