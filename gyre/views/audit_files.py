"""`gyre verify`, the rules about files: journals, shards, micro-step files, checkpoints.

Owns what must hold of each file by itself and against what the journals say of it. Invariant: a file that is damaged or
missing is a breach that names it, never an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gyre.errors import UserError
from gyre.ledger import checkpoints
from gyre.ledger.journal import index_pattern
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import digest, read_microstep
from gyre.ledger.routing import Mixture, Routing, read_routing
from gyre.ledger.shards import TurnReader
from gyre.ledger.state import RunState
from gyre.ledger.tail import read_journal
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows, whole_length
from gyre.processes.processor import StepInHand
from gyre.processes.replay import by_execution, recorded_routing
from gyre.training.architecture import read_architecture
from gyre.trajectory.settings import Settings
from gyre.views.runs import OpenRun

Cases = Iterator[tuple[str, str]]
"""(what was looked at, what is wrong with it or "")"""
Target = tuple[str, int, int, int]
"""execution, attempt, turn, offset among the turn's sampled tokens"""


@dataclass
class ReadMicroStep:
    """What the rules need of a micro-step's file: its digest, or what is wrong with it, and its targets."""

    digest: str
    problem: str
    targets: list[Target]


@dataclass
class Audited(OpenRun):
    """A run whose shards and micro-step files are read once for all the rules."""

    @cached_property
    def shards(self) -> tuple[list[Turn], dict[str, str]]:
        """All rows, and what is wrong with a worker's shards."""
        rows: list[Turn] = []
        damaged: dict[str, str] = {}
        for worker in self.job.workers:
            try:
                rows += TurnReader(self.run, worker).read_all()
            except UserError as error:
                damaged[worker] = str(error)
        return rows, damaged

    @cached_property
    def microsteps(self) -> dict[str, ReadMicroStep]:
        """Those that were announced, by name."""
        names = [name for step in self.state.steps.values() for name in step.microsteps]
        return {name: _read(self.run, name) for name in names}


def _read(run: RunFolder, name: str) -> ReadMicroStep:
    try:
        found, content = read_microstep(run.microsteps / f"{name}.arrow")
    except (UserError, OSError) as error:
        return ReadMicroStep("", str(error), [])
    places = zip(found.target_samples.tolist(), found.target_turns.tolist(), found.target_offsets.tolist(), strict=True)
    attempts = found.attempts.tolist()
    targets = [(found.executions[sample], attempts[sample], turn, offset) for sample, turn, offset in places]
    return ReadMicroStep(content, "", targets)


def journals(opened: OpenRun) -> Cases:
    """Each file that an index names, read whole; a torn last line is what a killed writer leaves."""
    run, cuts = opened.run, opened.state.cuts
    for writer in opened.job.writers():
        try:
            names = run.index_path(writer).read_bytes().split(b"\n")
        except FileNotFoundError:
            yield writer, f"{run.index_path(writer)} is missing"
            continue
        for match in filter(None, map(index_pattern(writer).fullmatch, names)):
            incarnation = int(match[1])
            yield f"{writer}.{incarnation}", _journal(run, writer, incarnation, cuts.get(writer, {}))


def _journal(run: RunFolder, writer: str, incarnation: int, cuts: dict[int, int]) -> str:
    path = run.journal_path(writer, incarnation)
    try:
        good = sum(1 for _ in read_journal(path))
        whole = path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return f"{path} is missing, and {run.index_path(writer).name} names it"
    except UserError as error:
        return str(error)
    if whole > good:
        return f"{path} line {good + 1} is damaged, and so {whole - good} lines do not count"
    wanted = cuts.get(incarnation, -1) + 1
    return f"{path} ends after {good} lines, and the scheduler has read {wanted}" if good < wanted else ""


def shards(opened: Audited) -> Cases:
    """Each worker's shards can be read, and every finished execution has all its turns in them."""
    rows, damaged = opened.shards
    yield from damaged.items()
    if damaged:
        return
    count = Counter((turn.execution, turn.attempt) for turn in latest_rows(rows))
    for name, execution in opened.state.executions.items():
        outcome = execution.outcome()
        if outcome is not None:
            found = count[name, outcome.attempt]
            yield name, "" if found >= outcome.turns else f"{name}: {found} turns in shards, {outcome.turns} journalled"


def routing(opened: Audited) -> Cases:
    """Each turn's experts start one position before its own, are no more than it has, and are of the model's layers. A
    record without its turn is what a killed worker leaves."""
    rows, damaged = opened.shards
    if damaged:
        return  # the rule on shards says so
    turns = {(turn.execution, turn.attempt, turn.turn): turn for turn in rows}
    try:
        mixture = read_architecture(Path(opened.job.model)).mixture()
    except UserError as error:
        yield "model", str(error)
        return
    for worker in opened.job.workers:
        try:
            for found in read_routing(opened.run, worker):
                name = f"{found.execution} attempt {found.attempt} turn {found.turn}"
                problem = _routing(found, turns.get((found.execution, found.attempt, found.turn)), mixture)
                yield name, f"{name}: {problem}" if problem else ""
        except UserError as error:
            yield worker, str(error)


def _routing(found: Routing, turn: Turn | None, mixture: Mixture) -> str:
    shape = (found.layers, found.chosen, found.item_size)
    if shape != (mixture.layers, mixture.chosen, mixture.item_size):
        return "its experts are not of the model's layers"
    if len(found.experts) % mixture.row_size or found.table().max(initial=0) >= mixture.experts:
        return "its experts are not rows of the model's experts"
    if turn is None:
        return ""
    if found.start != max(turn.keep - 1, 0):
        return f"its experts start at {found.start}, its new tokens at {turn.keep}"
    positions = whole_length(turn) - 1 - found.start
    return f"{found.rows} positions have experts, of {positions}" if found.rows > positions else ""


def microsteps(opened: Audited) -> Cases:
    """Each file is whole and has the digest that the processor announced."""
    for step in opened.state.steps.values():
        for name, ready in step.microsteps.items():
            found = opened.microsteps[name]
            other = "" if found.digest == ready.digest else f"{name}: digest {found.digest}, announced {ready.digest}"
            yield name, found.problem or other


def packing(opened: Audited) -> Cases:
    """What the shards hold, packed again in the journalled order, is what was packed: no row has changed since."""
    rows, damaged = opened.shards
    if damaged:
        return  # the rule on shards says so
    turns_of, routing_of = by_execution(rows), recorded_routing(opened.run, opened.recipe, opened.job)
    settings = Settings.from_recipe(opened.recipe)
    for number, step in sorted(opened.state.steps.items()):
        if step.packed is None:
            continue
        made, _ = StepInHand(settings, number, turns_of, routing_of).advance(opened.state)
        for name, microstep in zip(step.microsteps, made, strict=False):
            same = digest(microstep) == step.microsteps[name].digest
            yield name, "" if same else f"{name}: the shards hold other turns than it was packed from"
        if len(made) != len(step.microsteps):
            yield str(number), f"step {number}: the shards give {len(made)} micro-steps, not {len(step.microsteps)}"


def kept_checkpoints(opened: OpenRun) -> Cases:
    """Each is whole and is of a step that stands, made from its packed micro-steps; the newest two are there. One that
    a lineage left after its end counts for nothing, and is nothing wrong."""
    state = opened.state
    history = state.history()
    for path in sorted(opened.run.checkpoints.glob("step-*.zarr")):
        problems = checkpoints.verify(path)
        if problems:
            yield path.name, problems[0]
            continue
        meta = checkpoints.read_info(path).meta
        packed = state.steps[meta.step].packed if meta.step in state.steps else None
        if checkpoints.final_path(path.parent, meta.step) != path:
            yield path.name, f"{path}: its COMPLETE file is of step {meta.step}"
        elif not checkpoints.stands(meta, state.openings()):
            yield path.name, ""
        elif meta.step in history and history[meta.step][0] != meta.lineage:
            stands = history[meta.step][0]
            yield path.name, f"{path}: of lineage {meta.lineage}, and the step that stands is of lineage {stands}"
        elif packed is not None and sorted(meta.merged) != sorted(packed.microsteps):
            yield path.name, f"{path}: made from {len(meta.merged)} micro-steps that are not the packed ones"
        else:
            yield path.name, ""
    saved = [step for step, (_, commit) in history.items() if commit.checkpointed]
    for step in saved[-2:]:
        path = opened.run.checkpoint_path(step)
        if not path.exists():
            yield path.name, f"{path} is missing: step {step} was committed with a checkpoint"
        elif not checkpoints.verify(path, deep=False) and not _counts(path, state):
            yield path.name, f"{path}: of a lineage that had ended; that of the step that stands is missing"


def _counts(path: Path, state: RunState) -> bool:
    return checkpoints.stands(checkpoints.read_info(path).meta, state.openings())
