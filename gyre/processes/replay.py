"""Replay: train again from the recorded shards, without rollout.

Owns the order in which a replayed step adds its gradients: that of the journal. Invariant: with the run's own settings
the micro-steps have the announced digests, and the weights after each step are bit-equal to those that the run
published (same layout, same machine); with other settings it tells what would have been trained instead. A cell of
several ranks is replayed by as many processes that all do the same; the first of them speaks.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from gyre.errors import UserError
from gyre.ledger.checkpoints import read_info, stands
from gyre.ledger.job import Job
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import digest
from gyre.ledger.microsteps import MicroStep
from gyre.ledger.routing import Routing, read_routing
from gyre.ledger.shards import TurnReader
from gyre.ledger.state import CellIncarnation, RunState
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.processes.processor import StepInHand
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe
from gyre.trajectory.experts import Records
from gyre.trajectory.settings import Settings


class ReplayedStep(Struct, frozen=True, kw_only=True):
    """`microsteps_equal`: every micro-step has the digest that the run announced. `weights_equal`: bit-equal to what
    the run published; None when the run did not train this step from these micro-steps or in this layout, or nothing
    was trained. `gradient_norm_by_run`: None when the run did not commit this step. `gradient_difference`: in another
    layout, |g - g'| / |g'| with the run's clipped gradient g', where the checkpoints before and after it are kept.
    """

    step: int
    microsteps: int
    microsteps_equal: bool
    tokens_trained: int
    tokens_trained_by_run: int
    tokens_dropped: dict[str, int]
    weights_equal: bool | None
    gradient_norm: float
    gradient_norm_by_run: float | None
    gradient_difference: float | None


def replay(
    run: RunFolder,
    recipe: Recipe,
    job: Job,
    state: RunState,
    first: int = 1,
    last: int = 0,
    train: bool = True,
) -> Iterator[ReplayedStep]:
    """Replay steps `first` to `last` (0: all that were packed). Raises UserError when there is nothing to replay."""
    packed = [step for step, found in sorted(state.steps.items()) if found.packed is not None]
    wanted = [step for step in packed if step >= first and (not last or step <= last)]
    if not wanted:
        raise UserError(f"{run.name} has no packed steps in {first}:{last or ''}: there is nothing to replay")
    with Fellows(run, recipe, job, state, wanted, recipe.train.ranks if train else 1) as rendezvous:
        yield from replay_rank(run, recipe, job, state, wanted, 0 if train else None, rendezvous)


def replay_rank(
    run: RunFolder,
    recipe: Recipe,
    job: Job,
    state: RunState,
    wanted: list[int],
    rank: int | None,
    rendezvous: str,
) -> Iterator[ReplayedStep]:
    """The steps `wanted`, as one rank of a cell; `rank` None: without training."""
    turns_of, routing_of = recorded_turns(run, job), recorded_routing(run, recipe, job)
    settings = Settings.from_recipe(recipe)
    trainer = Replayer(run, recipe, job, state, rank, rendezvous) if rank is not None else None
    history = state.history()
    for step in wanted:
        made, record = StepInHand(settings, step, turns_of, routing_of).advance(state)
        if record is None:
            return  # consumed in part when the run stopped
        announced = [ready.digest for ready in state.steps[step].microsteps.values()]
        equal = [digest(microstep) for microstep in made] == announced
        trained = trainer.step(step, made, equal, record.executions) if trainer else Trained(0.0)
        ran = state.steps[step].packed
        yield ReplayedStep(
            step=step,
            microsteps=len(made),
            microsteps_equal=equal,
            tokens_trained=record.trained,
            tokens_trained_by_run=ran.tokens_trained if ran is not None else 0,
            tokens_dropped=record.dropped,
            weights_equal=trained.weights_equal,
            gradient_norm=trained.gradient_norm,
            gradient_norm_by_run=history[step][1].gradient_norm if step in history else None,
            gradient_difference=trained.gradient_difference,
        )


class Fellows:
    """The other ranks of a replay, in processes of their own; a context that gives their meeting place."""

    def __init__(
        self, run: RunFolder, recipe: Recipe, job: Job, state: RunState, wanted: list[int], count: int
    ) -> None:
        self._replayed = (run, recipe, job, state, wanted)
        self._count = count
        self._processes: list[Any] = []

    def __enter__(self) -> str:
        if self._count == 1:
            return ""
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-replay-", ignore_cleanup_errors=True)
        rendezvous = f"file://{self._folder.name}/store"
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._count):
            process = context.Process(target=_fellow, args=(*self._replayed, rank, rendezvous), daemon=True)
            process.start()
            self._processes.append(process)
        return rendezvous

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._count > 1:
            self._folder.cleanup()


def _fellow(*arguments: Any) -> None:
    for _ in replay_rank(*arguments):
        pass  # the first rank says it


def recorded_turns(run: RunFolder, job: Job) -> Callable[[str], list[Turn]]:
    """All recorded turns, by execution."""
    return by_execution(turn for worker in job.workers for turn in TurnReader(run, worker).read_all())


def recorded_routing(run: RunFolder, recipe: Recipe, job: Job) -> Callable[[str], Records]:
    """All recorded experts, by execution; none where the run does not replay them."""
    records: dict[str, dict[tuple[int, int], Routing]] = defaultdict(dict)
    for worker in job.workers if recipe.train.routing_replay else ():
        for record in read_routing(run, worker):
            records[record.execution][record.attempt, record.turn] = record
    return lambda execution: records.get(execution, {})


def by_execution(rows: Iterable[Turn]) -> Callable[[str], list[Turn]]:
    """The turns of each execution, of rows as shards hold them."""
    turns: dict[str, list[Turn]] = defaultdict(list)
    for turn in rows:
        turns[turn.execution].append(turn)
    return lambda execution: latest_rows(turns.get(execution, []))


class Trained(Struct, frozen=True):
    """A step that was trained again, beside the run's (as in `ReplayedStep`)."""

    gradient_norm: float
    weights_equal: bool | None = None
    gradient_difference: float | None = None


class Replayer:
    """One rank of a trainer that takes every cell's part, one after the other."""

    def __init__(
        self, run: RunFolder, recipe: Recipe, job: Job, state: RunState, rank: int = 0, rendezvous: str = ""
    ) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        from gyre.training.layout import Layout
        from gyre.training.settings import TrainSettings
        from gyre.training.trainer import Trainer

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.run, self.recipe, self.state = run, recipe, state
        layout = Layout.of(recipe.train, rank, rendezvous)
        ran = Layout.of(load_recipe(run.recipe, folders=False).train, rank, rendezvous)
        self.same_layout = layout == ran
        self.trainer = Trainer(Path(job.model), TrainSettings.of(recipe), layout, core=True)
        self._at: int | None = None
        """step whose weights the trainer has"""

    def _load(self, before: int) -> None:
        """The weights after step `before`: the model folder, or its checkpoint.

        In the run's own layout one step follows from the other. In another one each starts from its checkpoint where
        that is kept, so that differences of rounding do not add up.
        """
        path = self._checkpoint(before)
        if self._at == before and (self.same_layout or before == 0 or path is None):
            return
        if before == 0:
            self.trainer.load_hf()
        elif path is not None:
            self.trainer.load_checkpoint(path)
        else:
            raise UserError(f"no checkpoint of step {before} is kept: replay from step 1")

    def _checkpoint(self, step: int) -> Path | None:
        """The kept checkpoint of a step, unless it is of a lineage that had ended."""
        path = self.run.checkpoint_path(step)
        if not path.exists() or not stands(read_info(path).meta, self.state.openings()):
            return None
        return path

    def step(self, step: int, made: list[MicroStep], equal: bool, executions: int) -> Trained:
        """Train one step, and look at what the run made of it."""
        from gyre.training.settings import learning_rate

        self._load(step - 1)
        self._at = step
        by_name = dict(zip(self.state.steps[step].microsteps, made)) if equal else {}
        lineage = lineage_of(self.state, step)
        if equal and lineage:
            parts = [self._part(names, by_name) for names in contributions(self.state, lineage, step)]
            own = own_microsteps(self.state, lineage, step)
        else:
            by_name = {str(number): microstep for number, microstep in enumerate(made)}
            names, bundle = list(by_name), self.recipe.train.bundle
            parts, own = [], [names[first : first + bundle] for first in range(0, len(names), bundle)]
        self.trainer.zero_gradients()
        self._train(own, by_name)
        for buffers in parts:
            self.trainer.add_gradients(buffers)
        rate = learning_rate(step - 1, self.recipe.train)
        stats = self.trainer.commit(executions, rate, targets=len(made))
        published = self.state.history().get(step)
        if not equal or published is None:
            return Trained(stats.grad_norm)
        if self.same_layout:
            return Trained(stats.grad_norm, published[1].weight_version.endswith("-" + self._digest()))
        saved, started = self._checkpoint(step), step == 1 or self._checkpoint(step - 1) is not None
        if saved is None or not started or stats.skipped:
            return Trained(stats.grad_norm)
        return Trained(stats.grad_norm, None, self.trainer.gradient_difference(saved, stats.grad_norm))

    def _part(self, bundles: list[list[str]], by_name: dict[str, MicroStep]) -> list[Any]:
        """A satellite's contribution: summed from zero, in its own order."""
        self.trainer.zero_gradients()
        self._train(bundles, by_name)
        return list(self.trainer.freeze().buffers)

    def _train(self, bundles: list[list[str]], by_name: dict[str, MicroStep]) -> None:
        """As in the run, one grant after the other: micro-steps that are trained at once may meet in an expert."""
        from gyre.training.batch import MicroStepBatch

        for names in bundles:
            self.trainer.train_microsteps([MicroStepBatch.of(by_name[name]) for name in names])

    def _digest(self) -> str:
        """The digest part of a weight version, as a manifest of these ranks would have it."""
        from gyre.transfer.manifest import RankBuffer, digest_of, whole_digest

        digests = self.trainer.agree(digest_of(self.trainer.weights_flat()[0]))
        return whole_digest([RankBuffer(rank, "", 0, 0, own, "", 0) for rank, own in enumerate(digests)])[:16]


def lineage_of(state: RunState, step: int) -> int:
    """The lineage whose merges made `step` stand; 0 when none did."""
    if step in state.history():
        return state.history()[step][0]
    made = [number for number, found in state.lineages.items() if any(m.step == step for m in found.merged)]
    return max(made, default=0)


def own_microsteps(state: RunState, lineage: int, step: int) -> list[list[str]]:
    """The core's own micro-steps of a step, grant by grant, in the order in which it trained them."""
    reign = state.lineages[lineage]
    core = state.cells.get(reign.cell, {}).get(reign.incarnation, CellIncarnation())
    grants = [number for kind, number in reign.sequence if kind == "done"]
    return [core.done[number].microsteps for number in grants if core.done[number].step == step]


def contributions(state: RunState, lineage: int, step: int) -> list[list[list[str]]]:
    """The merged contributions to a step, in the order in which the core added them, each grant by grant."""
    found = []
    for merged in state.lineages[lineage].merged:
        if merged.step == step:
            satellite = state.cells[merged.source][merged.source_incarnation]
            grants = satellite.offers[merged.number].grants
            found.append([satellite.done[number].microsteps for number in grants])
    return found
