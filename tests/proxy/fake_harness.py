"""Fake harnesses at the wire: they keep a history, send it, and echo what they get, with whatever edits a test wants.

And what every history must satisfy, whatever happened in it (`check`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.trajectory.samples import select_execution
from gyre.trajectory.settings import Settings

Edit = Callable[[Any], Any]


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


class Row(NamedTuple):
    """What a turn must be. kept: "whole" (of the parent's sequence), "part", or "none"."""

    role: str
    parent: int
    kept: str
    thread: str = "main"


class Wire:
    """A harness in one dialect. `history` has the dialect's own messages."""

    path = ""

    def __init__(self, world: Any, tools: tuple[str, ...] = ("Bash", "Write", "Agent")) -> None:
        self.world = world
        self.history: list[Any] = []
        self.system = "You are a coding agent."
        self.tools = tools
        self.headers: dict[str, str] = {}

    def thread(self, system: str = "", **headers: str) -> Wire:
        """Another conversation of the same harness."""
        other = type(self)(self.world, self.tools)
        other.system = system or self.system
        other.headers = {**self.headers, **headers}
        return other

    async def ask(self, said: str, edit: Edit | None = None, headers: dict[str, str] | None = None, **more: Any) -> Any:
        """Send the history; the model says `said`; what the harness makes of it joins the history."""
        self.world.engine.say(said)
        answer = await self.send(headers, **more)
        self.take(answer, edit)
        return answer

    async def send(self, headers: dict[str, str] | None = None, status: int = 200, **more: Any) -> Any:
        """Send the history."""
        told = {**self.headers, **(headers or {})}
        given, answer = await self.world.post({**self.body(), **more}, path=self.path, **told)
        assert given == status, answer
        return answer

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, answer: Any, edit: Edit | None = None) -> None:
        raise NotImplementedError

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})


class MessagesWire(Wire):
    path = "/v1/messages?beta=true"

    def body(self) -> dict[str, Any]:
        tools = [{"name": name, "description": name, "input_schema": {"type": "object"}} for name in self.tools]
        return {
            "model": "tiny",
            "max_tokens": 300,
            "system": [{"type": "text", "text": self.system}],
            "tools": tools,
            "messages": self.history,
        }

    def take(self, answer: Any, edit: Edit | None = None) -> None:
        blocks = json.loads(json.dumps(answer["content"]))
        self.history.append({"role": "assistant", "content": edit(blocks) if edit else blocks})

    def results(self, answer: Any, *texts: str, order: int = 1, extra: str = "") -> None:
        ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        blocks = [
            {"type": "tool_result", "tool_use_id": i, "content": t}
            for i, t in list(zip(ids, texts, strict=True))[::order]
        ]
        self.history.append({"role": "user", "content": blocks + ([{"type": "text", "text": extra}] if extra else [])})


class ChatWire(Wire):
    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in self.tools]
        opening = [{"role": "system", "content": self.system}]
        return {"model": "tiny", "messages": opening + self.history, **({"tools": tools} if tools else {})}

    def take(self, answer: Any, edit: Edit | None = None) -> None:
        message = answer["choices"][0]["message"]
        self.history.append(edit(message) if edit else message)

    def results(self, answer: Any, *texts: str, order: int = 1) -> None:
        calls = answer["choices"][0]["message"]["tool_calls"]
        for one, text in list(zip(calls, texts, strict=True))[::order]:
            self.history.append({"role": "tool", "tool_call_id": one["id"], "content": text})


class ResponsesWire(Wire):
    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in self.tools]
        return {"model": "tiny", "instructions": self.system, "input": self.history, "tools": tools, "store": False}

    def take(self, answer: Any, edit: Edit | None = None) -> None:
        self.history += edit(answer["output"]) if edit else answer["output"]

    def results(self, answer: Any, *texts: str) -> None:
        ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        for call_id, text in zip(ids, texts, strict=True):
            self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})


def check(world: Any, rows: list[Row], untrained: dict[int, str] | None = None) -> list[Turn]:
    """The tree is `rows`; each prompt is the parent's recorded tokens and a tail; outputs are what was sampled; and all
    of it is trained exactly once, but for the turns in `untrained`, which are dropped whole, for that reason.
    """
    found = latest_rows(world.sink.rows)
    shape = [Row(row.role, row.parent, _kept(world, row), row.thread) for row in found]
    assert shape == rows
    for row, request, sampled in zip(found, world.engine.requests, world.engine.given, strict=True):
        assert row.output == sampled
        assert world.whole(row.turn) == request.input_ids + sampled
    untrained = untrained or {}
    settings = Settings(seed=1, tokens_per_microstep=100_000, max_paths=100)
    samples, dropped = select_execution(
        found, settings, execution=found[0].execution, attempt=0, advantage=1.0, dispatch_version=1
    )
    trained: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        for row_number, token, turn, offset in zip(
            sample.target_rows, sample.target_tokens, sample.target_turns, sample.target_offsets, strict=True
        ):
            assert found[turn].output[offset] == token == sample.tokens[row_number + 1]
            trained[int(turn), int(offset)] += 1
    expected = {(r.turn, i) for r in found if r.turn not in untrained for i in range(len(r.output))}
    assert dict(trained) == dict.fromkeys(expected, 1)
    wanted: Counter[str] = Counter()
    for turn, reason in untrained.items():
        wanted[reason] += len(found[turn].output)
    assert dropped == dict(wanted)
    return found


def _kept(world: Any, row: Turn) -> str:
    if row.parent < 0:
        return "none"
    return "whole" if row.keep == len(world.whole(row.parent)) else "part"
