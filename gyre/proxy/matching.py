"""Where a request continues what is known: pure, from conversation and known turns to (parent, keep,
context).

Invariant: the prompt is exactly the first `keep` tokens of the parent's sequence, then `context`; a turn that
we sampled is represented by its recorded tokens, never by its echo; an edit that the harness is not known to
make forks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

import msgspec

from gyre.proxy.conversation import Conversation, Key, Message, extend, extend_said, opening_key, visible
from gyre.proxy.template import Renderer
from gyre.proxy.tree import CallTree


class Edits(Protocol):
    """The edits that a harness is known to make to what we sampled."""

    def normal(self, message: Message) -> Message:
        """Undo them; applied to the recorded and to the echoed message."""

    def same(self, recorded: Message, echoed: Message) -> bool:
        """Whether `echoed`, which bears ids that `recorded` issued, is `recorded` after such edits."""


class Known(Protocol):
    """What matching asks about the turns so far."""

    def by_call(self, call_id: str) -> int | None:
        """The turn that issued a tool-call id."""

    def by_place(self, key: Key, said: bytes) -> int | None:
        """The newest turn sampled at a place in the chain with this visible content."""

    def place(self, turn: int) -> Key:
        """The place at which a turn was sampled."""

    def said(self, turn: int) -> bytes:
        """Its visible content (`visible` of the normalised message)."""

    def reply(self, turn: int) -> Message:
        """What it said."""


class Turns:
    """The sampled turns of one execution, by the ids that they issued and by place."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._places: dict[tuple[Key, bytes], int] = {}
        self._of_turn: dict[int, tuple[Key, bytes]] = {}
        self._replies: dict[int, Message] = {}

    def add(self, turn: int, key: Key, reply: Message, normal: Callable[[Message], Message]) -> None:
        """Know `reply` as what `turn` said at `key`."""
        said = visible(normal(reply))
        self._of_turn[turn] = (key, said)
        self._replies[turn] = reply
        self._places[key, said] = turn
        for issued in (*(call.id for call in reply.calls), reply.issued):
            if issued:
                self._calls[issued] = turn

    def by_call(self, call_id: str) -> int | None:
        return self._calls.get(call_id)

    def by_place(self, key: Key, said: bytes) -> int | None:
        return self._places.get((key, said))

    def place(self, turn: int) -> Key:
        return self._of_turn[turn][0]

    def said(self, turn: int) -> bytes:
        return self._of_turn[turn][1]

    def reply(self, turn: int) -> Message:
        return self._replies[turn]


class Step(msgspec.Struct, frozen=True, gc=False):
    """How far a walk has come: the place, the parent so far and the message behind it, sampled messages after it."""

    key: Key
    parent: int
    tail: int
    sampled: dict[int, int]


class Trails:
    """The last walk of each of the newest threads: a request that extends the last one walks only what is new.

    What was recognised stays recognised; a twin that was sampled meanwhile does not take an old message's place.
    """

    def __init__(self, threads: int = 4) -> None:
        self._most = threads
        self._trails: dict[str, tuple[Conversation, list[Step]]] = {}

    def resume(self, thread: str, conversation: Conversation) -> list[Step]:
        """Steps up to the first message that differs: opening, then one a message. [] where nothing is known."""
        before, steps = self._trails.get(thread, (None, []))
        if before is None or before.system != conversation.system or before.tools != conversation.tools:
            return []
        same = 0
        for old, new in zip(before.messages, conversation.messages, strict=False):
            if old is not new and old != new:
                break
            same += 1
        return steps[: same + 1]

    def keep(self, thread: str, conversation: Conversation, steps: list[Step]) -> None:
        """Note the walk of a request."""
        self._trails.pop(thread, None)
        self._trails[thread] = (conversation, steps)
        if len(self._trails) > self._most:
            del self._trails[next(iter(self._trails))]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """`parent` (-1: none) said message `tail - 1`; `sampled`: message index -> turn, after the parent; `key`:
    the end's place.
    """

    parent: int
    tail: int
    sampled: dict[int, int]
    key: Key


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send and what to store: `prompt` is keep tokens of parent's sequence, then `context`."""

    parent: int
    keep: int
    context: list[int]
    prompt: array[int]
    key: Key


def match(conversation: Conversation, thread: str, known: Known, edits: Edits, trails: Trails) -> Match:
    """Walk the chain. The parent is the last sampled turn up to which everything is known, in order."""
    steps = trails.resume(thread, conversation) or [Step(opening_key(thread, conversation), -1, 0, {})]
    for index in range(len(steps) - 1, len(conversation.messages)):
        steps.append(_step(steps[-1], index, conversation.messages[index], known, edits))
    trails.keep(thread, conversation, steps)
    end = steps[-1]
    return Match(parent=end.parent, tail=end.tail, sampled=end.sampled, key=end.key)


def _step(before: Step, index: int, message: Message, known: Known, edits: Edits) -> Step:
    key, parent, tail, sampled = before.key, before.parent, before.tail, before.sampled
    if message.role != "assistant":
        return Step(extend(key, message), parent, tail, sampled)
    said = visible(edits.normal(message))
    turn = recognise(key, message, said, known, edits)
    if turn is not None:
        # However it was edited, it is what we recorded: the chain goes on from that.
        said = known.said(turn)
    if turn is not None and known.place(turn) == key:
        # Same place: the history before it is what this turn was sampled after.
        parent, tail, sampled = turn, index + 1, {}
    elif turn is not None:
        sampled = {**sampled, index: turn}
    return Step(extend_said(key, said), parent, tail, sampled)


def recognise(key: Key, message: Message, said: bytes, known: Known, edits: Edits) -> int | None:
    """The turn that said `message`: by the ids that we issued, else by what is visible at this place.

    An id with other content than what was said, or than the harness's edits make of it, is an edit: not recognised.
    """
    issued = (*(call.id for call in message.calls), message.issued)
    turns = {known.by_call(name) for name in issued if name}
    if turns and turns != {None}:
        turn = turns.pop()
        if turn is None or turns:
            return None
        return turn if known.said(turn) == said or edits.same(known.reply(turn), message) else None
    return known.by_place(key, said)


def plan(conversation: Conversation, found: Match, tree: CallTree, renderer: Renderer) -> Plan:
    """Tokens for a matched request. Raises RenderError. With a parent, only the tail is rendered and
    compared.
    """
    outputs = {index: tree[turn].output for index, turn in found.sampled.items()}
    if found.parent < 0:
        base = tree.sequence(-1)
        new = renderer.root(conversation, outputs)
    else:
        base = tree.sequence(found.parent)
        outputs = {index - found.tail: output for index, output in outputs.items()}
        new = renderer.tail(conversation.messages[found.tail :], outputs, base[-1])
    before = len(base)
    parent, keep = tree.branch(new, found.parent, before)
    prompt = base
    prompt.extend(new)
    return Plan(parent=parent, keep=keep, context=new[keep - before :], prompt=prompt, key=found.key)
