"""An execution's last requests, item by item: a request that goes on from one of them is read from where it differs.

Harnesses send their whole history with every call. Its items are compared as bytes with those of earlier requests, and
only what is new is decoded and put into neutral form. Invariant: a request reads the same with memory as without.
"""

from __future__ import annotations

import hashlib
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


class Place(NamedTuple):
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


class _History(NamedTuple):
    """A request's items. `messages` are in the order in which they were sent."""

    kind: type[Reader]
    items: list[msgspec.Raw]
    places: list[Place]
    messages: list[Message]
    users: list[tuple[str, ...]]
    ordered: tuple[Message, ...]


class Histories:
    """The newest `most` histories of one execution. It holds the bodies that they came in, and no others."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: list[_History] = []
        self._once: dict[Callable[[Any], Any], list[tuple[msgspec.Raw, Any]]] = {}

    def read(self, name: str, items: list[msgspec.Raw], reader: Reader) -> Read:
        """Read `items`, the list in field `name`, with a new `reader`. Raises Refusal."""
        before, same = self._closest(type(reader), items)
        place = before.places[same - 1] if before is not None and same else _START
        known: tuple[Message, ...] = ()
        places: list[Place] = []
        if before is not None:
            reader.messages, reader.users = before.messages[: place.messages], before.users[: place.users]
            reader.open = place.open
            known, places = before.ordered[: place.messages], before.places[:same]
        digest = place.digest
        for index in range(same, len(items)):
            reader.read(_object(items[index], name, index), index)
            digest = hashlib.sha256(digest + items[index]).digest()
            places.append(Place(len(reader.messages), len(reader.users), reader.open, digest))
        reader.close()
        ordered = in_call_order(reader.messages, known)
        self._keep(before, same, _History(type(reader), items, places, reader.messages, reader.users, ordered))
        return Read(ordered, reader.users, digest)

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

    def _closest(self, kind: type[Reader], items: list[msgspec.Raw]) -> tuple[_History | None, int]:
        """The history that begins with the most of `items`, and how many."""
        found: tuple[_History | None, int] = (None, 0)
        for history in self._known:
            if history.kind is not kind:
                continue
            same = 0
            for old, new in zip(history.items, items, strict=False):
                if old != new:
                    break
                same += 1
            if same > found[1]:
                found = (history, same)
        return found

    def _keep(self, before: _History | None, same: int, now: _History) -> None:
        # Another conversation may begin alike; the same one, edited or gone on, needs its past no more.
        if before is not None and 2 * same >= len(before.items):
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


def split(
    body: bytes, name: str, of_text: Callable[[msgspec.Raw], msgspec.Raw] | None = None
) -> tuple[Fields, list[msgspec.Raw]]:
    """The body's fields, and the items of the list in field `name`, whose field then says nothing. Raises Refusal.

    Nearly all of a body is that list, so it is gone through once: what is around its items is small JSON by itself.
    `of_text`: the one item that a text in place of the list means.
    """
    try:
        items: list[msgspec.Raw] = _listed(name).decode(body).items
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Whatever it is, what follows says it of the right part.
        items = []
    if not items:
        fields = fields_of(body)
        given = fields.get(name, _NULL)
        if of_text is not None and memoryview(given)[:1].tobytes() == b'"':
            return fields, [of_text(given)]
        return fields, _items_of(given, name)
    start = _address(items[0]) - _address(body)
    end = _address(items[-1]) - _address(body) + len(items[-1])
    return fields_of(body[:start] + body[end:]), items


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
