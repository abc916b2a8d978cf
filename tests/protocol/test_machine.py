"""The protocol as a state machine: any order of actions, any faults between them, and yet each micro-step counts once.

hypothesis picks what happens; what must hold is checked where it happens (tests/protocol/cells.py,
tests/scheduling/laws.py), and over the whole history once the faults have ended and the run has to finish.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, Phase, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.protocol.cells import RankedCell
from tests.protocol.moments import CORE, SATELLITE, at, fencing, merged_unheard, reach
from tests.protocol.world import Free
from tests.scheduling.settings import make

SEEDS = st.integers(0, 1 << 16)
NAMES = ("cell-0", "cell-1", "cell-2", "scheduler", "processor", "worker-0")
CELLS = st.sampled_from(NAMES[:3])
COMMITTING = ("added and not merged", "about to commit", "stepped", "saving", "saved and not committed")
ANY = st.sampled_from(NAMES)


class Protocol(RuleBasedStateMachine):
    sim: Free

    @initialize(
        seed=SEEDS,
        ranks=st.integers(1, 3),
        mu=st.integers(1, 2),
        lead=st.integers(0, 1),
        every=st.integers(1, 2),
        mode=st.sampled_from(["elastic", "elastic", "colocate", "async"]),
        bundle=st.integers(1, 2),
        refuse=st.sampled_from([0.0, 0.4]),
        where=st.sampled_from(["", *SATELLITE]),
    )
    def begin(
        self,
        seed: int,
        ranks: int,
        mu: int,
        lead: int,
        every: int,
        mode: str,
        bundle: int,
        refuse: float,
        where: str,
    ) -> None:
        schedule = {"mode": mode, "steps_per_burst": mu, "lead_steps": lead, "training_cells": 2}
        made = make(
            3,
            seed=1 + seed % 9,
            executions=2,
            groups_per_step=5,
            cell_room=12,
            steps=2,
            attempts=9,
            checkpoint_every=every,
            microsteps_per_grant=bundle,
            **schedule,
        )
        self.settled, self.sim = seed, Free(made, seed, ranks, refuse)
        if where:  # else it begins with the run: faults from the first line on
            reach(self.sim, lambda sim: at(sim, "cell-1", where), seed, most=600)

    @rule(seed=SEEDS, count=st.integers(1, 60))
    def go_on(self, seed: int, count: int) -> None:
        self._go_on(seed, count)

    def _go_on(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.sim.step(rng.randrange(1 << 30))

    @rule(seed=SEEDS, where=st.sampled_from(CORE))
    def until_the_core_is(self, seed: int, where: str) -> None:
        reach(self.sim, lambda sim: at(sim, "cell-0", where), seed, most=400)

    @rule(seed=SEEDS, cell=st.sampled_from(NAMES[1:3]), where=st.sampled_from(SATELLITE))
    def until_a_satellite_is(self, seed: int, cell: str, where: str) -> None:
        reach(self.sim, lambda sim: at(sim, cell, where), seed, most=400)

    @rule(seed=SEEDS, moment=st.sampled_from([fencing, merged_unheard]))
    def until_an_answer_is_on_its_way(self, seed: int, moment: object) -> None:
        reach(self.sim, moment, seed, most=150)  # type: ignore[arg-type]

    @rule(
        seed=SEEDS,
        cell=CELLS,
        where=st.sampled_from([*SATELLITE, "added and not merged"]),
        meanwhile=st.integers(0, 60),
        fate=st.sampled_from(["wakes", "is replaced", "stays"]),
    )
    def is_taken_for_dead(self, seed: int, cell: str, where: str, meanwhile: int, fate: str) -> None:
        """In the midst of something it stands still for so long that it is fenced. Then it may go on as if nothing was,
        by itself or beside its successor."""
        reach(self.sim, lambda sim: at(sim, cell, where), seed, most=400)
        self.sim.stall(cell)
        self.sim.notice()
        self._go_on(seed, meanwhile)
        if fate == "wakes":
            self.sim.wake(cell)
        elif fate == "is replaced":
            self.sim.restart(cell)

    @rule(seed=SEEDS, where=st.sampled_from(COMMITTING), meanwhile=st.integers(0, 60), dies=st.booleans())
    def the_core_is_replaced(self, seed: int, where: str, meanwhile: int, dies: bool) -> None:
        """Its successor opens a lineage while it still commits the step; that one may die soon."""
        reach(self.sim, lambda sim: at(sim, "cell-0", where), seed, most=400)
        self.sim.stall("cell-0")
        self.sim.notice()
        self._go_on(seed, 5)
        self.sim.restart("cell-0")
        self._go_on(seed, meanwhile)
        if dies and not self.sim.procs["cell-0"].gone:
            self.sim.kill(self.sim.procs["cell-0"])

    @rule(seed=SEEDS, name=ANY, cell=CELLS, where=st.sampled_from(sorted({*CORE, *SATELLITE})))
    def kill_while(self, seed: int, name: str, cell: str, where: str) -> None:
        """It dies while a cell is in the midst of something: that cell itself, or another."""
        if reach(self.sim, lambda sim: at(sim, cell, where), seed, most=400) and not self.sim.procs[name].gone:
            self.sim.kill(self.sim.procs[name])

    @rule(name=ANY)
    def kill(self, name: str) -> None:
        if not self.sim.procs[name].gone:
            self.sim.kill(self.sim.procs[name])

    @rule(name=ANY, lines=st.integers(1, 4), after=st.booleans())
    def will_die_at_a_line(self, name: str, lines: int, after: bool) -> None:
        self.sim.armed[name] = (lines, after)

    @rule(name=CELLS)
    def lose_a_rank(self, name: str) -> None:
        proc = self.sim.procs[name]
        if isinstance(proc, RankedCell):
            proc.broken = True

    @rule(name=ANY)
    def stand_still(self, name: str) -> None:
        self.sim.stall(name)

    @precondition(lambda self: self.sim.stalled)
    @rule()
    def wake_all(self) -> None:
        for name in list(self.sim.stalled):
            self.sim.wake(name)

    @precondition(lambda self: self.sim.stalled or self.sim.down())
    @rule()
    def notice(self) -> None:
        self.sim.notice()

    @precondition(lambda self: self.sim.stalled or self.sim.down())
    @rule(choice=SEEDS)
    def replace(self, choice: int) -> None:
        """One that is gone comes back; one that stands still is replaced, and goes on as a zombie."""
        able = sorted({*self.sim.stalled, *self.sim.down()})
        self.sim.restart(able[choice % len(able)])

    @rule()
    def time_passes(self) -> None:
        if not self.sim.ended:
            self.sim.pass_time()

    @rule(cell=CELLS)
    def unreachable(self, cell: str) -> None:
        """Nobody can pull what this cell has published any more."""
        owner = self.sim.procs[cell]
        gradients = [name for name, held in self.sim.manifests.items() if held is owner and name.startswith("g/")]
        for name in gradients:
            del self.sim.manifests[name]

    def teardown(self) -> None:
        if hasattr(self, "sim") and sys.exc_info()[0] is None:  # after a violation there is no run to finish
            self.sim.settle(self.settled)


CHUNK = 25
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def explore(chunk: int, steps: int, histories: int = CHUNK, phases: Collection[Phase] = tuple(Phase)) -> None:
    """That many histories of up to `steps` rules each; equal chunks are equal histories while the same modules are
    loaded: hypothesis takes constants from their sources."""
    chosen = settings(
        max_examples=histories,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=CHECKS,
        phases=phases,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(seed(chunk)(Protocol), settings=chosen)


@pytest.mark.parametrize("chunk", range(3))
def test_histories(chunk: int) -> None:
    explore(chunk, steps=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(9, 17))
def test_thousands_of_histories(chunk: int) -> None:
    explore(chunk, steps=20, histories=250)


def test_weights_that_are_ordered_while_a_step_is_made_are_kept() -> None:
    """The core reads the ledger once more before it retires: the order came after its last poll."""
    found = Protocol()
    found.begin(ranks=1, seed=24, mu=2, lead=0, every=2, mode="elastic", bundle=1, where="summing", refuse=0.4)
    found.until_the_core_is(seed=1, where="about to commit")
    found.lose_a_rank(name="cell-1")
    found.kill(name="cell-2")
    found.replace(choice=0)
    found.until_the_core_is(seed=93, where="loading a checkpoint")
    found.teardown()
