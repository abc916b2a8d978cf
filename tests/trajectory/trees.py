"""Turn trees for the tests: a random generator of valid ones, a builder by hand, and naive oracles.

The oracles work token by token on whole sequences, so they share no idea with the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from gyre.ledger.microsteps import MicroStep
from gyre.ledger.turns import ROLES, ROOT, Span, Turn
from gyre.trajectory.settings import Settings
from gyre.trajectory.steps import ConsumedGroup, ExecutionRecord

Token = tuple[int, int]
"""(turn, place in the turn's own tokens: context, then output)."""


def turn(number: int, parent: Turn | int = ROOT, keep: int = 0, **fields: Any) -> Turn:
    """A turn of attempt 0 of execution "g0-0"; log-probabilities and spans follow the output."""
    output = fields.pop("output", [])
    return Turn(
        **{
            "execution": "g0-0",
            "attempt": 0,
            "turn": number,
            "parent": parent.turn if isinstance(parent, Turn) else parent,
            "keep": keep,
            "output": output,
            "logprobs": [-0.5 - (100 * number + place) / 2**10 for place in range(len(output))],
            "spans": [Span(1, 3, len(output))] if output else [],
            **fields,
        }
    )


@st.composite
def attempts(draw: st.DrawFn, execution: str = "g0-0", attempt: int = 0, most: int = 12) -> list[Turn]:
    """The turns of one attempt: continuations, forks anywhere, new roots (compaction, sub-agents), every role
    and status, turns without context or output, gaps in the numbering."""
    turns: list[Turn] = []
    lengths: dict[int, int] = {}
    number: int = draw(st.integers(0, 1))
    for _ in range(draw(st.integers(0, most))):
        parent, keep = ROOT, 0
        if len(turns) > 0 and draw(st.integers(0, 5)) > 0:
            recent = draw(st.booleans())
            parent = turns[-1].turn if recent else draw(st.sampled_from([each.turn for each in turns]))
            whole = draw(st.integers(0, 2))
            keep = lengths[parent] if whole else draw(st.integers(0, lengths[parent]))
        context = draw(st.lists(st.integers(0, 99), max_size=4))
        output = draw(st.lists(st.integers(100, 151_000), max_size=5))
        cut = draw(st.integers(0, len(output)))
        turns.append(
            turn(
                number,
                parent,
                keep,
                execution=execution,
                attempt=attempt,
                role=draw(st.sampled_from(("main", "main", *ROLES))),
                context=context,
                output=output,
                spans=[Span(1, 4, cut), Span(2, 5, len(output) - cut)],
                constrained=draw(st.integers(0, 7)) == 0,
                status=draw(st.sampled_from(("committed",) * 4 + ("undelivered", "aborted"))),
            )
        )
        lengths[number] = keep + len(context) + len(output)
        number += draw(st.sampled_from((1, 1, 1, 2)))
    return turns


@st.composite
def executions(draw: st.DrawFn, name: str) -> ExecutionRecord:
    """An execution with its turns of one to three attempts, shuffled, one of which counts."""
    count = draw(st.sampled_from((1, 1, 1, 2, 3)))
    turns = [each for attempt in range(count) for each in draw(attempts(name, attempt, most=7))]
    graded = draw(st.integers(0, 3)) > 0
    return ExecutionRecord(
        execution=name,
        attempt=count - 1,
        outcome="graded" if graded else "excluded",
        reward=draw(st.sampled_from((0.0, 0.25, 1.0))) if graded else None,
        turns=draw(st.permutations(turns)),
    )


@st.composite
def groups(draw: st.DrawFn, name: str) -> ConsumedGroup:
    size = draw(st.integers(1, 4))
    return ConsumedGroup(
        group=name,
        dispatch_version=draw(st.integers(0, 9)),
        executions=[draw(executions(f"{name}-{index:02}")) for index in range(size)],
        purpose=draw(st.sampled_from(("train", "train", "train", "eval"))),
        void=draw(st.integers(0, 5)) == 0,
    )


def settings(**fields: Any) -> Settings:
    return replace(Settings(seed=7, tokens_per_microstep=64, advantage="mean"), **fields)


def whole_sequences(turns: list[Turn]) -> dict[int, list[Token]]:
    """Every turn's whole sequence, token by token."""
    whole: dict[int, list[Token]] = {ROOT: []}
    for each in sorted(turns, key=lambda each: each.turn):
        own = [(each.turn, place) for place in range(len(each.context) + len(each.output))]
        whole[each.turn] = whole[each.parent][: each.keep] + own
    del whole[ROOT]
    return whole


def kept_whole(turns: list[Turn]) -> set[int]:
    """Turns whose whole sequence a descendant's begins with."""
    whole = whole_sequences(turns)
    parents = {each.turn: each.parent for each in turns}

    def ancestors(number: int) -> Iterator[int]:
        while (number := parents[number]) != ROOT:
            yield number

    return {
        above for number in whole for above in ancestors(number) if whole[number][: len(whole[above])] == whole[above]
    }


def possible(turns: list[Turn], max_tokens: int) -> set[Token]:
    """Sampled tokens that may be targets, as (turn, offset into the output)."""
    whole, continued = whole_sequences(turns), kept_whole(turns)
    found = set()
    for each in turns:
        delivered = each.status == "committed" or (each.status == "undelivered" and each.turn in continued)
        if delivered and each.role != "auxiliary" and not each.constrained:
            start = len(whole[each.turn]) - len(each.output)
            found |= {(each.turn, i) for i in range(len(each.output)) if 0 < start + i < max_tokens}
    return found


def leaf_targets(turns: list[Turn], max_tokens: int) -> dict[int, set[Token]]:
    """The possible targets on each leaf's path, by tip."""
    whole, may, contexts = whole_sequences(turns), possible(turns, max_tokens), {}
    contexts = {each.turn: len(each.context) for each in turns}
    return {
        tip: {(number, place - contexts[number]) for number, place in whole[tip]} & may
        for tip in sorted(whole.keys() - kept_whole(turns))
    }


def canonical_bytes(microstep: MicroStep) -> bytes:
    """Everything in a micro-step, as bytes that are equal exactly when the content is."""
    parts = []
    for name, value in vars(microstep).items():
        data = value.tobytes() + str(value.dtype).encode() if hasattr(value, "tobytes") else repr(value).encode()
        parts.append(f"{name}:{len(data)}:".encode() + data)
    return b"".join(parts)
