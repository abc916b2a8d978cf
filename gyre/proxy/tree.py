"""The turns of one execution as a tree over tokens.

Invariant: a node is only added, never changed; a parent has a lower number; the whole sequence of a node is
its parent's cut to `keep`, then its context, then its output. So shared prefixes are stored once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = array
"""array("i"): a long execution's ids as ints of 4 bytes."""

_BLOCK = 4096


@dataclass(frozen=True)
class Node:
    """One committed turn. `tokens` is its context, then its output, which starts at `prompt` in the whole
    sequence; `length` is that of the whole sequence.
    """

    number: int
    parent: int
    keep: int
    tokens: array[int]
    prompt: int
    length: int

    @property
    def output(self) -> array[int]:
        """The sampled tokens."""
        return self.tokens[self.prompt - self.keep :]


class CallTree:
    """Nodes by number, and their children."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._children: dict[int, list[Node]] = {-1: []}

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, number: int, parent: int, keep: int, context: Sequence[int], output: Sequence[int]) -> Node:
        """Add a turn. Raises ValueError if it breaks the tree's invariant."""
        if number in self._nodes or parent >= number or (parent >= 0 and parent not in self._nodes):
            raise ValueError(f"turn {number} cannot have parent {parent}")
        if not 0 <= keep <= (self._nodes[parent].length if parent >= 0 else 0):
            raise ValueError(f"turn {number} cannot keep {keep} tokens of turn {parent}")
        tokens = array("i", context)
        prompt = keep + len(tokens)
        tokens.extend(output)
        node = Node(number, parent, keep, tokens, prompt, keep + len(tokens))
        self._nodes[number] = node
        self._children[number] = []
        self._children[parent].append(node)
        return node

    def sequence(self, number: int, length: int | None = None) -> array[int]:
        """The first `length` tokens (default: all) of the whole sequence of turn `number`; -1 has none."""
        parts: list[array[int]] = []
        node = self._nodes.get(number)
        end = (node.length if node else 0) if length is None else length
        while node is not None:
            if end > node.keep:
                parts.append(node.tokens if end == node.length else node.tokens[: end - node.keep])
                end = node.keep
            node = self._nodes.get(node.parent)
        whole: array[int] = array("i")
        whole.frombytes(b"".join(reversed(parts)))
        return whole

    def branch(self, tokens: Sequence[int], parent: int, matched: int) -> tuple[int, int]:
        """Where `tokens` leave the tree: (deepest turn, how many tokens of its sequence are kept).

        `tokens` follow the first `matched` tokens of `parent`'s sequence, which the new turn keeps (parent
        -1: matched 0).
        """
        new = tokens if isinstance(tokens, array) else array("i", tokens)
        best = (parent, matched)
        ahead = [(child, matched) for child in self._children[parent] if child.keep >= matched]
        if parent >= 0:
            best = (parent, self._extent(self._nodes[parent], new, matched, matched))
            ahead = [(child, at) for child, at in ahead if child.keep <= best[1]]
        while ahead:
            node, base = ahead.pop()
            reached = self._extent(node, new, base, node.keep)
            if reached > best[1]:
                best = (node.number, reached)
            ahead += [(child, base) for child in self._children[node.number] if node.keep < child.keep <= reached]
        return best

    @staticmethod
    def _extent(node: Node, new: array[int], base: int, at: int) -> int:
        """How far node's sequence agrees with `new` (which starts at position `base`), from position `at` on."""
        here = at - node.keep
        return at + common_prefix(node.tokens, here, new, at - base)


def common_prefix(a: array[int], i: int, b: array[int], j: int) -> int:
    """Length of the common prefix of a[i:] and b[j:]."""
    most = min(len(a) - i, len(b) - j)
    done = 0
    while done < most and a[i + done : i + done + _BLOCK] == b[j + done : j + done + _BLOCK]:
        done += _BLOCK
    if done >= most:
        return most
    for k in range(done, min(most, done + _BLOCK)):
        if a[i + k] != b[j + k]:
            return k
    return most
