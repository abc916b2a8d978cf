"""Three steps of recipes/quickstart-sglang.toml: two cells that switch, and an engine that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.engines.sglang.install import interpreter
from gyre.ledger import events as ev
from gyre.ledger.tail import JournalTail
from tests.chaos import moments
from tests.chaos.harness import ROOT, SMALL_MICROSTEPS, Drill
from tests.chaos.moments import CORE, SATELLITE
from tests.sglang.server import unproven

pytestmark = [unproven, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 3
SMALL = (
    'model.build_arguments=["--steps", "240"]',  # the model of recipes/short.toml, which other tests have built
    "group.executions=4",
    "group.groups_per_step=2",
    "rollout.executions_per_cell=5",
    "eval.path=",
    "local.liveness=60s",
)


@pytest.fixture(scope="module")
def finished(installed: None, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Drill]:
    """A run that has ended; the satellite's engine was killed while it served."""
    settings = (*SMALL_MICROSTEPS, *SMALL, f"rollout.python={interpreter()}")
    recipe = ROOT / "recipes" / "quickstart-sglang.toml"
    drill = Drill(tmp_path_factory.mktemp("run") / "runs", cache, STEPS, settings, recipe, deadline=1500.0)
    drill.home.mkdir()
    try:
        drill.submit()
        drill.until(lambda state: moments.live(state, SATELLITE))
        drill.kill(drill.engine(SATELLITE))
        drill.until_both_train()
        drill.assert_completed()
        yield drill
    finally:
        drill.stop()


def test_both_cells_switch_and_train(finished: Drill) -> None:
    for cell in (CORE, SATELLITE):
        found = moments.current(finished.state, cell)
        entered = [what for what, _, _ in found.history]
        assert "training" in [*entered, found.state]
        assert {"draining", "releasing", "resuming"} <= set(entered)


def test_a_killed_engine_came_back_within_its_cells_incarnation(finished: Drill) -> None:
    tail = JournalTail(finished.run, [SATELLITE])
    events = [line.event for line in tail.poll()]
    assert [event.pid for event in events if isinstance(event, ev.Opened)][1:] == []
    assert len({event.pid for event in events if isinstance(event, ev.EngineStarted)}) >= 2


def test_recorded_log_probabilities_are_the_trainers(finished: Drill) -> None:
    """fp32 on both sides: SGLang's, recorded when the tokens were sampled, and the trainer's own."""
    status = json.loads(finished.command("status", "drill", "--json").stdout)
    assert [step["step"] for step in status["steps"]] == list(range(1, STEPS + 1))
    assert all(step["logprob_difference"] <= 1e-4 for step in status["steps"])
    assert all(step["staleness"] == 0 for step in status["steps"])


def test_no_key_is_in_a_log(finished: Drill) -> None:
    logs = "".join(log.read_text(errors="replace") for log in finished.run.logs.glob("*/*.log"))
    found = [
        json.loads(path.read_text()) for path in finished.run.keys.iterdir() if path.suffix not in (".port", ".new")
    ]
    assert found
    assert not any(key in logs for keys in found for key in keys.values())


def test_replay_is_bit_equal(finished: Drill) -> None:
    finished.assert_replays(2)
