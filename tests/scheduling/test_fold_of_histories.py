"""The fold of whole histories: one state for every interleaving, whatever was cut, read twice or read late."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
from hypothesis import given, settings, strategies as st

from gyre.ledger import events as ev
from gyre.ledger.fold import LateCut, afresh, fold, fold_all
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line

from .laws import scheduler_state
from .settings import draw, draw_faults
from .world import Faults, Sim

SEEDS = st.integers(0, 2**32)
FEW = settings(deadline=None, max_examples=40)
DROPPED = ev.Finished(execution="g00000-00", attempt=1, outcome="graded", reward=9.0)


def lawful(seed: int, kill: float = 0.04) -> tuple[Sim, list[Line]]:
    """The lines of a short run in which processes die, hang and write on as zombies."""
    rng = random.Random(seed)
    faults = draw_faults(rng)
    sim = Sim(draw(rng), seed, Faults(kill=kill, hang=0.02, refuse=faults.refuse, budget=faults.budget))
    sim.run()
    return sim, sim.lines


def interleave(lines: list[Line], rng: random.Random, cuts: dict[str, dict[int, int]]) -> list[Line]:
    """Another order: each writer's own is kept up to the cuts; what is beyond a cut comes whenever."""
    queues: dict[object, list[Line]] = defaultdict(list)
    for line in lines:
        beyond = line.n > cuts.get(line.writer, {}).get(line.incarnation, line.n)
        queues[(line.writer, line.incarnation) if beyond else line.writer].append(line)
    for writer, queue in queues.items():
        if isinstance(writer, str):
            queue.sort(key=lambda line: (line.incarnation, line.n))
    out: list[Line] = []
    last: dict[tuple[str, int], int] = {}
    while queues:
        key = rng.choice(list(queues))
        for _ in range(rng.choice([1, 1, 3, 40])):
            if not queues[key]:
                break
            line = queues[key][0]
            if isinstance(key, tuple) and last.get(key, -1) < line.n - 1:
                break  # its file's earlier lines first
            last[line.writer, line.incarnation] = line.n
            out.append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
    return out


@FEW
@given(SEEDS)
def test_every_interleaving_gives_one_state(seed: int) -> None:
    _, lines = lawful(seed)
    rng = random.Random(seed)
    whole = fold_all(lines)
    for _ in range(3):
        assert fold_all(interleave(lines, rng, whole.cuts)) == whole


@FEW
@given(SEEDS)
def test_dead_run_gives_what_the_live_scheduler_knew(seed: int) -> None:
    sim, lines = lawful(seed)
    live = scheduler_state(sim)
    # what the scheduler had read when it ended, for a few last lines of others were on their way
    read = [line for line in lines if line.n <= live.seen.get(line.writer, {}).get(line.incarnation, -1)]
    assert fold_all(read) == live


@FEW
@given(SEEDS)
def test_reading_twice_changes_nothing(seed: int) -> None:
    _, lines = lawful(seed)
    rng = random.Random(seed)
    whole = fold_all(lines)
    start = rng.randrange(len(lines))
    state = _incremental([*lines[: start + 1], *lines[:start], *lines])
    assert state == whole
    assert not any(fold(state, line) for line in lines)


@FEW
@given(SEEDS)
def test_snapshot_and_the_rest_are_the_whole(seed: int) -> None:
    _, lines = lawful(seed)
    whole = fold_all(lines)
    start = random.Random(seed).randrange(len(lines) + 1)
    state = fold_all(lines[:start])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RunState)
    for line in lines[start:]:
        fold(state, line)
    assert state == whole


@FEW
@given(SEEDS)
def test_lines_beyond_a_cut_never_count(seed: int) -> None:
    """What a cut incarnation writes on, whenever it is read, changes nothing."""
    _, lines = lawful(seed)
    rng = random.Random(seed)
    whole = fold_all(lines)
    more = []
    for writer, cuts in whole.cuts.items():
        for incarnation, cut in cuts.items():
            last = max((x.n for x in lines if (x.writer, x.incarnation) == (writer, incarnation)), default=cut)
            junk: list[ev.Event] = [DROPPED, ev.CellEntered(state="failed"), ev.StepFilled(step=1)]
            more += [Line(writer, incarnation, last + 1 + i, 5.0, event) for i, event in enumerate(junk)]
    everything = fold_all(interleave([*lines, *more], rng, whole.cuts))
    assert everything == whole


@FEW
@given(SEEDS)
def test_incremental_with_refolds_is_fold_all(seed: int) -> None:
    _, lines = lawful(seed)
    whole = fold_all(lines)
    assert _incremental(interleave(lines, random.Random(seed), whole.cuts)) == whole


def _incremental(lines: list[Line]) -> RunState:
    """Line by line, as a reader does it: from the start again whenever a cut comes late."""
    state, read = RunState(), []
    for line in lines:
        read.append(line)
        try:
            fold(state, line)
        except LateCut:
            state = _refold(afresh(state), read)
    return state


def _refold(state: RunState, read: list[Line]) -> RunState:
    while True:
        try:
            for line in read:
                fold(state, line)
            return state
        except LateCut:
            state = afresh(state)
