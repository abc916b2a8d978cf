"""One short run, end to end, through the same processes as a cluster's: what it leaves, and what people see of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import execution_names
from gyre.ledger.tail import JournalTail
from gyre.views.runs import read_run
from gyre.views.show import find_execution
from tests.chaos import moments, procs
from tests.chaos.harness import ROOT, SMALL_MICROSTEPS, Drill, gyre
from tests.chaos.moments import CORE, SATELLITE

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[tuple[Drill, str]]:
    """A run that has ended, and the execution that was held while the core went to train: it was re-routed."""
    folder = tmp_path_factory.mktemp("short")
    held_out = folder / "held-out"
    for task in sorted((ROOT / "recipes/tasks/held-out").iterdir())[:2]:
        shutil.copytree(task, held_out / task.name)
    settings = (*SMALL_MICROSTEPS, f"eval.path={held_out}", "eval.every=2", "rollout.engines_per_cell=2")
    drill = Drill(folder / "runs", cache, settings=settings)
    drill.home.mkdir()
    try:
        drill.submit()
        held = [both_train(drill, step) for step in (1, 2)]
        drill.look_at_sockets()
        drill.assert_completed()
        yield drill, held[0]
    finally:
        drill.stop()


def both_train(drill: Drill, step: int) -> str:
    """In the burst of `step` both cells get to train, however slow one is. The execution that was held for that."""
    name, inside = drill.hold_one(CORE)
    drill.until(lambda state: moments.core_training(state, step=step))
    assert drill.state.routes[name] == SATELLITE
    procs.thaw(*inside)
    drill.until_both_train()
    return name


def test_nothing_is_lost_counted_twice_or_left_behind(finished: tuple[Drill, str]) -> None:
    drill, _ = finished  # `assert_completed` has looked
    assert len(drill.seen_sockets) >= 5  # two engines a cell, and transfer engines
    assert drill.command("verify", "drill").returncode == 0
    assert drill.state.waterlevel == 0


def test_both_cells_switch_in_every_burst_and_train(finished: tuple[Drill, str]) -> None:
    state = finished[0].state
    for cell in (CORE, SATELLITE):
        entered = [what for what, _, _ in moments.current(state, cell).history]
        assert entered.count("training") + (moments.current(state, cell).state == "training") >= 2
    reign = state.reign()
    assert reign is not None
    assert [step for step in (1, 2) if any(m.step == step for m in reign.merged)], "the satellite never contributed"
    assert {m for merge in reign.merged for m in merge.microsteps} < {
        name for step in state.steps.values() for name in step.microsteps
    }


def test_a_cell_serves_with_all_its_engines(finished: tuple[Drill, str]) -> None:
    """Each has keys, an address and a log of its own, and runs to the end."""
    drill, _ = finished
    for cell in (CORE, SATELLITE):
        engines = moments.current(drill.state, cell).engines
        assert sorted(engines) == [0, 1]
        assert len({(engine.url, engine.pid) for engine in engines.values()}) == 2
        for number, engine in engines.items():
            assert engine.key_file.startswith(f"{cell}-engine-{number}.")
            assert (drill.run.log_dir(1) / f"{cell}-engine-{number}.log").is_file()


def test_a_live_execution_is_rerouted_when_its_cell_leaves(finished: tuple[Drill, str]) -> None:
    drill, name = finished
    tail = JournalTail(drill.run, ["scheduler"])
    routes = [
        line.event.routes[name]
        for line in tail.poll()
        if isinstance(line.event, ev.Routed) and name in line.event.routes
    ]
    assert routes == [CORE, SATELLITE]
    assert list(drill.state.executions[name].attempts) == [1]


def test_evaluations_are_scored_and_never_consumed(finished: tuple[Drill, str]) -> None:
    drill, _ = finished
    evaluations = {name for name, group in drill.state.groups.items() if group.plan.purpose == "eval"}
    assert len(evaluations) >= 2
    assert not evaluations & set(drill.state.consumed)
    status = json.loads(drill.command("status", "drill", "--json").stdout)
    assert all(0 <= evaluation["score"] <= 1 for evaluation in status["evals"])
    assert status["evals"]


def test_list_and_status_have_the_promised_shape(finished: tuple[Drill, str]) -> None:
    drill, _ = finished
    listed = json.loads(drill.command("list", "--json").stdout)
    assert [(row["name"], row["path"], row["state"]) for row in listed] == [("drill", str(drill.run.path), "finished")]
    status = json.loads(drill.command("status", "drill", "--json").stdout)
    assert status["state"] == "finished"
    assert status["waterlevel"] == 0
    assert [step["step"] for step in status["steps"]] == [1, 2]
    wanted = {"step", "version", "reward", "seconds", "staleness", "tokens_sampled", "tokens_trained", "tokens_dropped"}
    for step in status["steps"]:
        assert wanted <= set(step)
        assert step["version"] == step["step"]
        assert step["staleness"] == 0
        assert step["tokens_sampled"] == step["tokens_trained"] + step["tokens_dropped"]
        assert step["logprob_difference"] <= 1e-4
    assert [cell["name"] for cell in status["cells"]] == [CORE, SATELLITE]
    for cell in status["cells"]:
        assert {"role", "since", "switches"} <= set(cell)
        assert cell["switches"]


def test_show_decodes_an_execution(finished: tuple[Drill, str]) -> None:
    drill, name = finished
    shown = drill.command("show", "drill", name)
    assert shown.returncode == 0
    assert "thread main" in shown.stdout
    first = drill.command("show", "drill", name, "0")
    assert "<tool_call>" in first.stdout
    assert drill.command("show", "drill").returncode == 0
    assert drill.command("show", "drill", "g99999-00").returncode == 2


def test_what_show_says_of_every_execution_adds_up_to_the_steps(finished: tuple[Drill, str]) -> None:
    drill, _ = finished
    opened = read_run(drill.run)
    for step, found in opened.state.steps.items():
        assert found.packed is not None
        views = [
            find_execution(opened, name)
            for consumed in found.consumed
            for name in execution_names(opened.state.groups[consumed.group].plan)
        ]
        assert sum(view.trained for view in views) == found.packed.tokens_trained, step
        dropped: Counter[str] = Counter()
        for view in views:
            dropped.update(view.dropped)
        assert dict(dropped) == found.packed.tokens_dropped


def test_replay_is_bit_equal_with_the_satellites_contributions(finished: tuple[Drill, str]) -> None:
    finished[0].assert_replays(2)


def test_its_weights_are_evaluated_without_training(finished: tuple[Drill, str], tmp_path: Path) -> None:
    drill, _ = finished
    shutil.copytree(ROOT / "recipes/tasks/held-out/held-out-create-01", tmp_path / "tasks" / "one")
    argv = gyre("eval", str(drill.run.path), "--tasks", str(tmp_path / "tasks"), "--samples", "2", "--local", "--json")
    done = subprocess.run(
        argv, env={**drill.env, "GYRE_RUNS": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(task["task"], len(task["rewards"]), task["excluded"]) for task in found["tasks"]] == [("one", 2, 0)]
    assert found["interval"][0] <= found["pass_rate"] <= found["interval"][1]
    exported = drill.run.path / "exports" / "step-000002-lineage-1"
    evaluated = read_run(RunFolder(tmp_path / "eval-drill-step-2-001"))
    assert evaluated.job.model == str(exported)
    assert (exported / "model.safetensors").is_file()
    assert not evaluated.state.steps
    assert not evaluated.state.consumed


def test_the_code_reads_what_it_wrote(finished: tuple[Drill, str]) -> None:
    again = read_run(finished[0].run).state
    assert again.history() == finished[0].state.history()
