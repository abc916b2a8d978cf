"""What Slurm says and what is made of it, without a cluster: in the default tier."""

from __future__ import annotations

import pytest

from gyre.launch.slurm_places import Places
from gyre.launch.slurm_queue import JobState, parse
from gyre.launch.slurm_status import judge
from gyre.ledger.state import RunState
from gyre.recipe.load import load_recipe
from gyre.views.summary import State, Summary, summarise
from tests.slurm.cluster import ROOT

PENDING = """\
12+0|12|PENDING|||(null)
12+1|13|PENDING|||Resources
"""


def summary(state: State) -> Summary:
    import msgspec

    made = summarise(RunState(), load_recipe(ROOT / "recipes" / "short.toml", []))
    return msgspec.structs.replace(made, state=state, reason="as the ledger says")


def job(state: str, start: str = "2026-11-29T19:27:12", reason: str = "None") -> JobState:
    text = "".join(f"7+{i}|{7 + i}|{state}|n{i}|{start}|{reason}\n" for i in (0, 1))
    return parse(text)["7"]


def test_components_are_gathered_under_their_leader() -> None:
    found = parse("7+1|8|RUNNING|gpu[1-2]|2026-11-29T19:27:12|None\n7+0|7|RUNNING|cpu1|2026-11-29T19:27:12|None\n" * 2)
    assert [c.shown for c in found["7"].components] == ["7+0", "7+1"]
    assert found["7"].state == "RUNNING"


def test_a_job_waits_for_the_component_that_has_a_reason() -> None:
    found = parse(PENDING)["12"]
    assert (found.state, found.reason, found.start) == ("PENDING", "Resources", "")
    started = parse(PENDING.replace("|||Resources", "||2026-12-01T08:00:00|Priority"))["12"]
    assert (started.reason, started.start) == ("Priority", "2026-12-01T08:00:00")


def test_a_reason_may_hold_the_separator() -> None:
    assert parse("3|3|PENDING|||held | by admin\n")["3"].reason == "held | by admin"


@pytest.mark.parametrize(
    ("ledger", "found", "silent", "cancelled", "expected", "words"),
    [
        ("pending", job("PENDING", "N/A", "Priority"), None, False, "pending", "job 7 waits (Priority)"),
        ("finished", job("PENDING", "N/A", "BeginTime"), 9.0, False, "pending", "job 7 waits (BeginTime)"),
        ("cancelled", job("PENDING"), 9.0, True, "cancelled", "as the ledger says"),
        ("pending", job("RUNNING"), None, False, "pending", "job 7 is running: starting"),
        ("running", job("RUNNING"), 1.0, False, "running", ""),
        ("running", job("RUNNING"), 75.0, False, "running", "silent for 75 s, while job 7 is running"),
        ("running", job("NODE_FAIL"), 75.0, False, "failed", "dead: job 7 is node fail"),
        ("running", None, 75.0, False, "failed", "dead: job 7 is not known to slurm any more"),
        ("pending", job("CANCELLED"), None, True, "cancelled", "job 7: cancelled"),
        ("finished", job("COMPLETED"), 9.0, False, "finished", "as the ledger says"),
        ("finished", job("RUNNING"), 1.0, False, "running", "job 7 is about to end, or to go on"),
        ("finished", None, 9.0, False, "finished", "as the ledger says"),
        ("failed", job("FAILED"), 9.0, False, "failed", "as the ledger says"),
    ],
)
def test_the_state_of_a_run_joins_ledger_and_slurm(
    ledger: State, found: JobState | None, silent: float | None, cancelled: bool, expected: State, words: str
) -> None:
    state, reason = judge(summary(ledger), "7", found, "", cancelled, silent)
    assert state == expected
    assert reason.lower().startswith(words.lower())
    assert bool(reason) == bool(words)


def test_accounting_says_how_a_forgotten_job_ended() -> None:
    assert judge(summary("running"), "7", None, "TIMEOUT", False, 75.0)[1].startswith("dead: job 7 is timeout")


PROCESSES = ["scheduler", "processor", "worker-0", "worker-1", "cell-0", "cell-1", "cell-2"]
GROUPS = (("cpu1", "cpu2"), ("gpu1", "gpu2", "gpu3"))


def test_processes_have_a_node_each() -> None:
    assert Places(GROUPS, PROCESSES).homes == {
        "scheduler": "cpu1",
        "processor": "cpu1",
        "worker-0": "cpu1",
        "worker-1": "cpu2",
        "cell-0": "gpu1",
        "cell-1": "gpu2",
        "cell-2": "gpu3",
    }


def test_a_lost_satellite_moves_nobody() -> None:
    places = Places(GROUPS, PROCESSES)
    assert places.lose((("cpu1", "cpu2"), ("gpu1", "gpu3"))) == []
    assert places.homes["cell-1"] == ""
    assert [places.homes[cell] for cell in ("cell-0", "cell-2")] == ["gpu1", "gpu3"]


def test_a_lost_core_takes_the_last_satellites_node() -> None:
    places = Places(GROUPS, PROCESSES)
    assert places.lose((("cpu1", "cpu2"), ("gpu2", "gpu3"))) == ["cell-2"]
    assert [places.homes[cell] for cell in ("cell-0", "cell-1", "cell-2")] == ["gpu3", "gpu2", ""]
    assert places.lose((("cpu1", "cpu2"), ("gpu2",))) == ["cell-1"]
    assert places.homes["cell-0"] == "gpu2"


WIDE = ["scheduler", "worker-0", "cell-0", "agent-0-1", "cell-1", "agent-1-1"]
WIDE_GROUPS = (("cpu1",), ("gpu1", "gpu2", "gpu3", "gpu4"))


def test_cells_of_several_nodes_have_neighbours() -> None:
    places = Places(WIDE_GROUPS, WIDE)
    assert [places.homes[name] for name in WIDE[2:]] == ["gpu1", "gpu2", "gpu3", "gpu4"]


def test_a_core_that_has_lost_a_node_takes_one_of_the_satellite_that_is_broken_already() -> None:
    places = Places(WIDE_GROUPS, WIDE)
    assert places.lose((("cpu1",), ("gpu1", "gpu3", "gpu4"))) == ["agent-1-1"]
    assert [places.homes[name] for name in WIDE[2:]] == ["gpu1", "gpu4", "gpu3", ""]
    assert places.lose((("cpu1",), ("gpu3", "gpu4"))) == ["cell-1"]
    assert [places.homes[name] for name in WIDE[2:]] == ["gpu3", "gpu4", "", ""]
    assert places.lose((("cpu1",), ("gpu4",))) == []


def test_a_lost_worker_has_no_node_any_more() -> None:
    places = Places(GROUPS, PROCESSES)
    assert places.lose((("cpu1",), ("gpu1", "gpu2", "gpu3"))) == []
    assert (places.homes["worker-0"], places.homes["worker-1"]) == ("cpu1", "")
