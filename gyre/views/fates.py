"""What became of each sampled token of an execution: trained, by which step, or dropped, and why.

Invariants: a token counts as trained exactly when a micro-step file of the step that consumed its group has it as a
target; every other token has the one reason that the step's account gives it; the fates of a turn cover its output
without gap or overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

from msgspec import Struct

from gyre.ledger.microstep_files import read_microstep
from gyre.ledger.state import Execution, RunState
from gyre.ledger.turns import Turn
from gyre.processes.processor import consumed_group
from gyre.trajectory.settings import Settings
from gyre.trajectory.steps import judge
from gyre.trajectory.targets import possible_targets, whole_turn_reason
from gyre.trajectory.tree import Tree
from gyre.views.runs import OpenRun

PENDING = "pending"
"""The reason of tokens whose group is not packed yet."""


class Fate(Struct, frozen=True, kw_only=True):
    """Offsets start <= offset < stop of a turn's output. `step` trains them, as part of path `path`; else both are 0
    and -1, and `reason` says why not.
    """

    start: int
    stop: int
    step: int = 0
    path: int = -1
    reason: str = ""


class PathRow(Struct, frozen=True, kw_only=True):
    """A selected path: what it trains. `turns` are those that hold its targets, root first."""

    step: int
    attempt: int
    microstep: str
    turns: list[int]
    targets: int
    advantage: float
    weight: float


class Fates(Struct, frozen=True, kw_only=True):
    """`paths` in the order of the draws; `turns` maps (attempt, turn) to its fates, in order."""

    paths: list[PathRow]
    turns: dict[tuple[int, int], list[Fate]]

    def trained(self) -> int:
        return sum(path.targets for path in self.paths)

    def dropped(self) -> dict[str, int]:
        """Sampled tokens that are not trained, by reason."""
        counts: dict[str, int] = defaultdict(int)
        for fate in (fate for fates in self.turns.values() for fate in fates):
            if not fate.step:
                counts[fate.reason] += fate.stop - fate.start
        return dict(counts)


def fates_of(opened: OpenRun, name: str, rows: list[Turn]) -> Fates:
    """The fates of all turns of execution `name`; `rows` are those that count, of all its attempts.

    Raises UserError for a damaged micro-step file, `TrajectoryError` for turns that contradict each other.
    """
    state, settings = opened.state, Settings.from_recipe(opened.recipe)
    execution = state.executions[name]
    paths, targets = _trained(opened, name)
    whole = _verdict(state, settings, name, execution)
    outcome = execution.outcome()
    counting = outcome.attempt if outcome is not None else max(execution.attempts, default=1)
    turns: dict[tuple[int, int], list[Fate]] = {}
    for attempt, of_attempt in groupby(rows, key=lambda row: row.attempt):
        tree = Tree(name, attempt, of_attempt)
        reason = whole if attempt == counting or whole in ("evaluation", PENDING) else "aborted_attempt"
        for number, reasons in _reasons(tree, settings, reason).items():
            trained = targets.get((attempt, number), {})
            marks = [(trained.get(offset, -1), reasons[offset]) for offset in range(len(reasons))]
            turns[attempt, number] = _runs(marks, paths)
    return Fates(paths=paths, turns=turns)


def _trained(opened: OpenRun, name: str) -> tuple[list[PathRow], dict[tuple[int, int], dict[int, int]]]:
    """The selected paths, and (attempt, turn) -> offset -> index of its path, from the micro-step files."""
    state = opened.state
    step = state.consumed.get(state.executions[name].group, 0)
    paths: list[PathRow] = []
    targets: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for microstep in _announced(state, step):
        made, _ = read_microstep(opened.run.microsteps / f"{microstep}.arrow")
        for sample, owner in enumerate(made.executions):
            if owner != name:
                continue
            mine = made.target_samples == sample
            attempt, turns = int(made.attempts[sample]), made.target_turns[mine].tolist()
            for turn, offset in zip(turns, made.target_offsets[mine].tolist(), strict=True):
                targets[attempt, turn][offset] = len(paths)
            paths.append(
                PathRow(
                    step=step,
                    attempt=attempt,
                    microstep=microstep,
                    turns=list(dict.fromkeys(turns)),
                    targets=len(turns),
                    advantage=float(made.advantages[sample]),
                    weight=float(made.weights[sample]),
                )
            )
    return paths, targets


def _announced(state: RunState, step: int) -> Iterable[str]:
    found = state.steps.get(step)
    if found is None:
        return ()
    return found.packed.microsteps if found.packed is not None else found.microsteps


def _verdict(state: RunState, settings: Settings, name: str, execution: Execution) -> str:
    """Why nothing of the execution is trained; "" where that is decided token by token."""
    if execution.purpose == "eval":
        return "evaluation"
    step = state.steps.get(state.consumed.get(execution.group, 0))
    if step is None or step.packed is None:
        return PENDING
    (consumed,) = [entry for entry in step.consumed if entry.group == execution.group]
    verdict = judge(settings, consumed_group(state, consumed, lambda _: []))[name]
    return verdict if isinstance(verdict, str) else ""


def _reasons(tree: Tree, settings: Settings, whole: str) -> dict[int, list[str]]:
    """For every turn the reason of each of its sampled tokens, were it not trained."""
    if whole:
        return {number: [whole] * node.sampled for number, node in tree.nodes.items()}
    targets, _ = possible_targets(tree, settings.tokens_per_microstep)
    reasons: dict[int, list[str]] = {}
    for number, node in tree.nodes.items():
        reason = whole_turn_reason(node)
        if reason is not None:
            reasons[number] = [reason] * node.sampled
            continue
        first = min(node.sampled, 1 if node.output_start == 0 else 0)
        stop = targets[number].stop if number in targets else first
        reasons[number] = (
            ["orphaned"] * first + ["not_selected"] * (stop - first) + ["too_long"] * (node.sampled - stop)
        )
    return reasons


def _runs(marks: list[tuple[int, str]], paths: list[PathRow]) -> list[Fate]:
    """(index of a path or -1, reason) per offset -> runs."""
    fates: list[Fate] = []
    at = 0
    for (path, reason), run in groupby(marks, key=lambda mark: (mark[0], "" if mark[0] >= 0 else mark[1])):
        stop = at + sum(1 for _ in run)
        step = paths[path].step if path >= 0 else 0
        fates.append(Fate(start=at, stop=stop, step=step, path=path, reason=reason))
        at = stop
    return fates
