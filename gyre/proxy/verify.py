"""Checking a model's template family: `gyre doctor template MODEL` (also a start-up check).

Owns the proof that tail rendering and the full template give the same ids. Invariant: for each shape, the ids that a
run would hold (prompt, sampled reply, tail, sampled reply, ...) are those of the full template over the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gyre.proxy.conversation import Conversation, Message, Tool, ToolCall, canonical
from gyre.proxy.template import Renderer, RenderError, load

_BASH = Tool(
    "bash",
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it must be."""

    shape: str
    what: str
    expected: str
    found: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`checked`: names of the shapes. The family serves this model if there are no differences."""

    model: str
    family: str
    generation: str
    stop_ids: tuple[int, ...]
    checked: tuple[str, ...]
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"model {self.model}: template family {self.family}, generation prompt {self.generation!r}"]
        lines += [f"note: {note}" for note in self.notes]
        for found in self.differences:
            lines += [f"{found.shape}: {found.what}", f"  expected {found.expected!r}", f"  found    {found.found!r}"]
        lines.append(f"{len(self.checked)} shapes checked, {len(self.differences)} differences")
        return lines


def verify_template(model_dir: str | Path, family_name: str = "qwen3") -> Report:
    """Load a Hugging Face folder and check it. Raises UserError if it cannot be loaded."""
    return verify(load(model_dir, family_name), str(model_dir))


def verify(renderer: Renderer, model: str) -> Report:
    """Check every shape."""
    differences: list[Difference] = []
    notes: list[str] = []
    checked = []
    for name, shape in shapes().items():
        if renderer.rules.one_call and any(len(m.calls) + bool(m.text) > 1 for m in shape.messages if m.calls):
            notes.append(f"{name}: the family has one call a turn and no text beside it")
            continue
        checked.append(name)
        try:
            found = _check(renderer, name, shape)
            differences += found or []
            if found is None:
                notes.append(f"{name}: the template rewrites old turns; recorded turns stay as they were sampled")
        except (RenderError, ValueError) as error:
            differences.append(_difference(name, "the template refuses it", "", str(error)))
    return Report(
        model=model,
        family=renderer.rules.name,
        generation=renderer.generation,
        stop_ids=renderer.stop_ids,
        checked=tuple(checked),
        notes=tuple(notes),
        differences=tuple(differences),
    )


def shapes() -> dict[str, Conversation]:
    """Conversations that end with an assistant's message; the full template extends each turn by turn."""
    ask, go_on = Message(role="user", text="List the files."), Message(role="user", text="And <b>now</b>?\n")
    call = ToolCall("call_1", "bash", '{"command": "ls -a \\"x y\\"", "n": [1, 2.5, null, true]}')
    other = ToolCall("call_2", "bash", '{"command": "echo </tool_call> é"}')
    done = Message(role="assistant", text="There are two:\n\n  a\n  b")
    thought = Message(role="assistant", thinking="A list\n\nis wanted.", calls=(call,))
    concluded = Message(role="assistant", text="Two.", thinking="I saw a and b.")
    calling = Message(role="assistant", calls=(call,))
    both = Message(role="assistant", text="I look twice.", calls=(call, other))
    result = Message(role="tool", text="a\nb\n", call_id="call_1")
    second = Message(role="tool", text="", call_id="call_2")
    system = "You are a coding agent.\n"
    return {
        "question": Conversation(messages=(ask, done)),
        "system": Conversation(system=system, messages=(ask, done, go_on, done)),
        "tool call": Conversation(system=system, tools=(_BASH,), messages=(ask, calling, result, done)),
        "no system": Conversation(tools=(_BASH,), messages=(ask, calling, result, calling, result, done)),
        "parallel calls": Conversation(system=system, tools=(_BASH,), messages=(ask, both, result, second, done)),
        "result and user": Conversation(tools=(_BASH,), messages=(ask, calling, result, go_on, done)),
        "two users": Conversation(system=system, messages=(ask, done, ask, go_on, done)),
        "thinking": Conversation(tools=(_BASH,), messages=(ask, thought, result, concluded)),
        "late system": Conversation(messages=(ask, done, Message(role="system", text="Be brief."), go_on, done)),
    }


def _check(renderer: Renderer, name: str, shape: Conversation) -> list[Difference] | None:
    """Differences, or None if the template rewrites old turns of this shape, so that there is nothing to compare."""
    messages = renderer.rules.messages(shape)
    whole = renderer.text(messages, shape.tools, generate=False)
    spoken = [index for index, message in enumerate(shape.messages) if message.role == "assistant"]
    said = {index: _said(renderer, shape, whole, index) for index in spoken}
    recorded = {index: renderer.encode(text) for index, text in said.items() if text is not None}
    if len(recorded) < len(spoken):
        return None
    ids: list[int] = []
    start = 0
    for index in spoken:
        if start == 0:
            ids = renderer.root(msgspec.structs.replace(shape, messages=shape.messages[:index]), {})
        else:
            ids += renderer.tail(shape.messages[start:index], {}, ids[-1])
        ids += recorded[index]
        start = index + 1
    last = spoken.pop()
    cut = msgspec.structs.replace(shape, messages=shape.messages[:last])
    spliced = renderer.root(cut, {index: recorded[index] for index in spoken}) + recorded[last]
    full = renderer.encode(whole)
    differences = _compare(renderer, name, "tail rendering", ids, full)
    differences += _compare(renderer, name, "splicing recorded turns", spliced, full)
    for index in recorded:
        differences += _round_trip(renderer, name, shape.messages[index], recorded[index], shape.tools)
    return differences


def _said(renderer: Renderer, shape: Conversation, whole: str, index: int) -> str | None:
    """What a model would have sampled for message `index` of the whole text; None if it does not follow its prompt."""
    mark = "[the place of one message]"
    messages = renderer.rules.messages(shape)
    messages[index + (0 if shape.system is None else 1)] = renderer.rules.placeholder(mark)
    marked = renderer.text(messages, shape.tools, generate=False)
    start, end = renderer.rules.region(marked, mark)
    turn = whole[start : len(whole) - len(marked) + end]
    return turn.removeprefix(renderer.generation) if turn.startswith(renderer.generation) else None


def _compare(renderer: Renderer, name: str, what: str, ids: list[int], full: list[int]) -> list[Difference]:
    # After the last end of turn the template may write a newline, which belongs to the next tail.
    if ids == full[: len(ids)]:
        return []
    at = next((i for i, (a, b) in enumerate(zip(ids, full, strict=False)) if a != b), min(len(ids), len(full)))
    expected, found = renderer.decode(full[at : at + 24]), renderer.decode(ids[at : at + 24])
    return [_difference(name, f"{what} leaves the template at token {at}", expected, found)]


def _round_trip(
    renderer: Renderer, name: str, message: Message, said: list[int], tools: Sequence[Tool]
) -> list[Difference]:
    parsed = renderer.parse(said, tools)
    thinking = message.thinking if parsed.thinking else ""
    calls = [(call.name, canonical(call.arguments)) for call in message.calls]
    expected = (message.text.strip("\n"), thinking, calls)
    found = (parsed.text, parsed.thinking, [(call.name, canonical(call.arguments)) for call in parsed.calls])
    if expected == found and not parsed.malformed:
        return []
    return [_difference(name, "the parser reads back something else", str(expected), str(found))]


def _difference(shape: str, what: str, expected: str, found: str) -> Difference:
    return Difference(shape=shape, what=what, expected=expected, found=found)
