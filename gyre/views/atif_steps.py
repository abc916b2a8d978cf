"""From a path of recorded tokens to the steps of an ATIF document.

Invariants: messages are read from the recorded tokens by the model's template family; a turn's whole output is one
agent step with exactly its recorded ids; a turn that an earlier document has is marked as copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

from gyre.ledger.turns import Turn
from gyre.proxy.parser import Parsed
from gyre.proxy.template import Renderer
from gyre.trajectory.tree import Tree
from gyre.views import atif
from gyre.views.fates import Fate

_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_TOOL_ROLES = ("tool", "ipython")


class Pieces:
    """Takes template text apart."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        opening, closing = renderer.rules.header.split("assistant")
        end = re.escape(renderer.rules.end_of_turn)
        self._message = re.compile(
            rf"{re.escape(opening)}(\w+){re.escape(closing)}(.*?)(?={end}|{re.escape(opening)}|\Z)", re.DOTALL
        )

    def read(self, text: str) -> Iterator[tuple[str, str]]:
        """(role, text) of each message; results of tools have the role "tool"."""
        for found in self._message.finditer(text):
            role, body = found[1], found[2]
            results = _RESPONSE.findall(body) if role == "user" else []
            for result in results:
                yield "tool", result
            rest = _RESPONSE.sub("", body).strip() if results else body
            if rest or not results:
                yield ("tool" if role in _TOOL_ROLES else role), rest


def call_id(turn: int, index: int) -> str:
    """Our name of a turn's tool call: the one that the harness saw is not in the ledger."""
    return f"call_{turn}_{index}"


class StepWriter:
    """The steps of one document, along one path."""

    def __init__(self, pieces: Pieces, tree: Tree, fates: dict[int, list[Fate]], prompt_ids: bool) -> None:
        self._pieces, self._tree, self._fates, self._prompt_ids = pieces, tree, fates, prompt_ids
        self.steps: list[atif.Step] = []

    def write(self, tip: int, copied: set[int]) -> list[atif.Step]:
        """The path of `tip`, root first. `copied`: turns that an earlier document has."""
        before: list[int] = []
        for number, end in self._tree.path(tip):
            node = self._tree.nodes[number]
            if end < node.length:
                # It goes on elsewhere before its end: what is kept of it is context of what follows.
                before += node.own[: end - node.keep].tolist()
                continue
            before += node.own[: node.output_start - node.keep].tolist()
            self._context(before)
            before = []
            self._turn(number, number in copied)
        for step in self.steps:
            _join_results(step)
        return self.steps

    def _context(self, ids: list[int]) -> None:
        renderer = self._pieces.renderer
        text = renderer.decode(ids).removesuffix(renderer.generation)
        for role, body in self._pieces.read(text):
            if role == "tool":
                self._result(body)
            elif role == "assistant":
                self._said(renderer.rules.parse(body, False), f"context{len(self.steps)}", is_copied_context=True)
            else:
                self._add(source="system" if role == "system" else "user", message=body)

    def _result(self, body: str) -> None:
        agent = next((step for step in reversed(self.steps) if step.source == "agent"), None)
        if agent is None:
            self._add(source="user", message=body)
            return
        results = agent.observation.results if agent.observation is not None else []
        agent.observation = atif.Observation(results=[*results, atif.Result(content=body)])

    def _turn(self, number: int, copied: bool) -> None:
        node, turn = self._tree.nodes[number], self._tree.nodes[number].turn
        parsed = self._pieces.renderer.parse(turn.output)
        facts = {"turn": number, "thread": turn.thread, "role": turn.role, "status": turn.status}
        if copied:
            self._said(parsed, str(number), is_copied_context=True, extra=facts)
            return
        metrics = atif.Metrics(
            prompt_tokens=node.output_start,
            completion_tokens=len(turn.output),
            cached_tokens=turn.cached_tokens,
            prompt_token_ids=self._tree.whole(number, node.output_start).tolist() if self._prompt_ids else None,
            completion_token_ids=turn.output,
            logprobs=turn.logprobs,
            extra={
                "parent": turn.parent,
                "keep": turn.keep,
                "context_token_ids": turn.context,
                "versions": [[span.lineage, span.version, span.length] for span in turn.spans],
                "temperature": turn.temperature,
            },
        )
        more = {"finish": turn.finish, "cell": turn.cell, "constrained": turn.constrained, "evidence": turn.evidence}
        fates = [[f.start, f.stop, f.step, f.reason] for f in self._fates.get(number, [])]
        self._said(
            parsed, str(number), metrics=metrics, llm_call_count=1, timestamp=_iso(turn),
            extra={**facts, **more, "fates": fates},
        )  # fmt: skip

    def _said(self, parsed: Parsed, name: str, **fields: object) -> None:
        calls = [
            atif.ToolCall(
                tool_call_id=f"call_{name}_{index}", function_name=call.name, arguments=json.loads(call.arguments)
            )
            for index, call in enumerate(parsed.calls)
        ]
        self._add(
            source="agent",
            message=parsed.text,
            reasoning_content=parsed.thinking or None,
            tool_calls=calls or None,
            **fields,
        )

    def _add(self, **fields: object) -> None:
        self.steps.append(atif.Step(step_id=len(self.steps) + 1, **fields))  # type: ignore[arg-type]


def _join_results(step: atif.Step) -> None:
    """One call has one result; of several, harnesses give the results in an order of their own."""
    if step.observation is not None and step.tool_calls is not None:
        if len(step.tool_calls) == len(step.observation.results) == 1:
            step.observation.results[0].source_call_id = step.tool_calls[0].tool_call_id


def _iso(turn: Turn) -> str:
    return datetime.fromtimestamp(turn.finished, UTC).isoformat()
