"""Liveness: judged by the watcher's own clock, from changes of the counter alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gyre.ledger.liveness import Heartbeat, LivenessWatch, create_counter, read_counter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_beats_go_up_in_place(tmp_path: Path) -> None:
    path = tmp_path / "worker-0"
    create_counter(path)
    assert read_counter(path) == 0
    heart = Heartbeat(path)
    sizes = set()
    for expected in (1, 2, 3):
        heart.beat()
        assert read_counter(path) == expected
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1
    Heartbeat(path).beat()
    assert read_counter(path) == 4
    create_counter(path)
    assert read_counter(path) == 4


@pytest.mark.parametrize("content", [b"", b"12", b"x" * 20, b"-1" * 10])
def test_what_is_no_counter_is_no_news(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c"
    assert read_counter(path) is None
    path.write_bytes(content)
    assert read_counter(path) is None


def test_a_process_is_dead_once_its_counter_stands_still() -> None:
    clock = Clock()
    watch = LivenessWatch(clock, deadline=10.0)
    watch.observe("a", 5)
    clock.now += 10.0
    watch.observe("a", 5)
    assert not watch.dead("a") and watch.silence("a") == 10.0
    clock.now += 0.1
    assert watch.dead("a")
    watch.observe("a", 6)
    assert not watch.dead("a") and watch.silence("a") == 0.0


def test_no_beat_yet_is_no_death() -> None:
    clock = Clock()
    watch = LivenessWatch(clock, deadline=1.0)
    watch.observe("a", 0)
    watch.observe("a", None)
    clock.now += 1000.0
    assert not watch.seen("a") and not watch.dead("a") and watch.silence("a") is None


def test_an_unreadable_counter_does_not_keep_a_process_alive() -> None:
    clock = Clock()
    watch = LivenessWatch(clock, deadline=1.0)
    watch.observe("a", 1)
    clock.now += 2.0
    watch.observe("a", None)
    assert watch.dead("a")
    watch.forget("a")
    assert not watch.dead("a")


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=30))
def test_death_is_exactly_a_silence_beyond_the_deadline(steps: list[tuple[float, bool]]) -> None:
    clock = Clock()
    watch = LivenessWatch(clock, deadline=10.0)
    counter, changed = 1, clock.now
    watch.observe("a", counter)
    for wait, beats in steps:
        clock.now += wait
        if beats:
            counter, changed = counter + 1, clock.now
        watch.observe("a", counter)
        assert watch.dead("a") == (clock.now - changed > 10.0)
