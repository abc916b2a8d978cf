"""A file system that gets full in the middle of a run: one clear line, nothing acknowledged is lost, resume goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import Qwen3Config

from gyre.ledger.state import RunState
from tests.chaos import moments
from tests.chaos.harness import Drill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZE, MORE = "128m", "512m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte."""
    with contextlib.suppress(OSError), open(disk / "ballast", "ab", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass


def executions_run(state: RunState) -> bool:
    return len(moments.live(state)) >= 6


def a_step_is_trained(state: RunState) -> bool:
    return moments.core_training(state, step=1)


def test_a_disk_that_is_full_at_submission_leaves_no_run(drills: Callable[..., Drill], disk: Path) -> None:
    fill(disk)
    model = disk.parent / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(model)
    drill = drills(home=disk, settings=(f"model.path={model}", 'model.build=""'))
    drill.start_submit()
    assert drill.end() == 1
    assert "is full: free space" in drill.output.read_text()
    assert not drill.run.path.exists()


@pytest.mark.parametrize("moment", [executions_run, a_step_is_trained])
def test_a_disk_that_gets_full(drills: Callable[..., Drill], disk: Path, moment: Callable[[RunState], bool]) -> None:
    drill = drills(home=disk)
    drill.submit()
    drill.until(moment)
    drill.look_at_sockets()
    fill(disk)
    assert drill.end() == 1
    output = drill.output.read_text()
    advice = f"the file system of {drill.run.path} is full: free space, then gyre resume drill"
    errors = [line for line in output.splitlines() if line.startswith("gyre: ")]
    assert len(errors) == 1, output
    assert errors[0].endswith(advice)
    assert "Traceback" not in output
    before = {name: e.outcome() for name, e in drill.state.executions.items() if e.outcome() is not None}
    assert drill.command("verify", "drill").returncode == 0

    refused = drill.command("resume", "drill")
    assert refused.returncode == 1
    assert [line[-len(advice) :] for line in refused.stderr.splitlines()] == [advice]

    subprocess.run(["mount", "-o", f"remount,size={MORE}", str(disk)], check=True)
    drill.resume()
    drill.assert_completed()
    assert {name: drill.state.executions[name].outcome() for name in before} == before
