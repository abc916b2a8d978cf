"""Kill -9, each process of a run in the middle of its work: the run completes, nothing is lost or counted twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.chaos import moments, procs
from tests.chaos.harness import SMALL_MICROSTEPS, Drill
from tests.chaos.moments import CORE, SATELLITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Drills = Callable[..., Drill]


def test_the_satellites_agent_with_gradients_that_the_core_lacks(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    lost = drill.until(moments.unmerged)
    drill.kill(drill.pid(SATELLITE))
    drill.assert_completed()
    assert drill.state.incarnation(SATELLITE) == 2
    assert len(drill.state.lineages) == 1  # the core never noticed
    merged = moments.merged(drill.state)
    for name in lost:  # granted again, unless it had been merged before the kill
        assert name in merged or len(moments.grants(drill.state, name)) == 2
    drill.assert_replays(2)


def test_the_satellites_rank_with_an_offer_that_is_not_merged(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    drill.until(moments.offered)
    drill.kill(drill.rank(SATELLITE))
    drill.assert_completed()
    assert drill.state.incarnation(SATELLITE) == 2
    assert len(drill.state.lineages) == 1


def test_the_cores_agent_in_the_second_step(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(lambda state: moments.core_training(state, step=2))
    done = {name: e.outcome() for name, e in drill.state.executions.items()}
    drill.kill(drill.pid(CORE))
    drill.assert_completed()
    assert [(number, found.opened.step) for number, found in drill.state.lineages.items()] == [(1, 0), (2, 1)]
    assert drill.state.history()[2][0] == 2  # done again, from its micro-step files
    assert {name: e.outcome() for name, e in drill.state.executions.items() if name in done} == done
    drill.assert_replays(2)


def test_the_cores_agent_with_an_offer_that_it_has_not_answered(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    drill.until(moments.offered)
    drill.kill(drill.pid(CORE))
    drill.assert_completed()
    assert drill.state.incarnation(CORE) == 2
    assert drill.state.incarnation(SATELLITE) == 1  # its gradients were void; it trained again
    drill.assert_replays(2)


def test_a_satellite_that_stands_still_is_fenced_and_starts_again(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    drill.until(moments.unmerged)
    agent = drill.pid(SATELLITE)
    procs.freeze(agent)
    held = moments.unmerged(drill.state)
    drill.until(lambda state: not held or state.lineages[1].fenced or set(held) <= moments.merged(state))
    procs.thaw(agent)
    drill.assert_completed()
    assert len(drill.state.lineages) == 1
    drill.assert_replays(1)


def test_a_rank_that_stands_still_in_training(drills: Drills) -> None:
    """Its agent is well and beats: nobody but the agent can notice."""
    drill = drills(settings=(*SMALL_MICROSTEPS, "local.liveness=8s"))
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    drill.until(moments.unmerged)
    procs.freeze(drill.rank(SATELLITE))
    drill.assert_completed()
    assert drill.state.incarnation(SATELLITE) == 2
    assert len(drill.state.lineages) == 1


def test_the_cores_rank_while_executions_run(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    live = drill.until(lambda state: moments.live(state, CORE))
    before = moments.attempts(drill.state, live)
    drill.kill(drill.rank(CORE))
    drill.assert_completed()
    assert drill.state.incarnation(CORE) == 2
    assert moments.attempts(drill.state, live) == before  # they waited, or went elsewhere, and went on


def test_one_of_a_cells_engines_while_it_serves(drills: Drills) -> None:
    """The cell's service is interrupted, and nothing else: the other engine stays, and gets its weights again."""
    drill = drills(settings=(*SMALL_MICROSTEPS, "rollout.engines_per_cell=2"))
    drill.submit()
    live = drill.until(lambda state: moments.live(state, SATELLITE))
    before, other, engine = moments.attempts(drill.state, live), *(drill.engine(SATELLITE, n) for n in range(2))
    drill.kill(engine)
    drill.assert_completed()
    assert drill.state.incarnation(SATELLITE) == 1
    assert drill.engine(SATELLITE, 1) != engine
    assert drill.engine(SATELLITE, 0) == other
    assert moments.attempts(drill.state, live) == before
    drill.assert_replays(2)


def test_the_worker_with_its_sandboxes(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(moments.live)
    inside = drill.wait(lambda: procs.sandboxes(drill.run.path))
    drill.until(moments.live)
    live = moments.live(drill.state)
    before = moments.attempts(drill.state, live)
    drill.kill(drill.pid("worker-0"))
    drill.wait(lambda: not any(procs.alive(pid) for pid in inside))
    drill.assert_completed()
    after = moments.attempts(drill.state, live)
    assert all(after[name] == before[name] + 1 for name in live), (before, after)


def test_the_processor_in_the_middle_of_a_step(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    _, inside = drill.hold_one()  # so that one group has to wait for the other
    announced = drill.until(moments.half_packed)
    drill.kill(drill.pid("processor"))
    procs.thaw(*inside)
    drill.assert_completed()
    assert drill.state.incarnation("processor") == 2
    packed = {name for step in drill.state.steps.values() if step.packed for name in step.packed.microsteps}
    assert set(announced) <= packed  # its successor found them, and went on after them
    drill.assert_replays(2)


def test_the_scheduler(drills: Drills) -> None:
    drill = drills()
    drill.submit()
    drill.until(lambda state: moments.core_training(state, step=1))
    drill.kill(drill.pid("scheduler"))
    drill.assert_completed()
    assert drill.state.incarnation("scheduler") == 2
    assert drill.state.incarnation(CORE) == drill.state.incarnation(SATELLITE) == 1
    assert moments.attempts(drill.state, list(drill.state.executions)) == dict.fromkeys(drill.state.executions, 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_several_at_once(drills: Drills, seed: int) -> None:
    drill = drills(steps=3)
    rng = random.Random(seed)
    drill.submit()
    moment = 30
    for _ in range(3):
        moment += rng.randint(5, 60)
        drill.until(lambda state, moment=moment: moments.lines(state) >= moment)
        names = rng.sample(sorted(drill.state.processes), rng.randint(2, 4))
        drill.kill(*(drill.pid(name) for name in names if procs.alive(drill.pid(name))))
        moment = moments.lines(drill.state)
    drill.assert_completed()
