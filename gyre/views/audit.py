"""`gyre verify`: an audit of a run's ledger.

Owns the list of what must hold, and the rules about what the journals say. Invariant: it reads files and journals only,
and says of each rule how many cases it looked at and which ones break it; what is wrong first comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from msgspec import Struct

from gyre.ledger.state import CellIncarnation, RunState
from gyre.views import audit_files as files
from gyre.views.runs import OpenRun


class Rule(Struct, frozen=True, kw_only=True):
    """What must hold, how many cases were looked at, and the breaches (empty when it holds)."""

    rule: str
    cases: int
    breaches: list[str]


def audit(opened: OpenRun) -> list[Rule]:
    """Every rule, in the order from journals to checkpoints. With a damaged journal, that one only: the others would
    judge by a part of the facts."""
    audited = files.Audited(opened.run, opened.recipe, opened.job, opened.view)
    checks: list[tuple[str, Callable[[files.Audited], Iterator[tuple[str, str]]]]] = [
        ("journals are whole", files.journals),
        ("what one process says of another's work is there", _said),
        ("a run that ended as finished has done everything", _finished),
        ("each group is consumed at most once", _consumed),
        ("every sampled token of a packed step is trained or dropped", _tokens),
        ("shards are whole, and a finished execution has all its turns", files.shards),
        ("micro-step files are whole and are what was announced", files.microsteps),
        ("micro-steps follow from the shards", files.packing),
        ("no sampled token is a target twice", _targets),
        ("a step is committed from exactly its packed micro-steps, each merged once", _merged),
        ("checkpoints are whole, and of the steps that stand", files.kept_checkpoints),
    ]
    if "routing" in opened.recipe.trajectory.record:
        checks.append(("recorded experts are of their turns' positions and of the model", files.routing))
    rules: list[Rule] = []
    for name, check in checks:
        cases = list(check(audited))
        rules.append(Rule(rule=name, cases=len(cases), breaches=[breach for _, breach in cases if breach]))
        if rules[0].breaches:
            break
    return rules


def _said(opened: OpenRun) -> Iterator[tuple[str, str]]:
    """A journal that lost its last lines is whole by itself; what others say gives it away."""
    state = opened.state
    for number, step in state.steps.items():
        granted = {name for grant in step.grants for name in grant.microsteps}
        unknown = sorted((granted | set(step.packed.microsteps if step.packed else [])) - step.microsteps.keys())
        yield str(number), f"{unknown[0]} was granted or packed, and never announced" if unknown else ""
    for lineage in state.lineages.values():
        for merged in lineage.merged:
            source = state.cells.get(merged.source, {}).get(merged.source_incarnation, CellIncarnation())
            name = f"contribution {merged.number} of {merged.source}.{merged.source_incarnation}"
            yield name, "" if merged.number in source.offers else f"{name} was merged, and never offered"


def _finished(opened: OpenRun) -> Iterator[tuple[str, str]]:
    state, steps = opened.state, opened.recipe.train.steps
    if state.ended is None or state.ended.state != "finished":
        return
    for name in sorted(state.open):
        yield name, f"{name} is open"
    last = max((lineage.step() for lineage in state.lineages.values()), default=0)
    yield "steps", "" if last >= steps else f"step {last} is the last that was committed, of {steps}"


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


def _targets(opened: files.Audited) -> Iterator[tuple[str, str]]:
    seen: set[files.Target] = set()
    for step in opened.state.steps.values():
        for name in step.packed.microsteps if step.packed is not None else []:
            # one that was never announced, or cannot be read, is a breach of a rule before this one
            for target in opened.microsteps[name].targets if name in opened.microsteps else []:
                yield name, f"{name}: {target} is a target twice" if target in seen else ""
                seen.add(target)


def _merged(opened: OpenRun) -> Iterator[tuple[str, str]]:
    state = opened.state
    for step, (lineage, _) in state.history().items():
        packed = state.steps[step].packed if step in state.steps else None
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
