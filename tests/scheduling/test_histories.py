"""Whole runs of the small world: they end, and no law is broken on the way, whatever dies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gyre.ledger import events as ev
from gyre.ledger.state import RunState
from gyre.scheduling.settings import Settings

from .laws import Laws, scheduler_state
from .settings import draw, draw_faults, draw_training, make
from .world import Faults, Sim

CHUNK = 40
QUIET_CHUNKS = 4
FAULTY_CHUNKS = 10
TRAINING_CHUNKS = 4


def history(settings: Settings, seed: int, faults: Faults | None = None, **options: float) -> tuple[Sim, RunState]:
    laws = Laws(settings)
    sim = Sim(settings, seed, faults, laws.order, laws.calm, **options)  # type: ignore[arg-type]
    state = sim.run()
    laws.whole(state)
    assert scheduler_state(sim).consumed == state.consumed
    return sim, state


def restarts(sim: Sim) -> list[ev.RestartOrdered]:
    return [line.event for line in sim.lines if isinstance(line.event, ev.RestartOrdered)]


@pytest.mark.parametrize("chunk", range(QUIET_CHUNKS))
def test_quiet_histories(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        rng = random.Random(seed)
        settings = draw(rng)
        sim, state = history(settings, seed)
        assert not restarts(sim)
        assert list(state.lineages) == [1]
        assert len(sim.lines) < 200 * (settings.steps + 2) * settings.groups_per_step, "bounded"


@pytest.mark.parametrize("chunk", range(FAULTY_CHUNKS))
def test_faulty_histories(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        rng = random.Random(-1 - seed)
        history(draw(rng), seed, draw_faults(rng))


@pytest.mark.parametrize("chunk", range(TRAINING_CHUNKS))
def test_histories_with_much_training(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        history(*training(seed), speed=6.0)


def training(seed: int) -> tuple[Settings, int, Faults]:
    settings, faults = draw_training(random.Random(seed))
    return settings, seed, faults


@pytest.mark.parametrize(
    "seed",
    [
        10_078,  # an execution ends after a burst has raised the waterlevel over an earlier one's level
        11_555,  # a cell that is fenced reports a grant done
    ],
)
def test_moments_that_the_decider_once_missed(seed: int) -> None:
    history(*training(seed), speed=6.0)
    rng = random.Random(-1 - seed)
    history(draw(rng), seed, draw_faults(rng))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_many_faulty_histories(chunk: int) -> None:
    for seed in range(10_000 + chunk * CHUNK, 10_000 + (chunk + 1) * CHUNK):
        rng = random.Random(-1 - seed)
        history(draw(rng), seed, draw_faults(rng))
        history(*training(seed), speed=6.0)


@pytest.mark.parametrize("seed", range(12))
def test_both_of_two_cells_switch_in_every_burst(seed: int) -> None:
    settings = make(2, executions=3, groups_per_step=2, cell_room=4, steps=4)
    assert settings.cell_room < 6 <= 2 * settings.cell_room
    sim, _ = history(settings, seed)
    switched = [(line.event.cell, line.event.step) for line in sim.lines if isinstance(line.event, ev.TrainOrdered)]
    assert sorted(switched) == [(cell, step) for cell in settings.cells for step in range(1, 5)]


@pytest.mark.parametrize("seed", range(6))
def test_on_policy_without_lead(seed: int) -> None:
    _, state = history(make(3, lead_steps=0, steps=4), seed)
    for step, found in state.steps.items():
        assert {state.groups[consumed.group].version for consumed in found.consumed} == {step - 1}


@pytest.mark.parametrize("seed", range(8))
def test_satellites_share_the_work(seed: int) -> None:
    """With much to train, contributions of satellites are merged."""
    settings = make(3, executions=2, groups_per_step=4, cell_room=8, steps=2)
    _, state = history(settings, seed, speed=6.0)
    assert any(found.merged for found in state.lineages.values())


def test_a_satellite_lost_for_good_does_not_stop_the_run() -> None:
    lost = 0
    for seed in range(30):
        settings = make(2, executions=3, groups_per_step=2, cell_room=4, steps=3)
        faults = Faults(kill=0.02, budget=1, only=("cell-1",), never_back=frozenset({"cell-1"}))
        sim, _ = history(settings, seed, faults)
        lost += sim.births["cell-1"] == 1 and sim.notes.get("killed cell", 0) > 0
    assert lost > 10


def test_a_lost_core_redoes_exactly_the_steps_after_its_checkpoint() -> None:
    redone = 0
    for seed in range(30):
        settings = make(2, steps=4, checkpoint_every=3)
        _, state = history(settings, seed, Faults(kill=0.02, budget=2, only=("cell-0",)))
        numbers = sorted(state.lineages)
        for before, after in pairwise(numbers):
            opened = state.lineages[after].opened.step
            assert opened in (0, 3, 4)
            redone += sum(1 for step in state.lineages[before].committed if step > opened)
    assert redone > 0


@pytest.mark.parametrize("kill", [0.0, 0.03])
def test_cancel_ends_the_run_wherever_it_is(kill: float) -> None:
    """Saved are then all steps that a living core has committed: it is ended only after that."""
    saved = 0
    for seed in range(20):
        sim = Sim(make(2, steps=12, checkpoint_every=100), seed, Faults(kill=kill, budget=3, only=("cell-0",)))
        sim.at(3.0 * seed, lambda sim=sim: _cancel(sim))
        state = sim.run()
        assert state.ended == ev.RunEnded(state="cancelled", reason="gyre cancel")
        assert state.stopped == "cancelled"
        reign = state.reign()
        if reign is not None and reign.committed and state.incarnation("cell-0") == reign.incarnation:
            assert reign.committed[reign.step()].checkpointed or sim.notes.get("killed cell", 0)
            saved += reign.committed[reign.step()].checkpointed
    assert saved > 2


def test_cancel_now_saves_nothing() -> None:
    sim = Sim(make(2, steps=12, checkpoint_every=100), 1)
    sim.at(40.0, lambda: _cancel(sim, now=True))
    state = sim.run()
    assert state.ended is not None
    reign = state.reign()
    assert reign is not None
    assert not any(commit.checkpointed for commit in reign.committed.values())


def _cancel(sim: Sim, now: bool = False) -> None:
    from .world import Proc

    sim.append(Proc(sim, "control", 1), ev.CancelRequested(now=now))
