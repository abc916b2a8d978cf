"""`gyre export --format atif`: recorded executions as ATIF documents.

Owns how a token tree becomes documents: each leaf of the main thread is one document, the later ones continue the one
before; leaves of other threads (sub-agents, summaries, side calls) are embedded where their caller is. Invariant: over
all documents of an attempt, each turn is exactly one step that is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from gyre import __version__
from gyre.errors import UserError
from gyre.ledger.turns import Turn
from gyre.proxy.conversation import ToolCall
from gyre.proxy.seen import Seen
from gyre.proxy.template import load
from gyre.trajectory.tree import Tree
from gyre.views import atif
from gyre.views.atif_steps import Pieces, StepWriter, call_id
from gyre.views.fates import Fate, fates_of
from gyre.views.runs import OpenRun
from gyre.views.show import list_executions, recorded_turns

MAIN = "main"
_NOTES = (
    f"Written by gyre {__version__} from recorded tokens: messages are decoded, token ids and logprobs are as sampled. "
    "metrics.extra: prompt = the first `keep` tokens of the whole sequence of turn `parent`, then context_token_ids; "
    "step.extra.fates: [start, stop, optimizer step that trained these offsets or 0, reason]."
)


def export_executions(opened: OpenRun, to: Path, only: str = "", prompt_ids: bool = False) -> tuple[int, int]:
    """Write all executions, or `only` one, into the new folder `to`. Returns (documents, executions).

    Raises UserError when the folder exists, or for an execution that the run lacks or that has no turn.
    """
    if to.exists():
        raise UserError(f"--to {to} exists already: name another folder")
    if only and only not in opened.state.executions:
        raise UserError(f"{opened.run.name} has no execution {only!r}: see gyre show {opened.run.name}")
    writer = Documents(opened, prompt_ids)
    names = [only] if only else [row.execution for row in list_executions(opened.state, 0)]
    to.mkdir(parents=True)
    written = executions = 0
    for name in names:
        documents = writer.of_execution(name)
        for file, document in documents.items():
            (to / file).write_bytes(msgspec.json.encode(document) + b"\n")
        written, executions = written + len(documents), executions + bool(documents)
    if only and not written:
        raise UserError(f"{only} has no recorded turn yet")
    return written, executions


class Documents:
    """Makes the documents of one run."""

    def __init__(self, opened: OpenRun, prompt_ids: bool = False) -> None:
        recipe = opened.recipe
        self._opened, self._prompt_ids = opened, prompt_ids
        self._pieces = Pieces(load(opened.job.model, recipe.model.template))
        shell = opened.job.code if recipe.harness.name == "shell" else "not pinned"
        self._agent = atif.Agent(
            name=recipe.harness.name, version=recipe.harness.version or shell, model_name=Path(opened.job.model).name
        )

    def of_execution(self, name: str) -> dict[str, atif.Trajectory]:
        """File name -> document, for all attempts that have turns."""
        rows = recorded_turns(self._opened, name)
        fates = fates_of(self._opened, name, rows)
        made: dict[str, atif.Trajectory] = {}
        for attempt, turns in groupby(rows, key=lambda row: row.attempt):
            of_turns = {turn: found for (number, turn), found in fates.turns.items() if number == attempt}
            facts = self._facts(name, attempt)
            facts["paths"] = [msgspec.to_builtins(path) for path in fates.paths if path.attempt == attempt]
            made |= self._of_attempt(Tree(name, attempt, turns), of_turns, facts)
        return made

    def _facts(self, name: str, attempt: int) -> dict[str, Any]:
        state = self._opened.state
        execution = state.executions[name]
        ended = execution.attempts[attempt].finished if attempt in execution.attempts else None
        outcome = execution.outcome()
        facts = {"run": self._opened.run.name, "execution": name, "attempt": attempt, "group": execution.group}
        facts |= {"task": execution.task, "purpose": execution.purpose, "step": state.consumed.get(execution.group, 0)}
        facts["counts"] = outcome is not None and outcome.attempt == attempt
        if ended is not None:
            facts |= {"outcome": ended.outcome, "reason": ended.reason, "reward": ended.reward}
        return facts

    def _of_attempt(
        self, tree: Tree, fates: dict[int, list[Fate]], facts: dict[str, Any]
    ) -> dict[str, atif.Trajectory]:
        stem = f"{tree.execution}.{tree.attempt}"
        callers = self._callers(tree)
        done: set[int] = set()
        roots: list[atif.Trajectory] = []
        others: list[tuple[int, str, atif.Trajectory]] = []
        count: dict[str, int] = {}
        threads = [tree.nodes[tip].turn.thread for tip in tree.tips]
        main = MAIN if MAIN in threads else threads[0]
        for tip in tree.tips:
            new = {number for number, end in tree.path(tip) if end == tree.nodes[number].length} - done
            if not new:
                continue
            thread = tree.nodes[tip].turn.thread
            count[thread] = count.get(thread, 0) + 1
            named = thread if count[thread] == 1 else f"{thread}.{count[thread]}"
            document = self._document(tree, tip, done, fates, f"{stem}/{named}")
            document.extra["gyre"] = {"thread": thread}
            done |= new
            if thread == main:
                document.extra["gyre"] |= facts
                roots.append(document)
            else:
                others.append((min(new), thread, document))
        if not roots and others:
            roots.append(others.pop(0)[2])
        for first, thread, document in others:
            _embed(roots, document, first, callers.get(thread, ""))
        files = [f"{stem}.json", *(f"{stem}.cont-{number}.json" for number in range(1, len(roots)))]
        for document, following in zip(roots, files[1:], strict=False):
            document.continued_trajectory_ref = following
        return dict(zip(files, roots, strict=False))

    def _document(
        self, tree: Tree, tip: int, done: set[int], fates: dict[int, list[Fate]], name: str
    ) -> atif.Trajectory:
        steps = StepWriter(self._pieces, tree, fates, self._prompt_ids).write(tip, done)
        metrics = [step.metrics for step in steps if step.metrics is not None]
        return atif.Trajectory(
            schema_version=atif.VERSION,
            session_id=f"{self._opened.run.name}/{tree.execution}.{tree.attempt}",
            trajectory_id=name,
            agent=self._agent,
            steps=steps,
            notes=_NOTES,
            final_metrics=atif.FinalMetrics(
                total_prompt_tokens=sum(m.prompt_tokens for m in metrics),
                total_completion_tokens=sum(m.completion_tokens for m in metrics),
                total_cached_tokens=sum(m.cached_tokens for m in metrics),
                total_steps=len(steps),
            ),
        )

    def _callers(self, tree: Tree) -> dict[str, str]:
        """Thread -> the tool call whose prompt is one of its first texts, as the proxy finds it."""
        seen, callers = Seen(), {}
        renderer = self._pieces.renderer
        for number, node in tree.nodes.items():
            turn: Turn = node.turn
            if turn.thread != MAIN and turn.thread not in callers:
                text = renderer.decode(tree.whole(number, node.output_start).tolist())
                callers[turn.thread] = seen.caller(body for role, body in self._pieces.read(text) if role == "user")
            calls = renderer.parse(turn.output).calls
            seen.note_calls(ToolCall(call_id(number, i), call.name, call.arguments) for i, call in enumerate(calls))
        return callers


def _steps_with_calls(document: atif.Trajectory) -> Iterator[atif.Step]:
    for step in document.steps:
        if step.tool_calls is not None and not step.is_copied_context:
            yield step


def _embed(roots: list[atif.Trajectory], document: atif.Trajectory, first: int, caller: str) -> None:
    """Put `document` into the root that has its caller, with a reference at the call; else into the root that was going
    on when its turn `first` was sampled.
    """
    for root in roots:
        for step in _steps_with_calls(root):
            if caller in [call.tool_call_id for call in step.tool_calls or []]:
                reference = atif.SubagentRef(trajectory_id=document.trajectory_id)
                _refer(step, caller, reference)
                root.subagent_trajectories = [*(root.subagent_trajectories or []), document]
                return
    earlier = [root for root in roots if any((s.extra or {}).get("turn", first) < first for s in root.steps)]
    home = earlier[-1] if earlier else roots[0]
    home.subagent_trajectories = [*(home.subagent_trajectories or []), document]


def _refer(step: atif.Step, caller: str, reference: atif.SubagentRef) -> None:
    """At the call's own result where it is known, else at a result of its own."""
    results = step.observation.results if step.observation is not None else []
    for result in results:
        if result.source_call_id == caller:
            result.subagent_trajectory_ref = [*(result.subagent_trajectory_ref or []), reference]
            return
    own = atif.Result(source_call_id=caller, subagent_trajectory_ref=[reference])
    step.observation = atif.Observation(results=[*results, own])
