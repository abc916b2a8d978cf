"""An execution's last requests, item by item: a request that goes on from one of them is read from where it differs.

Harnesses send their whole history with every call. A body that begins like an earlier one, which is a comparison of
bytes, is gone on with behind the last item that both have: only what is new is looked at, decoded and put into neutral
form. Invariant: a request reads the same with memory as without.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from gyre.proxy.conversation import Message
from gyre.proxy.exchange import Refusal

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]
"""A request's fields by name, undecoded: views of its body."""

_NULL = msgspec.Raw(b"null")
_COMMA = re.compile(rb"[ \t\r\n]*,")
_BLOCK = 1 << 16
_fields = msgspec.json.Decoder(Fields)
_items = msgspec.json.Decoder(list[msgspec.Raw])


class Reader:
    """Gathers the items of a request into messages; each dialect has its own `read`.

    `users`: texts of the users' messages, where roles are told by them. `open`: an assistant's message to which the
    next item may still add.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.users: list[tuple[str, ...]] = []
        self.open: Message | None = None

    def read(self, item: dict[str, Any], index: int) -> None:
        """Add an item. Raises Refusal."""
        raise NotImplementedError

    def close(self) -> None:
        """The open message is complete."""
        if self.open is not None:
            self.messages.append(self.open)
            self.open = None


class Place(msgspec.Struct, frozen=True, gc=False):
    """How far a reader had come behind an item, and the digest of all items up to it."""

    messages: int
    users: int
    open: Message | None
    digest: bytes


_START = Place(0, 0, None, b"")


class Read(NamedTuple):
    """What items say: messages with tool results in the order of their calls; digest of the items' bytes."""

    messages: tuple[Message, ...]
    users: list[tuple[str, ...]]
    digest: bytes


class _Part(NamedTuple):
    """A body's fields without its items, the items, and where each starts and ends in the body."""

    fields: Fields
    items: list[msgspec.Raw]
    spans: list[tuple[int, int]]


class _History(NamedTuple):
    """A request. `spans`: where its items lie in its body; `messages` are in the order in which they were sent."""

    kind: type[Reader]
    body: bytes
    spans: list[tuple[int, int]]
    places: list[Place]
    messages: list[Message]
    users: list[tuple[str, ...]]
    ordered: tuple[Message, ...]


class Histories:
    """The newest `most` histories of one execution, with the bodies that they came in."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: list[_History] = []
        self._once: dict[Callable[[Any], Any], list[tuple[msgspec.Raw, Any]]] = {}

    def read(
        self, body: bytes, name: str, reader: Reader, of_text: Callable[[msgspec.Raw], msgspec.Raw] | None = None
    ) -> tuple[Fields, Read]:
        """The fields of `body`, and what the items of its list `name` say, read with a new `reader`. Raises Refusal.

        `of_text`: the one item that a text in place of the list means.
        """
        before, same, part = self._split(body, name, type(reader), of_text)
        place = before.places[same - 1] if before is not None and same else _START
        known: tuple[Message, ...] = ()
        places: list[Place] = []
        spans = part.spans
        if before is not None:
            reader.messages, reader.users = before.messages[: place.messages], before.users[: place.users]
            reader.open = place.open
            known, places = before.ordered[: place.messages], before.places[:same]
            spans = before.spans[:same] + spans
        digest = place.digest
        for index, item in enumerate(part.items, same):
            reader.read(_object(item, name, index), index)
            digest = hashlib.sha256(digest + item).digest()
            places.append(Place(len(reader.messages), len(reader.users), reader.open, digest))
        reader.close()
        ordered = in_call_order(reader.messages, known)
        self._keep(before, same, _History(type(reader), body, spans, places, reader.messages, reader.users, ordered))
        return part.fields, Read(ordered, reader.users, digest)

    def once(self, fields: Fields, name: str, parse: Callable[[Any], T]) -> T:
        """`parse` of the decoded field `name` (None where it is absent); the same object while its bytes are the same.

        `parse` is a function of a module: what is known is known by it. Raises Refusal.
        """
        raw = fields.get(name, _NULL)
        known = self._once.setdefault(parse, [])
        for before, value in known:
            if before == raw:
                found: T = value
                return found
        parsed = parse(decode(raw, name))
        # A copy: the view would keep its whole body.
        known.append((raw.copy(), parsed))
        del known[: -self._most]
        return parsed

    def _split(
        self, body: bytes, name: str, kind: type[Reader], of_text: Callable[[msgspec.Raw], msgspec.Raw] | None
    ) -> tuple[_History | None, int, _Part]:
        """(a history that begins with the first items of `body`, how many, what comes after them)."""
        known = [history for history in self._known if history.kind is kind and history.spans]
        reached = [(_shared(history, body), history) for history in known]
        same, before = max(reached, key=lambda pair: pair[0], default=(0, None))
        if before is not None and same:
            part = _after(body, name, before.spans[0][0], before.spans[same - 1][1])
            if part is not None:
                return before, same, part
        part = split(body, name, of_text)
        # The bodies begin differently, but their items may be the same all the same.
        counts = [(_equal(history, body, part), history) for history in known]
        same, before = max(counts, key=lambda pair: pair[0], default=(0, None))
        if not same:
            return None, 0, part
        return before, same, _Part(part.fields, part.items[same:], part.spans[same:])

    def _keep(self, before: _History | None, same: int, now: _History) -> None:
        # Another conversation may begin alike; the same one, edited or gone on, needs its past no more.
        if before is not None and 2 * same >= len(before.spans):
            self._known = [history for history in self._known if history is not before]
        self._known.append(now)
        del self._known[: -self._most]


def fields_of(body: bytes) -> Fields:
    """The body's fields. Raises Refusal if it is not a JSON object."""
    try:
        return _fields.decode(body)
    except msgspec.ValidationError as error:
        raise Refusal("invalid", "the body is not a JSON object") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid", f"the body is not JSON: {error}") from error


def decode(raw: msgspec.Raw, where: str) -> Any:
    """The value of a part of a body. Raises Refusal."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid", f"{where}: the body is not JSON: {error}") from error


def decoded(fields: Fields, without: Collection[str]) -> dict[str, Any]:
    """All fields but those in `without`, decoded. Raises Refusal."""
    return {name: decode(raw, name) for name, raw in fields.items() if name not in without}


def split(body: bytes, name: str, of_text: Callable[[msgspec.Raw], msgspec.Raw] | None = None) -> _Part:
    """The whole body; the field `name` itself then says nothing. Raises Refusal.

    Nearly all of a body is that list, so it is gone through once: what is around its items is small JSON by itself.
    """
    try:
        items: list[msgspec.Raw] = _listed(name).decode(body).items
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Whatever it is, what follows says it of the right part.
        items = []
    if items:
        zero = _address(body)
        spans = [(start, start + len(item)) for item in items for start in (_address(item) - zero,)]
        return _Part(fields_of(body[: spans[0][0]] + body[spans[-1][1] :]), items, spans)
    fields = fields_of(body)
    given = fields.get(name, _NULL)
    if of_text is not None and memoryview(given)[:1].tobytes() == b'"':
        # No span: nothing can go on from it.
        return _Part(fields, [of_text(given)], [])
    return _Part(fields, _items_of(given, name), [])


def _after(body: bytes, name: str, start: int, end: int) -> _Part | None:
    """`body` without the items from `start` to `end`, which are known; None where that is not a body with items."""
    comma = _COMMA.match(body, end)
    if comma is None:
        return None
    rest = body[:start] + body[comma.end() :]
    try:
        part = split(rest, name)
    except Refusal:
        return None
    if not part.spans or rest[start : part.spans[0][0]].strip():
        # No items are left, or those of another list of the same name, which is the one that counts.
        return None
    moved = comma.end() - start
    return part._replace(spans=[(first + moved, last + moved) for first, last in part.spans])


def _shared(history: _History, body: bytes) -> int:
    """How many of the history's items lie in what its body and `body` begin with, with what ends the last of them."""
    return bisect_left(history.spans, _common(history.body, body), key=lambda span: span[1])


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    most, at = min(len(a), len(b)), 0
    while at < most and a[at : at + _BLOCK] == b[at : at + _BLOCK]:
        at += _BLOCK
    low, high = min(at, most), min(at + _BLOCK, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[at:middle] == b[at:middle] else (low, middle - 1)
    return low


def _equal(history: _History, body: bytes, part: _Part) -> int:
    """How many items are the history's, one by one."""
    same = 0
    for (old, old_end), (new, new_end) in zip(history.spans, part.spans, strict=False):
        if history.body[old:old_end] != body[new:new_end]:
            break
        same += 1
    return same


@cache
def _listed(name: str) -> Any:
    """Decodes a body of which only the list in field `name` counts."""
    field: Any = ("items", list[msgspec.Raw], msgspec.field(default_factory=list))
    return msgspec.json.Decoder(msgspec.defstruct("Listed", [field], rename={"items": name}))


def _address(view: bytes) -> int:
    """Where the bytes of a view lie: an item is a view of its body."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _items_of(given: msgspec.Raw, name: str) -> list[msgspec.Raw]:
    if given == _NULL:
        return []
    try:
        return _items.decode(given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid", f"{name}: list is needed") from error


def identity(fields: Fields, digest: bytes, without: Collection[str]) -> bytes:
    """What two equal requests share: the bytes of all fields but those in `without`, and the digest of their items."""
    state = hashlib.sha256(digest)
    for name, raw in fields.items():
        if name not in without:
            state.update(b"%d %d " % (len(name.encode()), len(raw)))
            state.update(name.encode())
            state.update(raw)
    return state.digest()


def in_call_order(messages: Sequence[Message], known: Sequence[Message] = ()) -> tuple[Message, ...]:
    """`messages` with each round's tool results in the order of its calls.

    Harnesses send the results of parallel calls as they complete, and name the calls by id; templates name them by
    place alone. Results of calls that are not in the round stay behind them. `known`: what was made of the first
    len(known) messages, of which the last round may have grown.
    """
    start = len(known)
    while start and messages[start - 1].role == "tool":
        start -= 1
    ordered = list(known[:start])
    calls = _places(ordered[-1]) if ordered else {}
    for message in [*messages[start:], None]:
        if message is not None and message.role == "tool":
            ordered.append(message)
            continue
        ordered[start:] = sorted(ordered[start:], key=lambda result: calls.get(result.call_id, len(calls)))
        if message is None:
            break
        ordered.append(message)
        start = len(ordered)
        calls = _places(message)
    return tuple(ordered)


def _places(message: Message) -> dict[str, int]:
    return {call.id: index for index, call in enumerate(message.calls)}


def _object(raw: msgspec.Raw, name: str, index: int) -> dict[str, Any]:
    item = decode(raw, f"{name}.{index}")
    if not isinstance(item, dict):
        raise Refusal("invalid", f"{name}.{index}: an object is needed")
    return item
