"""How long a call of `decide()` takes late in a long run: 10,000 groups behind it, and a burst under way.

Run it: python tests/bench/bench_decide.py
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from bench_status import CELLS, GROUPS, Said, burst, history, training

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.scheduling.decide import decide
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

STEPS = 10_000 // GROUPS
CALLS = 200

SETTINGS = Settings(
    seed=1,
    mode="elastic",
    executions=16,
    groups_per_step=GROUPS,
    min_graded=2,
    steps=10 * STEPS,
    steps_per_burst=1,
    lead_steps=0,
    max_overtake=64,
    cell_room=128,
    training_cells=1,
    cells=CELLS,
    workers=("worker-0",),
    attempts=3,
    microsteps_per_grant=1,
    checkpoint_every=1,
    phase_timeout=600.0,
    tasks=tuple(f"task-{i}" for i in range(100)),
)


class Teller:
    def __init__(self) -> None:
        self.state = RunState()
        self.numbers: dict[str, int] = {}

    def tell(self, said: Iterable[Said]) -> None:
        for writer, event in said:
            n = self.numbers[writer] = self.numbers.get(writer, -1) + 1
            fold(self.state, Line(writer, 1, n, 1.0, event))

    def time(self, what: str) -> None:
        """Orders are folded until there are none; then each call says nothing, as most do."""
        while orders := decide(World(self.state, SETTINGS)):
            self.tell(("scheduler", order) for order in orders)
        began = time.process_time()
        for _ in range(CALLS):
            decide(World(self.state, SETTINGS))
        took = (time.process_time() - began) / CALLS
        print(f"{what}: {1000 * took:.2f} ms a call, {len(self.state.groups)} groups, w = {self.state.waterlevel}")


def main() -> None:
    teller = Teller()
    teller.tell(history(STEPS))
    teller.time("burst just opened")
    step = STEPS + 1
    rest = [(writer, event) for writer, event in burst(step) if writer == "worker-0"]
    teller.tell(rest[: len(rest) * 3 // 4])
    teller.time("half of the executions have ended")
    teller.tell(rest[len(rest) * 3 // 4 :])
    teller.tell((w, e) for w, e in training(step) if w == "processor")
    teller.tell(("worker-0", ev.RoutesAcknowledged(epoch=1, n=n)) for n in [teller.state.routed[1]])
    teller.time("all have ended, the core is ordered to train")


if __name__ == "__main__":
    main()
