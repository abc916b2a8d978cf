"""Moments of a run: conditions on its folded state at which something can be killed."""

from __future__ import annotations

from gyre.ledger.state import CellIncarnation, RunState

CORE, SATELLITE = CELLS = "cell-0", "cell-1"


def current(state: RunState, cell: str) -> CellIncarnation:
    return state.cell(cell) or CellIncarnation()


def merged(state: RunState) -> set[str]:
    """Micro-steps that the reigning lineage has merged from satellites."""
    reign = state.reign()
    return {m for merge in reign.merged for m in merge.microsteps} if reign is not None else set()


def unmerged(state: RunState, cell: str = SATELLITE) -> list[str]:
    """Micro-steps whose gradients are in this satellite's buffer and nowhere else."""
    number = max(state.lineages, default=0)
    done = [m for d in current(state, cell).done.values() if d.lineage == number for m in d.microsteps]
    return [name for name in done if name not in merged(state)]


def offered(state: RunState, cell: str = SATELLITE) -> list[str]:
    """Micro-steps of a contribution that is offered and not answered."""
    reign, incarnation = state.reign(), state.incarnation(cell)
    if reign is None:
        return []
    answered = {a.number for a in [*reign.merged, *reign.refused] if a.source_incarnation == incarnation}
    offers = current(state, cell).offers
    return [m for number, offer in offers.items() if number not in answered for m in offer.microsteps]


def core_training(state: RunState, step: int) -> bool:
    """The core has gradients of `step` in its buffer, and has not committed it."""
    reign, core = state.reign(), current(state, CORE)
    return reign is not None and reign.step() < step and any(d.step == step for d in core.done.values())


def live(state: RunState, cell: str = "") -> list[str]:
    """Executions that run, those routed to `cell` only, if it is given and serves."""
    if cell and current(state, cell).serving is None:
        return []
    return [
        name
        for name in sorted(state.open)
        if (not cell or state.routes.get(name) == cell)
        and any(attempt.started and attempt.finished is None for attempt in state.executions[name].attempts.values())
    ]


def half_packed(state: RunState) -> list[str]:
    """Micro-steps that are announced, of a step that is not packed."""
    return [name for step in state.steps.values() if step.packed is None for name in step.microsteps]


def grants(state: RunState, microstep: str) -> list[str]:
    """The cells to which a micro-step was granted, in order."""
    return [g.cell for step in state.steps.values() for g in step.grants if microstep in g.microsteps]


def attempts(state: RunState, names: list[str]) -> dict[str, int]:
    return {name: max(state.executions[name].attempts, default=0) for name in names}


def lines(state: RunState) -> int:
    """How many lines of all journals were folded: the run's own clock."""
    return sum(n + 1 for incarnations in state.seen.values() for n in incarnations.values())
