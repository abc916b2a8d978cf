"""Executions for people: what was asked, what the model answered, what was graded, and what was trained of it.

Invariant: text is decoded from the recorded tokens, never taken from anywhere else: what is shown is what is trained.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.events import StepEnd, TranscriptCount
from gyre.ledger.state import Execution, RunState
from gyre.ledger.turns import Turn
from gyre.views.fates import Fate, PathRow, fates_of
from gyre.views.runs import OpenRun


class ExecutionRow(Struct, frozen=True, kw_only=True):
    execution: str
    task: str
    purpose: str
    outcome: str
    reason: str
    reward: float | None
    attempts: int
    turns: int
    tokens_sampled: int
    seconds: float
    steps: list[StepEnd]
    """Of a task of several steps, those that ran."""
    transcript: TranscriptCount | None
    """What the harness's own transcript counts, beside the ledger."""
    step: int
    """The step that consumed its group; 0: none yet."""


class TurnRow(Struct, frozen=True, kw_only=True):
    attempt: int
    turn: int
    parent: int
    keep: int
    """Tokens of the parent's whole sequence that it keeps; `forks` when that is not all of it."""
    forks: bool
    thread: str
    role: str
    evidence: str
    """What of the call decided its role and thread."""
    status: str
    finish: str
    cell: str
    versions: list[tuple[int, int, int]]
    """(lineage, version, length) over the output"""
    cached_tokens: int
    seconds: float
    context_tokens: int
    output_tokens: int
    mean_logprob: float
    trained_tokens: int
    context: str
    output: str
    fates: list[Fate]
    """What became of the output's tokens, in order."""
    pieces: list[str]
    """The output's text, cut where the fates are."""


class ExecutionView(Struct, frozen=True, kw_only=True):
    execution: ExecutionRow
    phases: dict[str, float]
    paths: list[PathRow]
    """The selected paths, in the order of the draws."""
    trained: int
    dropped: dict[str, int]
    """Sampled tokens of all attempts that are not trained, by reason."""
    turns: list[TurnRow]


def _row(state: RunState, name: str, execution: Execution) -> ExecutionRow:
    finished = [a.finished for a in execution.attempts.values() if a.finished is not None]
    last = execution.outcome() or (finished[-1] if finished else None)
    outcome = "excluded" if execution.excluded else last.outcome if last is not None else "open"
    return ExecutionRow(
        execution=name,
        task=execution.task,
        purpose=execution.purpose,
        outcome=outcome,
        reason=execution.excluded or (last.reason if last is not None else ""),
        reward=last.reward if last is not None else None,
        attempts=len(execution.attempts),
        turns=last.turns if last is not None else 0,
        tokens_sampled=last.tokens_sampled if last is not None else 0,
        seconds=last.seconds if last is not None else 0.0,
        steps=last.steps if last is not None else [],
        transcript=last.transcript if last is not None else None,
        step=state.consumed.get(execution.group, 0),
    )


def list_executions(state: RunState, limit: int) -> list[ExecutionRow]:
    """In the order of dispatch; the newest `limit`, or all for 0."""
    names = sorted(state.executions, key=lambda n: (state.groups[state.executions[n].group].order, n))
    return [_row(state, name, state.executions[name]) for name in (names[-limit:] if limit else names)]


def find_execution(opened: OpenRun, name: str, turn: int = -1) -> ExecutionView:
    """An execution with its turns (or one of them), decoded. Raises UserError for a name that the run lacks."""
    state = opened.state
    execution = state.executions.get(name)
    if execution is None:
        known = list(state.executions)
        hint = f"; the first is {known[0]}" if known else ": it has none yet"
        raise UserError(f"{opened.run.name} has no execution {name!r}{hint}")
    rows = recorded_turns(opened, name)
    wanted = [row for row in rows if turn < 0 or row.turn == turn]
    if turn >= 0 and not wanted:
        raise UserError(f"{name} has no turn {turn}")
    outcome = execution.outcome()
    fates = fates_of(opened, name, rows)
    return ExecutionView(
        execution=_row(state, name, execution),
        phases=outcome.phases if outcome else {},
        paths=fates.paths,
        trained=fates.trained(),
        dropped=fates.dropped(),
        turns=_decoded(Path(opened.job.model), wanted, rows, fates.turns),
    )


def recorded_turns(opened: OpenRun, name: str) -> list[Turn]:
    """The rows that count of execution `name`, by attempt and turn."""
    from gyre.ledger.shards import TurnReader
    from gyre.ledger.turns_merge import latest_rows

    workers = {attempt.worker for attempt in opened.state.executions[name].attempts.values()}
    found = [turn for w in sorted(workers - {""}) for turn in TurnReader(opened.run, w).read_execution(name)]
    return latest_rows(found)


def _decoded(
    model: Path, wanted: list[Turn], rows: list[Turn], fates: dict[tuple[int, int], list[Fate]]
) -> list[TurnRow]:
    from tokenizers import Tokenizer

    from gyre.ledger.turns_merge import whole_length

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    lengths = {(row.attempt, row.turn): whole_length(row) for row in rows}
    return [
        TurnRow(
            attempt=turn.attempt,
            turn=turn.turn,
            parent=turn.parent,
            keep=turn.keep,
            forks=turn.parent >= 0 and turn.keep < lengths[turn.attempt, turn.parent],
            thread=turn.thread,
            role=turn.role,
            evidence=_why(turn.evidence),
            status=turn.status,
            finish=turn.finish,
            cell=turn.cell,
            versions=[(span.lineage, span.version, span.length) for span in turn.spans],
            cached_tokens=turn.cached_tokens,
            seconds=turn.finished - turn.started,
            context_tokens=len(turn.context),
            output_tokens=len(turn.output),
            mean_logprob=sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else 0.0,
            trained_tokens=sum(f.stop - f.start for f in fates[turn.attempt, turn.turn] if f.step),
            context=text(turn.context),
            output=text(turn.output),
            fates=fates[turn.attempt, turn.turn],
            pieces=[text(turn.output[f.start : f.stop]) for f in fates[turn.attempt, turn.turn]],
        )
        for turn in wanted
    ]


def _why(evidence: str) -> str:
    return str(json.loads(evidence).get("role", "")) if evidence else ""
