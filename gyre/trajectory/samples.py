"""A sample: a selected path with the targets that it trains.

Owns the step from turns of one execution to samples, and their weights. Invariants: the target behind row i
is token i + 1 of the same path and the recorded output token; the weights of an execution's samples sum to
one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre.ledger.microsteps import UInt16
from gyre.ledger.turns import Turn
from gyre.trajectory.experts import Records, experts_along
from gyre.trajectory.selection import Choice, Piece, select_paths
from gyre.trajectory.settings import Settings
from gyre.trajectory.targets import Reason, possible_targets
from gyre.trajectory.tree import TrajectoryError, Tree

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """T tokens, M >= 1 targets, in the order of the path.

    tokens: int32 (T,), root first, cut behind the last target (what follows has no gradient).
    target_rows: int32 (M,): row of `tokens` whose hidden state predicts the target, `tokens[row + 1]`.
    target_tokens, target_turns, target_offsets, target_versions, target_lineages: int32 (M,): token id, turn,
    place in that turn's output, and the weights that sampled it.
    behaviour_logprobs: float32 (M,), as recorded at `temperature`.
    weight: M / (sum of M over the samples of the execution). tip: last turn of the leaf.
    path: the turns that own the tokens, root first, each with the position where its own end: two samples of an
    execution share a prefix as far as these agree.
    experts: uint16 (T, layers, chosen) where routing is replayed and was recorded (`experts_along`).
    """

    execution: str
    attempt: int
    tip: int
    path: tuple[tuple[int, int], ...]
    tokens: Int32
    target_rows: Int32
    target_tokens: Int32
    behaviour_logprobs: Float32
    target_turns: Int32
    target_offsets: Int32
    target_versions: Int32
    target_lineages: Int32
    weight: float
    advantage: float
    temperature: float
    dispatch_version: int
    experts: UInt16 | None = None

    @property
    def targets(self) -> int:
        return len(self.target_rows)


def select_execution(
    turns: Iterable[Turn],
    settings: Settings,
    *,
    execution: str,
    attempt: int,
    advantage: float,
    dispatch_version: int,
    routing: Records | None = None,
) -> tuple[list[Sample], dict[Reason, int]]:
    """The samples of one attempt, in the order of the draws, and its other sampled tokens by reason.

    Raises `TrajectoryError` when the turns contradict each other, or the targets have several temperatures.
    """
    tree = Tree(execution, attempt, turns)
    targets, dropped = possible_targets(tree, settings.tokens_per_microstep)
    choices = select_paths(
        tree,
        targets,
        seed=settings.seed,
        max_paths=settings.max_paths,
        min_targets=settings.min_targets,
        selection=settings.selection,
    )
    trained = sum(choice.targets for choice in choices)
    not_selected = sum(possible.stop - possible.first for possible in targets.values()) - trained
    if not_selected:
        dropped["not_selected"] = not_selected
    temperature = _temperature(tree, choices)
    samples = [
        _sample(tree, choice, choice.targets / trained, advantage, temperature, dispatch_version, routing or {})
        for choice in choices
    ]
    return samples, dropped


def _sample(
    tree: Tree,
    choice: Choice,
    weight: float,
    advantage: float,
    temperature: float,
    dispatch_version: int,
    routing: Records,
) -> Sample:
    parts = [_piece(tree, piece) for piece in choice.pieces]
    rows, tokens, logprobs, turns, offsets, versions, lineages = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    length = int(rows[-1]) + 2
    path = tuple(tree.path(choice.tip, length))
    return Sample(
        execution=tree.execution,
        attempt=tree.attempt,
        tip=choice.tip,
        path=path,
        tokens=tree.whole(choice.tip, length),
        target_rows=rows,
        target_tokens=tokens,
        behaviour_logprobs=logprobs,
        target_turns=turns,
        target_offsets=offsets,
        target_versions=versions,
        target_lineages=lineages,
        weight=weight,
        advantage=advantage,
        temperature=temperature,
        dispatch_version=dispatch_version,
        experts=experts_along(path, tree.attempt, routing),
    )


def _piece(tree: Tree, piece: Piece) -> tuple[npt.NDArray[np.generic], ...]:
    """Rows, tokens, log-probabilities, turns, offsets, versions, lineages of one run of targets."""
    node = tree.nodes[piece.turn]
    offsets = np.arange(piece.start, piece.stop, dtype=np.int32)
    start = node.output_start - node.keep
    lengths = [span.length for span in node.turn.spans]
    spans = np.repeat(np.arange(len(lengths)), lengths)[piece.start : piece.stop]
    return (
        offsets + np.int32(node.output_start - 1),
        node.own[start + piece.start : start + piece.stop],
        np.array(node.turn.logprobs[piece.start : piece.stop], dtype=np.float32),
        np.full(len(offsets), piece.turn, dtype=np.int32),
        offsets,
        np.array([span.version for span in node.turn.spans], dtype=np.int32)[spans],
        np.array([span.lineage for span in node.turn.spans], dtype=np.int32)[spans],
    )


def _temperature(tree: Tree, choices: list[Choice]) -> float:
    """The one temperature of all targets: a sample has a single one, and a run samples at a single one."""
    found: float | None = None
    for piece in (piece for choice in choices for piece in choice.pieces):
        # A turn read back from a shard has the float32 of what the worker was told.
        temperature = float(np.float32(tree.nodes[piece.turn].turn.temperature))
        if found is not None and temperature != found:
            problem = f"sampled at temperature {temperature:g}, other turns at {found:g}"
            raise TrajectoryError(tree.execution, tree.attempt, piece.turn, problem)
        found = temperature
    return 1.0 if found is None else found
