"""Turns, micro-steps and events that the tests of the ledger write, and hypothesis strategies for them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gyre.ledger.events import Finished, Started
from gyre.ledger.microsteps import MicroStep
from gyre.ledger.turns import Span, Turn

INTS = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(width=32, allow_nan=False)

EVENTS = st.one_of(
    st.builds(Started, execution=TEXT, attempt=INTS),
    st.builds(
        Finished,
        execution=TEXT,
        attempt=INTS,
        outcome=st.sampled_from(["graded", "excluded", "retry"]),
        reason=TEXT,
        reward=st.none() | st.floats(-10, 10),
    ),
)


def started(i: int) -> Started:
    return Started(execution=f"g00001-{i:02d}", attempt=i)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    count = sum(lengths)
    return Turn(
        execution=draw(TEXT),
        attempt=draw(INTS),
        turn=draw(INTS),
        parent=draw(st.integers(-1, 100)),
        keep=draw(INTS),
        thread=draw(TEXT),
        evidence=draw(TEXT),
        context=draw(st.lists(INTS, max_size=5)),
        output=draw(st.lists(INTS, min_size=count, max_size=count)),
        logprobs=draw(st.lists(FLOATS, min_size=count, max_size=count)),
        spans=[Span(draw(INTS), draw(INTS), length) for length in lengths],
        temperature=draw(st.floats(0.125, 2.0, width=32)),
        constrained=draw(st.booleans()),
        started=draw(st.floats(0, 2e9)),
        cell=draw(TEXT),
    )


def turn(i: int, tokens: int = 3) -> Turn:
    return Turn(
        execution=f"g00001-{i % 4:02d}",
        attempt=1,
        turn=i,
        context=list(range(i, i + tokens)),
        output=[i, i + 1],
        logprobs=[-0.5, -0.25],
        spans=[Span(1, 2, 1), Span(1, 3, 1)],
        cell="cell-0",
    )


def microstep(seed: int = 0, tokens: int = 12, targets: int = 5, samples: int = 2, step: int = 3) -> MicroStep:
    rng = np.random.default_rng(seed)

    def ints(count: int) -> np.ndarray:
        return rng.integers(0, 1000, count).astype(np.int32)

    def floats(count: int) -> np.ndarray:
        return rng.standard_normal(count).astype(np.float32)

    return MicroStep(
        step=step,
        tokens=ints(tokens),
        positions=ints(tokens),
        segments=ints(tokens),
        target_rows=ints(targets),
        target_tokens=ints(targets),
        behaviour_logprobs=floats(targets),
        target_samples=ints(targets),
        target_turns=ints(targets),
        target_offsets=ints(targets),
        target_versions=ints(targets),
        target_lineages=ints(targets),
        executions=tuple(f"g00001-{i:02d}" for i in range(samples)),
        attempts=ints(samples),
        advantages=floats(samples),
        weights=floats(samples),
        temperatures=floats(samples),
        dispatch_versions=ints(samples),
        parents=ints(samples),
        experts=rng.integers(0, 1 << 16, (tokens, 2, 3)).astype(np.uint16),
    )
