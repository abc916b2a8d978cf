"""An execution that branches, laid out as paths and as a tree: training input for the tests and the bench."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.ledger.microsteps import MicroStep
from gyre.ledger.turns import ROOT, Span, Turn
from gyre.trajectory.packing import Packer
from gyre.trajectory.samples import Sample, select_execution
from gyre.trajectory.settings import Settings

VOCAB = 601


class Forking:
    """Turns of one attempt with random tokens; `call` adds one and returns its number."""

    def __init__(self, execution: str = "g0-00", seed: int = 0, vocab: int = VOCAB) -> None:
        self.execution = execution
        self.turns: list[Turn] = []
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab
        self._lengths: dict[int, int] = {}

    def call(self, read: int, sampled: int, after: int = ROOT, keep: int | None = None, role: str = "main") -> int:
        """A turn that keeps `keep` tokens (all by default) of turn `after`, reads and samples this many."""
        number = len(self.turns)
        kept = 0 if after == ROOT else self._lengths[after] if keep is None else keep
        self.turns.append(
            Turn(
                execution=self.execution,
                attempt=1,
                turn=number,
                parent=after,
                keep=kept,
                role=role,  # type: ignore[arg-type]
                context=self._rng.integers(0, self._vocab, read).tolist(),
                output=self._rng.integers(0, self._vocab, sampled).tolist(),
                logprobs=self._rng.normal(-6.4, 0.3, sampled).tolist(),
                spans=[Span(1, 0, sampled)],
            )
        )
        self._lengths[number] = kept + read + sampled
        return number

    def whole(self, turn: int) -> int:
        """Tokens of the whole sequence of `turn`."""
        return self._lengths[turn]

    def samples(self, bound: int, advantage: float = 1.0, max_paths: int = 99) -> list[Sample]:
        settings = Settings(seed=1, tokens_per_microstep=bound, max_paths=max_paths)
        samples, _ = select_execution(
            self.turns, settings, execution=self.execution, attempt=1, advantage=advantage, dispatch_version=0
        )
        return samples


def forked(execution: str = "g0-00", seed: int = 0) -> Forking:
    """A conversation with a fork in the middle of an output, one of a token, a retry, and a new root."""
    made = Forking(execution, seed)
    first = made.call(20, 9)
    second = made.call(5, 12, first)
    made.call(7, 6, second)
    made.call(4, 8, second, made.whole(second) - 5)
    made.call(0, 5, first, made.whole(first) - 9)  # the same prompt again
    third = made.call(3, 7, first, 1, role="sub-agent")
    made.call(2, 4, third, role="sub-agent")
    made.call(6, 10, role="main-summary")
    return made


def packed(samples: Sequence[Sample], packing: str, bound: int) -> list[MicroStep]:
    packer = Packer(1, bound, packing)  # type: ignore[arg-type]
    return packer.add_group(samples) + packer.end_step()


def place_of_targets(microsteps: Sequence[MicroStep]) -> list[tuple[str, int, int]]:
    """(execution, turn, offset) of every target, in the order of the micro-steps."""
    return [
        (each.executions[sample], turn, offset)
        for each in microsteps
        for sample, turn, offset in zip(
            each.target_samples.tolist(), each.target_turns.tolist(), each.target_offsets.tolist(), strict=True
        )
    ]
