"""Which sampled tokens may be targets, and the one reason why every other is dropped.

Owns the words of the drop reasons and their order: the first that applies to a token counts.
Invariant: the possible targets of a turn are one run of its output, so what is trained of a turn stays a run
too: every path takes a beginning of it.

Reasons that hold for a whole execution come first, in this order: `evaluation` (held-out task),
`aborted_attempt` (another attempt counts), `excluded` (no grade), `void_group` (too few graded members),
`zero_advantage` (a group of equal rewards, or a reward equal to its baseline: no gradient). Then, token by token:

- `auxiliary`: the turn's role; `constrained`: sampled under a grammar or a forced tool choice.
- `orphaned`: the call was aborted, so no conversation went on from it; or no token precedes it (the first of a
  root without context), so nothing predicts it. A token behind the place where a child forks off is *not*
  orphaned: its own turn stays a tip, and that leaf holds it.
- `undelivered`: the reply never reached the harness whole, and no later turn keeps the turn's whole sequence.
- `too_long`: it lies behind the first `tokens_per_microstep` tokens of its path.
- `not_selected`: a possible target, but on none of the selected paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gyre.trajectory.tree import Node, Tree

Reason = Literal[
    "evaluation",
    "aborted_attempt",
    "excluded",
    "void_group",
    "zero_advantage",
    "auxiliary",
    "constrained",
    "orphaned",
    "undelivered",
    "too_long",
    "not_selected",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Targets:
    """Offsets first <= offset < stop into the output of a turn may be targets (none when they are equal)."""

    first: int
    stop: int

    def upto(self, node: Node, end: int) -> int:
        """Where the possible targets stop on a path that takes the turn's own tokens up to position `end`."""
        return max(self.first, min(self.stop, end - node.output_start))


def whole_turn_reason(node: Node) -> Reason | None:
    """Why nothing of this turn may be a target, or None."""
    if node.turn.role == "auxiliary":
        return "auxiliary"
    if node.turn.constrained:
        return "constrained"
    if node.turn.status == "aborted":
        return "orphaned"
    if node.turn.status == "undelivered" and not node.kept_whole:
        return "undelivered"
    return None


def possible_targets(tree: Tree, max_tokens: int) -> tuple[dict[int, Targets], dict[Reason, int]]:
    """Possible targets of every turn that has any, and the number of all other sampled tokens by reason.

    max_tokens: the longest path that can be trained, in tokens.
    """
    targets: dict[int, Targets] = {}
    dropped: dict[Reason, int] = {}

    def drop(reason: Reason, count: int) -> None:
        if count:
            dropped[reason] = dropped.get(reason, 0) + count

    for number, node in tree.nodes.items():
        reason = whole_turn_reason(node)
        if reason is not None:
            drop(reason, node.sampled)
            continue
        first = min(node.sampled, 1 if node.output_start == 0 else 0)
        stop = max(first, min(node.sampled, max_tokens - node.output_start))
        drop("orphaned", first)
        drop("too_long", node.sampled - stop)
        if stop > first:
            targets[number] = Targets(first, stop)
    return targets, dropped
