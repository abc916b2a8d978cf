"""`gyre show` as text: the list of executions, the tree of one, the text of one turn.

Invariant: everything here is laid out from the rows of `show.py`; nothing is read or computed.
"""

from __future__ import annotations

from itertools import groupby

from gyre.views.fates import Fate
from gyre.views.show import ExecutionRow, ExecutionView, TurnRow


def list_text(rows: list[ExecutionRow]) -> str:
    lines = [
        f"{'execution':<14}{'task':<28}{'outcome':<10}{'reward':>7}{'turns':>6}{'tokens':>8}{'seconds':>9}{'step':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row.execution:<14}{row.task[:27]:<28}{row.outcome:<10}{_reward(row):>7}{row.turns:>6}"
            f"{row.tokens_sampled:>8}{row.seconds:>9.1f}{row.step or '-':>6}"
        )
    differ = sum(row.transcript is not None and not row.transcript.equal for row in rows)
    if differ:
        lines.append(f"{differ} of them: the harness's own transcript counts otherwise than the ledger")
    return "\n".join(lines)


def tree_text(view: ExecutionView) -> str:
    """Threads, turns, roles with their evidence, tokens; then which paths were selected."""
    lines = _head(view)
    for attempt, turns in groupby(view.turns, key=lambda turn: turn.attempt):
        lines += ["", f"attempt {attempt}"]
        of_attempt = list(turns)
        for thread in dict.fromkeys(turn.thread for turn in of_attempt):
            lines += _thread(thread, [turn for turn in of_attempt if turn.thread == thread])
    if view.paths:
        lines += ["", "selected paths"]
    for number, path in enumerate(view.paths, 1):
        lines.append(
            f"  {number}: step {path.step}, turns {numbers_text(path.turns)}: {path.targets} targets, "
            f"advantage {path.advantage:+.3f}, weight {path.weight:.3f} ({path.microstep})"
        )
    return "\n".join(lines)


def turn_text(view: ExecutionView) -> str:
    """One turn, of each attempt that has it: its new context, and its output by what became of it."""
    lines = _head(view)
    for turn in view.turns:
        versions = ", ".join(f"{length} by {lineage}.{version}" for lineage, version, length in turn.versions)
        lines += [
            "",
            f"--- attempt {turn.attempt} turn {turn.turn} (after {_after(turn)}) {turn.thread}: {turn.role}, "
            f"{turn.status}, {turn.finish}; {turn.context_tokens} context + {turn.output_tokens} sampled ({versions}) "
            f"on {turn.cell}, {turn.cached_tokens} cached, {turn.seconds:.2f} s, "
            f"mean log-probability {turn.mean_logprob:.3f}",
        ]
        if turn.evidence:
            lines.append(f"--- because: {turn.evidence}")
        lines.append(turn.context)
        for fate, piece in zip(turn.fates, turn.pieces, strict=True):
            lines += [f">>> {_fate(fate)} [{fate.start}:{fate.stop}]", piece]
    return "\n".join(lines)


def numbers_text(numbers: list[int]) -> str:
    """Ascending numbers as runs: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _head(view: ExecutionView) -> list[str]:
    row = view.execution
    step = f"  step {row.step}" if row.step else ""
    lines = [
        f"{row.execution}  task {row.task}  {row.outcome} ({row.reason})  reward {_reward(row)}  "
        f"{row.turns} turns  {row.tokens_sampled} tokens  {row.seconds:.1f} s{step}"
    ]
    if view.phases:
        lines.append("  ".join(f"{name} {seconds:.2f} s" for name, seconds in view.phases.items()))
    for end in row.steps:
        earned = "-" if end.reward is None else f"{end.reward:.2f}"
        lines.append(f"step {end.name}: reward {earned}  {end.reason}  {end.model_calls} calls  {end.seconds:.1f} s")
    if row.transcript is not None:
        told = row.transcript
        verdict = "as here" if told.equal else f"but here {told.turns} turns, {told.sampled} tokens"
        lines.append(f"the harness's own transcript: {told.calls} calls, {told.tokens} tokens, {verdict}")
    counts = [f"{view.trained} trained", *(f"{count} {reason}" for reason, count in sorted(view.dropped.items()))]
    lines.append(f"{view.trained + sum(view.dropped.values())} tokens sampled = {' + '.join(counts)}")
    return lines


def _thread(name: str, turns: list[TurnRow]) -> list[str]:
    lines = [f"  thread {name}"]
    lines.append(f"  {'turn':>6} {'after':>10} {'context':>8} {'sampled':>8} {'trained':>8}  role")
    why = ""
    for turn in turns:
        versions = " ".join(f"{lineage}.{version}" for lineage, version, _ in turn.versions)
        notes = [versions, turn.cell]
        if turn.status != "committed":
            notes.append(turn.status)
        if turn.finish != "stop":
            notes.append(turn.finish)
        notes += sorted({fate.reason for fate in turn.fates if fate.reason})
        if turn.evidence != why:
            why = turn.evidence
            notes.append(f"({why})" if why else "")
        lines.append(
            f"  {turn.turn:>6} {_after(turn):>10} {turn.context_tokens:>8} {turn.output_tokens:>8} "
            f"{turn.trained_tokens:>8}  {turn.role:<18} {'  '.join(note for note in dict.fromkeys(notes) if note)}"
        )
    return lines


def _after(turn: TurnRow) -> str:
    """The parent, and how much of its sequence is kept where that is not all."""
    if turn.parent < 0:
        return "-"
    return f"{turn.parent}[:{turn.keep}]" if turn.forks else str(turn.parent)


def _fate(fate: Fate) -> str:
    return f"trained in step {fate.step}, path {fate.path + 1}" if fate.step else f"not trained: {fate.reason}"


def _reward(row: ExecutionRow) -> str:
    return "-" if row.reward is None else f"{row.reward:.2f}"
