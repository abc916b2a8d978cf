"""Tree against path packing, capped against uncapped paths, two cells against one: forward and backward.

Run: PYTHONPATH=. python tests/bench/bench_tree.py [--scale 1.0] [--rounds 3]

One process, one thread; seconds are CPU seconds of the process, so that a busy machine disturbs them little; the parts
of each comparison take turns, and medians over rounds are printed. Executions are built like Claude Code's: a main
thread that is compacted once and goes on from its system prompt and a summary, four sub-agents with a system prompt of
their own, calls that were tried again from the same prompt. The model (hidden 256, 4 layers, 3.3M parameters) is one
where linear layers matter and attention does not dominate: on paths of up to 650 tokens it is about a sixth of the
arithmetic.
Two cells are two processes that claim micro-steps from one queue. By the clock they are twice as fast only on a machine
with two idle cores; the CPU seconds of the busier one say how evenly the queue splits the work on any machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gyre.ledger.microsteps import MicroStep
from tests.training.forked import Forking, packed

VOCAB = 1024
BOUND = 4096
"""tokens_per_microstep"""
CELL_BOUND = 512
"""The same for two cells: many small micro-steps."""
SUB_AGENTS = 4
CAPS = (1, 5, 99)


def execution(name: str, seed: int, retries: int, scale: float, tail: int = 24) -> Forking:
    """`retries` calls of the main thread are each sampled twice, from late ones on: they share almost all of it."""
    made = Forking(name, seed, VOCAB)
    system, read, sampled, tail = (int(scale * n) for n in (120, 20, 30, tail))
    main = [made.call(system, sampled)]
    while len(main) < 10:
        main.append(made.call(read, sampled, main[-1]))
    made.call(read, sampled, main[-1], role="main-summary")
    second = [made.call(3 * read, sampled, main[0], system)]  # after the compaction: system prompt, summary
    while len(second) < 4:
        second.append(made.call(read, sampled, second[-1]))
    agents = [made.call(system, sampled, role="sub-agent")]
    while len(agents) < SUB_AGENTS:
        agents.append(made.call(read, sampled, agents[0], system, role="sub-agent"))
    for agent in agents:
        made.call(read, 2 * sampled, agent, role="sub-agent")
    for count in range(retries):
        turn = main[-1 - count % 4]
        made.call(0, tail, turn, made.whole(turn) - sampled)
    return made


DUPLICATION = {1.5: (1, 12), 3.0: (5, 12), 6.0: (15, 6)}
"""Path tokens / tree tokens, about: how many retries, and how long each is."""


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=768,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Cell:
    """One trainer of one thread."""

    def __init__(self, folder: Path) -> None:
        import torch

        from gyre.training.layout import Layout
        from gyre.training.settings import TrainSettings
        from gyre.training.trainer import Trainer

        torch.set_num_threads(1)
        self.trainer = Trainer(folder, TrainSettings(clip=(0.5, 0.5)), Layout(), core=False)
        self.trainer.load_hf()

    def train(self, microsteps: Sequence[MicroStep]) -> float:
        """CPU seconds of forward and backward."""
        from gyre.training.batch import MicroStepBatch

        began = time.process_time()
        for microstep in microsteps:
            self.trainer.train_microstep(MicroStepBatch.of(microstep))
        return time.process_time() - began


def tokens(microsteps: Sequence[MicroStep]) -> int:
    return sum(len(each.tokens) for each in microsteps)


def medians(cell: Cell, work: dict[Any, list[MicroStep]], rounds: int) -> dict[Any, float]:
    """Seconds of each, taking turns; a round to warm up is not counted."""
    seconds: dict[Any, list[float]] = {key: [] for key in work}
    for number in range(rounds + 1):
        for key, microsteps in work.items():
            took = cell.train(microsteps)
            if number:
                seconds[key].append(took)
    return {key: statistics.median(took) for key, took in seconds.items()}


def bench_packing(cell: Cell, scale: float, rounds: int) -> None:
    print("duplication    tokens: paths    tree  ratio    seconds: paths    tree  ratio    seconds ratio / token ratio")
    for retries, tail in DUPLICATION.values():
        samples = execution("g0-00", 1, retries, scale, tail).samples(BOUND)
        work = {packing: packed(samples, packing, BOUND) for packing in ("paths", "tree")}
        count, took = {key: tokens(each) for key, each in work.items()}, medians(cell, work, rounds)
        of_tokens, of_seconds = count["tree"] / count["paths"], took["tree"] / took["paths"]
        print(
            f"{1 / of_tokens:11.2f}   {count['paths']:14d} {count['tree']:7d} {of_tokens:6.3f}  "
            f"{took['paths']:15.2f} {took['tree']:7.2f} {of_seconds:6.3f} {of_seconds / of_tokens:32.2f}",
            flush=True,
        )


def bench_caps(cell: Cell, scale: float, rounds: int) -> None:
    made = [execution(f"g0-{i:02}", i, retries, scale) for i, retries in enumerate((0, 2, 4))]
    for packing in ("paths", "tree"):
        work = {}
        for cap in CAPS:
            samples = [sample for each in made for sample in each.samples(BOUND, max_paths=cap)]
            work[cap] = packed(samples, packing, BOUND)
        took = medians(cell, work, rounds)
        parts = [
            f"{'none' if cap == CAPS[-1] else cap} {took[cap] / took[CAPS[-1]]:.1%}"
            f" ({tokens(work[cap])} tokens, {sum(m.targets for m in work[cap])} targets)"
            for cap in CAPS
        ]
        print(f"max_paths, packing {packing}: seconds relative to none: {', '.join(parts)}", flush=True)


def cell_process(folder: Path, microsteps: list[MicroStep], claimed: Any, gate: Any, ends: Any) -> None:
    """Claim micro-steps until none are left, once for each pass of the gate."""
    cell = Cell(folder)
    cell.train(microsteps[:1])
    while True:
        gate.wait()
        began, used = time.perf_counter(), 0.0
        while True:
            with claimed.get_lock():
                number, claimed.value = claimed.value, claimed.value + 1
            if number >= len(microsteps):
                break
            used += cell.train(microsteps[number : number + 1])
        ends.put((began, time.perf_counter(), used))
        gate.wait()


def measure_cells(folder: Path, microsteps: list[MicroStep], count: int) -> Any:
    """Start `count` cells; returns a function that runs one pass: wall seconds, CPU seconds of the cell that used
    most, and how long the cell that ended first waited for the last."""
    context = multiprocessing.get_context("spawn")
    claimed, gate, ends = context.Value("i", 0), context.Barrier(count + 1), context.Queue()
    cells = [
        context.Process(target=cell_process, args=(folder, microsteps, claimed, gate, ends), daemon=True)
        for _ in range(count)
    ]
    for each in cells:
        each.start()

    def once() -> tuple[float, float, float]:
        claimed.value = 0
        gate.wait()
        spans = [ends.get() for _ in range(count)]
        gate.wait()
        stops = [stop for _, stop, _ in spans]
        wall = max(stops) - min(began for began, _, _ in spans)
        return wall, max(used for _, _, used in spans), max(stops) - min(stops)

    return once


def bench_cells(folder: Path, scale: float, rounds: int) -> None:
    samples = [s for i in range(3) for s in execution(f"g0-{i:02}", i, 3, scale).samples(BOUND)]
    bound = max(CELL_BOUND, *(len(sample.tokens) for sample in samples))
    microsteps = packed(samples, "paths", bound)
    one, two = measure_cells(folder, microsteps, 1), measure_cells(folder, microsteps, 2)
    speedups, of_cpu, waits = [], [], []
    for _ in range(rounds):
        (alone, alone_cpu, _), (both, both_cpu, wait) = one(), two()
        speedups.append(alone / both)
        of_cpu.append(alone_cpu / both_cpu)
        waits.append(wait / both)
    print(
        f"two cells against one, {len(microsteps)} micro-steps of {tokens(microsteps)} tokens: "
        f"{statistics.median(speedups):.2f} times as fast by the clock, {statistics.median(of_cpu):.2f} times by the"
        f" CPU seconds of the busier cell; the first to end waits "
        f"{statistics.median(waits):.1%} of the step for the last (load of the machine {os.getloadavg()[0]:.0f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the lengths of turns")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        cell = Cell(folder)
        bench_packing(cell, options.scale, options.rounds)
        bench_caps(cell, options.scale, options.rounds)
        bench_cells(folder, options.scale, options.rounds)


if __name__ == "__main__":
    main()
