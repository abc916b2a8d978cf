"""A view of real journals: what is handed out, snapshots, and cuts that come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.ledger import events as ev
from gyre.ledger.fold import fold, fold_all
from gyre.ledger.job import Job, write_job
from gyre.ledger.journal import Journal, create_index
from gyre.ledger.layout import RunFolder
from gyre.ledger.snapshot import Executions
from gyre.ledger.tail import Line, read_journal
from gyre.ledger.view import LedgerView

OPENED = ev.Opened(pid=1, pid_start=1.0, host="h", code="c")
ACCEPT_OLD = ev.Accepted(writer="worker-0", incarnation=1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run").create()
    job = Job(
        launcher="local",
        code="c",
        created=1.0,
        model="m",
        workers=["worker-0"],
        cells=["cell-0"],
        tasks=["t"],
        eval_tasks=[],
    )
    write_job(run, job)
    for writer in job.writers():
        create_index(run, writer)
    return run


def journal(run: RunFolder, writer: str, *events: ev.Event) -> Journal:
    opened = Journal.open(run, writer, lambda: 5.0)
    for event in (OPENED, *events):
        opened.append(event, durable=False)
    return opened


def keys(lines: list[Line]) -> list[tuple[str, int, int]]:
    return sorted((line.writer, line.incarnation, line.n) for line in lines)


def all_lines(run: RunFolder) -> list[Line]:
    return [line for path in sorted(run.journal.glob("*.jsonl")) for line in read_journal(path)]


def burst(groups: int) -> ev.BurstOpened:
    plans = [ev.GroupPlan(f"g{i:05d}", "t", 1) for i in range(groups)]
    return ev.BurstOpened(burst=1, lineage=1, version=0, groups=plans)


def dispatched(group: int, attempt: int = 1, incarnation: int = 1) -> ev.Dispatched:
    dispatch = ev.Dispatch(f"g{group:05d}-00", attempt, "t")
    return ev.Dispatched(worker="worker-0", incarnation=incarnation, executions=[dispatch])


def finished(group: int, attempt: int = 1, reward: float = 1.0) -> ev.Finished:
    return ev.Finished(execution=f"g{group:05d}-00", attempt=attempt, outcome="graded", reward=reward, tokens_sampled=7)


def packed() -> ev.Packed:
    return ev.Packed(step=1, microsteps=[], executions=1, tokens_sampled=7, tokens_trained=7, tokens_dropped={})


def test_news_is_handed_out_once(run: RunFolder) -> None:
    scheduler = journal(run, "scheduler", ACCEPT_OLD)
    view = LedgerView(run)
    assert keys(view.poll()) == [("scheduler", 1, 0), ("scheduler", 1, 1)]
    assert view.poll() == []
    scheduler.append(burst(1))
    assert keys(view.poll()) == [("scheduler", 1, 2)]
    assert view.state == fold_all(all_lines(run))


def test_what_its_own_writer_folded_is_no_news(run: RunFolder) -> None:
    """As the scheduler does with its orders."""
    scheduler = journal(run, "scheduler")
    view = LedgerView(run)
    view.poll()
    n = scheduler.append(burst(2))
    fold(view.state, Line("scheduler", 1, n, 5.0, burst(2)))
    assert view.poll() == []
    assert view.state.planned == 2


def test_a_cut_that_comes_late_takes_back_what_was_folded(run: RunFolder) -> None:
    scheduler = journal(run, "scheduler", ACCEPT_OLD, burst(1), dispatched(0))
    old = journal(run, "worker-0", finished(0))
    view = LedgerView(run)
    view.poll()
    assert view.state.executions["g00000-00"].verdict() == "graded"
    new = journal(run, "worker-0")
    scheduler.append(ev.Accepted(writer="worker-0", incarnation=2, cut={1: 0}))
    scheduler.append(dispatched(0, 2, 2))
    news = view.poll()
    assert keys(news) == [("scheduler", 1, 4), ("scheduler", 1, 5), ("worker-0", 2, 0)], "each once, the cut among them"
    assert view.state.open == {"g00000-00"}
    assert view.state.tally.tokens_sampled == 0
    old.append(finished(0, reward=9.0))
    new.append(finished(0, 2))
    assert keys(view.poll()) == [("worker-0", 2, 1)], "nobody hears a line beyond its cut"
    outcome = view.state.executions["g00000-00"].outcome()
    assert outcome is not None
    assert outcome.reward == 1.0
    assert view.state == fold_all(all_lines(run))


def settled_run(run: RunFolder) -> tuple[Journal, Journal, LedgerView]:
    """Two groups: g00000 is consumed and packed, g00001 is under way."""
    scheduler = journal(run, "scheduler", ACCEPT_OLD, burst(2), dispatched(0), dispatched(1))
    worker = journal(run, "worker-0", finished(0))
    scheduler.append(ev.Consumed(step=1, group="g00000"))
    journal(run, "processor", packed())
    view = LedgerView(run)
    view.poll()
    view.save()
    return scheduler, worker, view


def test_a_snapshot_and_the_rest_are_the_whole(run: RunFolder) -> None:
    _, worker, view = settled_run(run)
    worker.append(finished(1))
    again = LedgerView(run)
    assert keys(again.poll()) == [("worker-0", 1, 2)]
    view.poll()
    assert again.state == fold_all(all_lines(run))


def test_settled_executions_are_decoded_when_asked_for(run: RunFolder) -> None:
    settled_run(run)
    state = LedgerView(run).state
    assert isinstance(state.executions, Executions)
    assert list(state.executions.at_hand()) == ["g00001-00"]
    assert state.tally.graded == 1
    assert state.executions["g00000-00"].verdict() == "graded"
    assert sorted(state.executions) == ["g00000-00", "g00001-00"]
    assert len(state.executions) == 2
    with pytest.raises(KeyError):
        state.executions["g00007-00"]


def test_an_execution_that_changes_after_it_was_settled_is_saved_again(run: RunFolder) -> None:
    """The attempt that was given up for lost ends after all."""
    scheduler, worker, _ = settled_run(run)
    view = LedgerView(run)
    view.poll()
    scheduler.append(ev.Excluded(execution="g00001-00", reason="r"))
    worker.append(finished(0, attempt=3))
    view.poll()
    view.save()
    again = LedgerView(run)
    assert sorted(again.state.executions["g00000-00"].attempts) == [1, 3]
    assert again.state == fold_all(all_lines(run))


def test_a_snapshot_of_a_snapshot_keeps_its_chunks(run: RunFolder) -> None:
    scheduler, worker, _ = settled_run(run)
    for _ in range(2):
        view = LedgerView(run)
        view.poll()
        view.save()
    worker.append(finished(1))
    scheduler.append(ev.Consumed(step=1, group="g00001"))
    view = LedgerView(run)
    view.poll()
    view.save()
    assert LedgerView(run).state == fold_all(all_lines(run))


def test_a_late_cut_after_a_snapshot(run: RunFolder) -> None:
    scheduler, worker, _ = settled_run(run)
    worker.append(finished(1))
    view = LedgerView(run)
    view.poll()
    journal(run, "worker-0")
    scheduler.append(ev.Accepted(writer="worker-0", incarnation=2, cut={1: 1}))
    view.poll()
    assert view.state.open == {"g00001-00"}
    assert view.state == fold_all(all_lines(run))
    view.save()
    assert LedgerView(run).state == view.state


@pytest.mark.parametrize("damage", ["absent", "empty", "torn", "short", "junk"])
def test_a_damaged_snapshot_costs_nothing_but_time(run: RunFolder, damage: str) -> None:
    settled_run(run)
    whole = run.snapshot.read_bytes()
    if damage == "absent":
        run.snapshot.unlink()
    else:
        junk = (999).to_bytes(8, "little") + b"junk"
        run.snapshot.write_bytes(
            {"empty": b"", "torn": whole[: len(whole) // 2], "short": whole[:-1], "junk": junk}[damage]
        )
    view = LedgerView(run)
    view.poll()
    assert view.state == fold_all(all_lines(run))
