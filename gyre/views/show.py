"""Executions for people: what was asked, what the model answered, what was graded.

Invariant: text is decoded from the recorded tokens, never taken from anywhere else: what is shown is what is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.state import Execution, RunState
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
    step: int
    """The step that consumed its group; 0: none yet."""


class TurnRow(Struct, frozen=True, kw_only=True):
    attempt: int
    turn: int
    parent: int
    thread: str
    role: str
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
    context: str
    output: str


class ExecutionView(Struct, frozen=True, kw_only=True):
    execution: ExecutionRow
    phases: dict[str, float]
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
    turns = [row for row in _turns(opened, name) if turn < 0 or row.turn == turn]
    if turn >= 0 and not turns:
        raise UserError(f"{name} has no turn {turn}")
    outcome = execution.outcome()
    return ExecutionView(execution=_row(state, name, execution), phases=outcome.phases if outcome else {}, turns=turns)


def _turns(opened: OpenRun, name: str) -> list[TurnRow]:
    from tokenizers import Tokenizer

    from gyre.ledger.shards import TurnReader
    from gyre.ledger.turns_merge import latest_rows

    tokenizer = Tokenizer.from_file(str(Path(opened.job.model) / "tokenizer.json"))
    rows = []
    for worker in opened.job.workers:
        found = [turn for turn in TurnReader(opened.run, worker).read_all() if turn.execution == name]
        for turn in latest_rows(found):
            rows.append(
                TurnRow(
                    attempt=turn.attempt,
                    turn=turn.turn,
                    parent=turn.parent,
                    thread=turn.thread,
                    role=turn.role,
                    status=turn.status,
                    finish=turn.finish,
                    cell=turn.cell,
                    versions=[(span.lineage, span.version, span.length) for span in turn.spans],
                    cached_tokens=turn.cached_tokens,
                    seconds=turn.finished - turn.started,
                    context_tokens=len(turn.context),
                    output_tokens=len(turn.output),
                    mean_logprob=sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else 0.0,
                    context=tokenizer.decode(turn.context, skip_special_tokens=False),
                    output=tokenizer.decode(turn.output, skip_special_tokens=False),
                )
            )
    return sorted(rows, key=lambda row: (row.attempt, row.turn))


def list_text(rows: list[ExecutionRow]) -> str:
    lines = [
        f"{'execution':<14}{'task':<28}{'outcome':<10}{'reward':>7}{'turns':>6}{'tokens':>8}{'seconds':>9}{'step':>6}"
    ]
    for row in rows:
        reward = "-" if row.reward is None else f"{row.reward:.2f}"
        lines.append(
            f"{row.execution:<14}{row.task[:27]:<28}{row.outcome:<10}{reward:>7}{row.turns:>6}"
            f"{row.tokens_sampled:>8}{row.seconds:>9.1f}{row.step or '-':>6}"
        )
    return "\n".join(lines)


def execution_text(view: Any) -> str:
    row = view.execution
    reward = "-" if row.reward is None else f"{row.reward:.2f}"
    lines = [
        f"{row.execution}  task {row.task}  {row.outcome} ({row.reason})  reward {reward}  "
        f"{row.turns} turns  {row.tokens_sampled} tokens  {row.seconds:.1f} s"
    ]
    if view.phases:
        lines.append("  ".join(f"{name} {seconds:.2f} s" for name, seconds in view.phases.items()))
    for turn in view.turns:
        versions = ", ".join(f"{length} by {lineage}.{version}" for lineage, version, length in turn.versions)
        lines += [
            "",
            f"--- attempt {turn.attempt} turn {turn.turn} (after {turn.parent}) {turn.role}, {turn.status}, "
            f"{turn.finish}: {turn.context_tokens} context + {turn.output_tokens} sampled ({versions}) on {turn.cell}, "
            f"{turn.cached_tokens} cached, {turn.seconds:.2f} s, mean log-probability {turn.mean_logprob:.3f}",
            turn.context,
            f">>> {turn.output}",
        ]
    return "\n".join(lines)
