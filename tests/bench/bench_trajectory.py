"""What the processor pays for one long execution: turns to micro-steps.

Run: python tests/bench/bench_trajectory.py
300 turns and 200,000 new tokens: a main conversation that is compacted twice, sub-agents, and auxiliary calls on top.
"""

from __future__ import annotations

import random
import time

from gyre.ledger.turns import ROOT, Span, Turn
from gyre.trajectory.packing import Packer
from gyre.trajectory.samples import select_execution
from gyre.trajectory.settings import Settings

TURNS = 300
TOKENS = 200_000
CONTEXT = 131_072


def execution(turns: int, tokens: int) -> list[Turn]:
    """Each turn reads about as much as it samples; every 10th is auxiliary, every 100th a compaction."""
    source = random.Random(1)
    made: list[Turn] = []
    tips: dict[str, tuple[int, int]] = {}
    half = tokens // turns // 2
    for number in range(turns):
        thread = "main" if number % 3 else f"helper-{number // 60}"
        if thread == "main" and number % 100 == 99:
            tips.pop("main", None)
        parent, keep = tips.get(thread, (ROOT, 0))
        auxiliary = number % 10 == 9
        made.append(
            Turn(
                execution="g00000-00",
                attempt=0,
                turn=number,
                parent=parent,
                keep=keep,
                role="auxiliary" if auxiliary else "main" if thread == "main" else "sub-agent",
                context=[source.randrange(150_000) for _ in range(half)],
                output=[source.randrange(150_000) for _ in range(half)],
                logprobs=[-source.random() for _ in range(half)],
                spans=[Span(1, 0, half // 2), Span(1, 1, half - half // 2)],
            )
        )
        if not auxiliary:
            tips[thread] = (number, keep + 2 * half)
    return made


def measure(turns: int, tokens: int) -> None:
    made = execution(turns, tokens)
    settings = Settings(seed=1, tokens_per_microstep=CONTEXT)
    start = time.perf_counter()
    samples, dropped = select_execution(
        made, settings, execution="g00000-00", attempt=0, advantage=1.0, dispatch_version=0
    )
    selected = time.perf_counter()
    packer = Packer(0, CONTEXT)
    microsteps = packer.add_group(samples) + packer.end_step()
    packed = time.perf_counter()
    print(
        f"{turns} turns, {tokens} tokens: build and select {selected - start:.3f} s, pack {packed - selected:.3f} s; "
        f"{len(samples)} samples, {sum(len(each.tokens) for each in microsteps)} packed tokens, "
        f"{sum(each.targets for each in microsteps)} targets, dropped {dropped}"
    )


if __name__ == "__main__":
    measure(TURNS, TOKENS)
    measure(10 * TURNS, 10 * TOKENS)
