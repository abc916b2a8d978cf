"""The fates of sampled tokens against the account of the step: every token once, trained where a file says so."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from gyre.ledger import events as ev
from gyre.ledger.microstep_files import read_microstep
from gyre.ledger.state import execution_names
from gyre.views.fates import PENDING, fates_of
from gyre.views.show import recorded_turns
from tests.trajectory.trees import attempts, turn
from tests.views.ledgers import Ledger


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ev.GroupPlan], list[Any], list[Any], tuple[str, ...]]:
    """(plans, ends of executions, turns, void groups)."""
    plans = [ev.GroupPlan(f"g{n:05}", "task", 2, draw(st.sampled_from(("train", "train", "eval")))) for n in range(3)]
    ends, turns = [], []
    for name in (name for plan in plans for name in execution_names(plan)):
        turns += draw(attempts(name, 1, most=7))
        outcome = draw(st.sampled_from(("graded", "graded", "graded", "excluded")))
        reward = draw(st.sampled_from((0.0, 1.0))) if outcome == "graded" else None
        ends.append(ev.Finished(execution=name, attempt=1, outcome=outcome, reward=reward))
    trained = [plan.group for plan in plans if plan.purpose == "train"]
    return plans, ends, turns, tuple(group for group in trained if draw(st.integers(0, 4)) == 0)


@given(steps(), st.sampled_from((8, 64)))
@hypothesis_settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_fates_add_up_to_the_steps_account(step: Any, tokens_per_microstep: int) -> None:
    plans, ends, turns, void = step
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), tokens_per_microstep=tokens_per_microstep)
        ledger.dispatch(plans)
        ledger.say("worker-0", *ends)
        ledger.record(turns)
        trained_groups = [plan.group for plan in plans if plan.purpose == "train"]
        record = ledger.pack(trained_groups, void)
        opened = ledger.opened()
        files: Counter[tuple[str, int, int]] = Counter()
        for name in ledger.state.steps[1].packed.microsteps if ledger.state.steps[1].packed else []:
            made, _ = read_microstep(ledger.run.microsteps / f"{name}.arrow")
            for sample, number, offset in zip(made.target_samples, made.target_turns, made.target_offsets, strict=True):
                files[made.executions[sample], int(number), int(offset)] += 1
        shown: Counter[tuple[str, int, int]] = Counter()
        dropped: Counter[str] = Counter()
        for plan in plans:
            for name in execution_names(plan):
                fates = fates_of(opened, name, recorded_turns(opened, name))
                for (_, number), of_turn in fates.turns.items():
                    assert [fate.start for fate in of_turn[1:]] == [fate.stop for fate in of_turn[:-1]]
                    shown.update(
                        (name, number, at) for fate in of_turn if fate.step for at in range(fate.start, fate.stop)
                    )
                if plan.purpose == "train":
                    dropped.update(fates.dropped())
                else:
                    assert set(fates.dropped()) <= {"evaluation"}
        assert shown == files
        assert dict(dropped) == record.dropped
        assert sum(shown.values()) == record.trained


def test_until_a_group_is_packed_its_tokens_are_pending_and_lost_attempts_are_aborted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    plan = ev.GroupPlan("g00000", "task", 2)
    ledger.dispatch([plan])
    one, two = execution_names(plan)
    ledger.record([turn(0, execution=one, attempt=1, context=[5, 6], output=[1, 2])])
    again = ev.Dispatch(one, 2, "task")
    ledger.say("worker-0", ev.Finished(execution=one, attempt=1, outcome="retry", reason="server_error"))
    ledger.say("scheduler", ev.Dispatched(worker="worker-0", incarnation=1, executions=[again]))
    assert fates_of(ledger.opened(), one, recorded_turns(ledger.opened(), one)).dropped() == {PENDING: 2}
    ledger.record([turn(0, execution=one, attempt=2, context=[5, 6], output=[1, 2, 3])])
    ledger.record([turn(0, execution=two, attempt=1, context=[5], output=[4])])
    ends = [(one, 2, 1.0), (two, 1, 0.0)]
    ledger.say("worker-0", *[ev.Finished(execution=n, attempt=a, outcome="graded", reward=r) for n, a, r in ends])
    record = ledger.pack(["g00000"])
    fates = fates_of(ledger.opened(), one, recorded_turns(ledger.opened(), one))
    assert (fates.trained(), fates.dropped()) == (3, {"aborted_attempt": 2})
    assert (record.trained, record.dropped) == (4, {"aborted_attempt": 2})
