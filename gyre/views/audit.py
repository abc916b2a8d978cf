"""`gyre verify`: an audit of a run's ledger.

Owns the list of what must hold. Invariant: it reads files and journals only, and says of each rule how many cases it
looked at and which ones break it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.microstep_files import read_microstep
from gyre.ledger.shards import TurnReader
from gyre.ledger.state import CellIncarnation, RunState
from gyre.ledger.turns_merge import latest_rows
from gyre.views.runs import OpenRun


class Rule(Struct, frozen=True, kw_only=True):
    """What must hold, how many cases were looked at, and the breaches (empty when it holds)."""

    rule: str
    cases: int
    breaches: list[str]


def audit(opened: OpenRun) -> list[Rule]:
    """Every rule, in the order from journals to checkpoints."""
    checks: list[tuple[str, Callable[[OpenRun], Iterator[tuple[str, str]]]]] = [
        ("each group is consumed at most once", _consumed),
        ("every sampled token of a packed step is trained or dropped", _tokens),
        ("micro-step files are whole and are what was announced", _files),
        ("no sampled token is a target twice", _targets),
        ("a step is committed from exactly its packed micro-steps, each merged once", _merged),
        ("a finished execution has all its turns", _turns),
        ("checkpoints are complete", _checkpoints),
    ]
    rules = []
    for name, check in checks:
        cases = list(check(opened))
        rules.append(Rule(rule=name, cases=len(cases), breaches=[breach for _, breach in cases if breach]))
    return rules


def _consumed(opened: OpenRun) -> Iterator[tuple[str, str]]:
    count = Counter(c.group for step in opened.state.steps.values() for c in step.consumed)
    for group, times in count.items():
        yield group, "" if times == 1 else f"{group} is consumed {times} times"


def _tokens(opened: OpenRun) -> Iterator[tuple[str, str]]:
    for number, step in opened.state.steps.items():
        packed = step.packed
        if packed is not None:
            accounted = packed.tokens_trained + sum(packed.tokens_dropped.values())
            equal = packed.tokens_sampled == accounted
            yield (
                str(number),
                "" if equal else f"step {number}: {packed.tokens_sampled} sampled, {accounted} accounted for",
            )


def _files(opened: OpenRun) -> Iterator[tuple[str, str]]:
    for step in opened.state.steps.values():
        for name, ready in step.microsteps.items():
            try:
                _, digest = read_microstep(opened.run.microsteps / f"{name}.arrow")
            except (UserError, OSError) as error:
                yield name, str(error)
                continue
            yield name, "" if digest == ready.digest else f"{name}: digest {digest}, announced {ready.digest}"


def _targets(opened: OpenRun) -> Iterator[tuple[str, str]]:
    seen: set[tuple[str, int, int, int]] = set()
    for step in opened.state.steps.values():
        for name in step.packed.microsteps if step.packed is not None else []:
            try:
                microstep, _ = read_microstep(opened.run.microsteps / f"{name}.arrow")
            except (UserError, OSError):
                continue  # the rule before this one says so
            for sample, turn, offset in zip(
                microstep.target_samples.tolist(), microstep.target_turns.tolist(), microstep.target_offsets.tolist()
            ):
                key = (microstep.executions[sample], int(microstep.attempts[sample]), turn, offset)
                yield name, f"{name}: {key} is a target twice" if key in seen else ""
                seen.add(key)


def _merged(opened: OpenRun) -> Iterator[tuple[str, str]]:
    state = opened.state
    for step, (lineage, _) in state.history().items():
        packed = state.steps[step].packed
        if packed is None:
            yield str(step), f"step {step} is committed and was never packed"
            continue
        count = Counter(merged_microsteps(state, lineage, step))
        twice = [name for name, times in count.items() if times > 1]
        if twice:
            yield str(step), f"step {step}: {twice[0]} is merged {count[twice[0]]} times"
        else:
            yield str(step), "" if set(count) == set(packed.microsteps) else f"step {step}: merged is not packed"


def merged_microsteps(state: RunState, lineage: int, step: int) -> list[str]:
    """What went into the core's buffer for `step`, with repetitions if there were any."""
    reign = state.lineages[lineage]
    core = state.cells.get(reign.cell, {}).get(reign.incarnation, CellIncarnation())
    own = [m for d in core.done.values() if (d.lineage, d.step) == (lineage, step) for m in d.microsteps]
    return own + [m for merged in reign.merged if merged.step == step for m in merged.microsteps]


def _turns(opened: OpenRun) -> Iterator[tuple[str, str]]:
    rows = []
    for worker in opened.job.workers:
        rows += TurnReader(opened.run, worker).read_all()
    count = Counter((turn.execution, turn.attempt) for turn in latest_rows(rows))
    for name, execution in opened.state.executions.items():
        outcome = execution.outcome()
        if outcome is not None:
            found = count[name, outcome.attempt]
            yield name, "" if found >= outcome.turns else f"{name}: {found} turns in shards, {outcome.turns} journalled"


def _checkpoints(opened: OpenRun) -> Iterator[tuple[str, str]]:
    from gyre.ledger.checkpoints import verify

    for path in sorted(opened.run.checkpoints.glob("step-*.zarr")):
        problems = verify(path)
        yield path.name, problems[0] if problems else ""
