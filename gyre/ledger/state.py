"""What the journals say: the folded state of a run, and questions asked of it.

Owns `RunState`. `ledger/fold.py` is the only code that changes one.
Invariant: every field is a fact of one owning writer (keyed by the writer's incarnation where two incarnations could
claim the same fact), so folding lines of different writers commutes. What follows from facts of several writers is a
function here, never a field. No clock: `t` fields are display times copied from the lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from gyre.ledger import events as ev


class Attempt(Struct):
    worker: str = ""
    incarnation: int = 0
    """The worker incarnation that it was dispatched to; 0: not dispatched yet (as far as was read)."""
    epoch: int = 0
    """The scheduler incarnation that dispatched it."""
    started: bool = False
    t_started: float = 0.0
    t_finished: float = 0.0
    finished: ev.Finished | None = None


class Execution(Struct):
    group: str = ""
    task: str = ""
    purpose: ev.Purpose = "train"
    attempts: dict[int, Attempt] = field(default_factory=dict)
    excluded: str = ""

    def last(self) -> int:
        """The newest attempt that was dispatched (as far as was read); 0: none."""
        newest = 0
        for number, attempt in self.attempts.items():
            if number > newest and attempt.incarnation:
                newest = number
        return newest

    def outcome(self) -> ev.Finished | None:
        """What ends the execution; None while it is open or was excluded unfinished.

        Only the newest dispatched attempt can: one that was given up for lost and ends after all changes nothing, so
        an outcome, once known to the scheduler, stands.
        """
        attempt = self.attempts.get(self.last())
        finished = attempt.finished if attempt is not None else None
        return finished if finished is not None and finished.outcome != "retry" else None

    def verdict(self) -> ev.Outcome | None:
        """graded or excluded, once it is terminal."""
        outcome = self.outcome()
        return "excluded" if self.excluded else outcome.outcome if outcome is not None else None

    def terminal(self) -> bool:
        return bool(self.excluded) or self.outcome() is not None


class Group(Struct):
    plan: ev.GroupPlan
    burst: int
    lineage: int
    version: int
    order: int
    """Position of dispatch in the run, over all purposes."""
    overtaken: int = 0
    """How many training groups dispatched later were consumed before it."""


class Burst(Struct):
    lineage: int
    version: int
    groups: list[str]
    t: float


class Step(Struct):
    """Processor: microsteps, packed. Scheduler: the rest."""

    consumed: list[ev.Consumed] = field(default_factory=list)
    filled: bool = False
    flushes: list[int] = field(default_factory=list)
    """For each flush, how many groups had been consumed into the step."""
    microsteps: dict[str, ev.MicroStepReady] = field(default_factory=dict)
    packed: ev.Packed | None = None
    grants: list[ev.Granted] = field(default_factory=list)
    offers_ordered: list[ev.OfferOrdered] = field(default_factory=list)
    merges_ordered: list[ev.MergeOrdered] = field(default_factory=list)
    commits_ordered: list[ev.CommitOrdered] = field(default_factory=list)
    checkpoints_ordered: list[ev.CheckpointOrdered] = field(default_factory=list)


class Contribution(Struct):
    lineage: int
    step: int
    number: int
    microsteps: list[str]
    manifest: str
    grants: list[int]
    """Those whose gradients are in it: done since the contribution before."""


class CellIncarnation(Struct):
    """What one incarnation of a cell's lead has said of itself."""

    state: ev.CellState = "starting"
    t: float = 0.0
    training: tuple[int, int] = (0, 0)
    """(lineage, step) whose gradients it sums, while in state training"""
    history: list[tuple[str, float, float]] = field(default_factory=list)
    """(state that ended, its seconds, display time of its end)"""
    engines: dict[int, ev.EngineStarted] = field(default_factory=dict)
    serving: ev.Serving | None = None
    done: dict[int, ev.Done] = field(default_factory=dict)
    buffer: list[int] = field(default_factory=list)
    """Grants of the step in its buffer that it has not offered."""
    offers: dict[int, Contribution] = field(default_factory=dict)
    pulled: list[ev.Pulled] = field(default_factory=list)


class Lineage(Struct):
    cell: str
    incarnation: int
    opened: ev.LineageOpened
    t: float = 0.0
    merged: list[ev.Merged] = field(default_factory=list)
    refused: list[ev.Refused] = field(default_factory=list)
    fenced: list[ev.Fenced] = field(default_factory=list)
    committed: dict[int, ev.Committed] = field(default_factory=dict)
    t_committed: dict[int, float] = field(default_factory=dict)
    sequence: list[tuple[str, int]] = field(default_factory=list)
    """The core's order of additions: ("done", grant) and ("merged", index into `merged`). Replay adds in this order."""

    def step(self) -> int:
        """The newest committed step of this lineage: its core commits them in their order."""
        return next(reversed(self.committed), self.opened.step)


class Acceptance(Struct, frozen=True):
    """An `accepted` line and where it stands: (epoch, n) of the scheduler's journal."""

    epoch: int
    n: int
    writer: str
    incarnation: int
    cut: dict[int, int]


class Tally(Struct):
    """Sums over all executions, kept by the fold so that nobody has to visit them all."""

    graded: int = 0
    excluded: int = 0
    tokens_sampled: int = 0
    """Over all attempts that ended."""
    ends: dict[str, int] = field(default_factory=dict)
    """reason -> how many attempts ended for it"""


class Live(Struct):
    """What is asked of the open executions at every decision: the fold keeps it, so that nobody visits them all.

    It follows from `open`, `routes` and `executions`. No entry is empty.
    """

    groups: dict[str, int] = field(default_factory=dict)
    """group -> how many of its executions are open"""
    waiting: set[str] = field(default_factory=set)
    """open executions without an attempt, or whose newest one asks for another"""
    running: dict[str, dict[int, set[tuple[str, int]]]] = field(default_factory=dict)
    """worker -> incarnation -> (execution, attempt) dispatched to it and not ended, of open executions"""
    routed: dict[str, set[str]] = field(default_factory=dict)
    """cell -> open executions with a route to it; "" for those without a route"""


class RunState(Struct):
    seen: dict[str, dict[int, int]] = field(default_factory=dict)
    """writer -> incarnation -> last n folded."""
    acceptances: list[Acceptance] = field(default_factory=list)
    """Sorted. Those that a later scheduler cut are not among them."""
    cuts: dict[str, dict[int, int]] = field(default_factory=dict)
    """writer -> incarnation -> last n that counts. It follows from `acceptances`; of an incarnation older than the
    accepted one that is not named here nothing counts."""
    accepted: dict[str, int] = field(default_factory=dict)
    opened: dict[str, dict[int, ev.Opened]] = field(default_factory=dict)
    t_first: float = 0.0
    t_last: float = 0.0

    bursts: dict[int, Burst] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    consumed: dict[str, int] = field(default_factory=dict)
    """group -> step"""
    executions: dict[str, Execution] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """planned executions without a terminal outcome: |open| is the waterlevel."""
    live: Live = field(default_factory=Live)
    tally: Tally = field(default_factory=Tally)
    planned: int = 0
    """training groups so far"""
    outstanding: dict[str, int] = field(default_factory=dict)
    """training groups that are not consumed yet -> their order; oldest first"""
    void: list[str] = field(default_factory=list)
    """groups that were consumed void"""
    routes: dict[str, str] = field(default_factory=dict)
    """execution -> cell, until its group is consumed"""
    routed: tuple[int, int] = (0, -1)
    """(epoch, n) of the newest Routed line."""
    steps: dict[int, Step] = field(default_factory=dict)
    granted: int = 0
    """the newest grant"""
    roles: dict[str, ev.TrainOrdered | ev.ServeOrdered] = field(default_factory=dict)
    """The newest role order of each cell."""
    t_roles: dict[str, float] = field(default_factory=dict)
    lineage_ordered: ev.LineageOrdered | None = None
    fences_ordered: list[ev.FenceOrdered] = field(default_factory=list)
    restarts_ordered: list[ev.RestartOrdered] = field(default_factory=list)
    set_aside: dict[str, str] = field(default_factory=dict)
    stops: dict[int, str] = field(default_factory=dict)
    """scheduler incarnation -> reason of its StopOrdered"""
    ends: dict[int, ev.RunEnded] = field(default_factory=dict)
    """scheduler incarnation -> how it ended the run"""
    gave_up: dict[int, str] = field(default_factory=dict)
    """supervisor incarnation -> why"""

    asked: dict[int, ev.CancelRequested | None] = field(default_factory=dict)
    """control incarnation -> its word; None: go on"""
    slots: dict[str, dict[int, int]] = field(default_factory=dict)
    acknowledged: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    cells: dict[str, dict[int, CellIncarnation]] = field(default_factory=dict)
    stores: dict[int, str] = field(default_factory=dict)
    """store incarnation -> address of its master"""
    lineages: dict[int, Lineage] = field(default_factory=dict)
    processes: dict[str, ev.ProcessStarted] = field(default_factory=dict)
    processes_ended: dict[str, ev.ProcessEnded] = field(default_factory=dict)

    # ---- questions ----

    @property
    def epoch(self) -> int:
        """The newest scheduler incarnation."""
        return max(self.opened.get("scheduler", {}), default=0)

    @property
    def waterlevel(self) -> int:
        return len(self.open)

    @property
    def cancel(self) -> int:
        """0 no, 1 asked, 2 asked for now: the newest word of the command line."""
        asked = self._asked
        return 1 + asked.now if asked is not None else 0

    @property
    def leaving(self) -> bool:
        """Does the run stop because its job ends, to go on later?"""
        return self._asked is not None and self._asked.leaving

    @property
    def _asked(self) -> ev.CancelRequested | None:
        return self.asked.get(max(self.asked, default=0))

    @property
    def ended(self) -> ev.RunEnded | None:
        """How the run ended, unless a later scheduler goes on with it."""
        return self.ends.get(self.epoch) if self.ends else None

    @property
    def stopped(self) -> str | None:
        """Why every process should end now, or None."""
        return self.stops.get(self.epoch)

    @property
    def failure(self) -> str | None:
        """Why the newest supervisor gave the run up, or None."""
        return self.gave_up.get(max(self.opened.get("supervisor", {}), default=0))

    @property
    def store(self) -> str:
        """Address of the newest master of the store of KV pages; "" before there is one."""
        return self.stores.get(max(self.stores, default=0), "")

    def incarnation(self, writer: str) -> int:
        """The accepted incarnation of `writer`; 0 before the first was accepted."""
        return self.accepted.get(writer, 0)

    def cell(self, name: str) -> CellIncarnation | None:
        """The accepted incarnation of a cell, or None."""
        return self.cells.get(name, {}).get(self.incarnation(name))

    def reign(self) -> Lineage | None:
        """The lineage that reigns: the newest one opened."""
        return self.lineages[max(self.lineages)] if self.lineages else None

    def openings(self) -> list[tuple[int, int]]:
        """(lineage, step that it opened from) of all lineages: what a checkpoint is judged by
        (`gyre.ledger.checkpoints.stands`)."""
        return [(number, lineage.opened.step) for number, lineage in self.lineages.items()]

    def group_terminal(self, group: str) -> bool:
        return group not in self.live.groups

    def graded(self, group: str) -> list[tuple[str, ev.Finished]]:
        """(execution, outcome) of the graded executions of a group, in their order."""
        found = []
        for name in execution_names(self.groups[group].plan):
            execution = self.executions[name]
            outcome = execution.outcome()
            if not execution.excluded and outcome is not None and outcome.outcome == "graded":
                found.append((name, outcome))
        return found

    def history(self) -> dict[int, tuple[int, ev.Committed]]:
        """step -> (lineage, commit) of the steps that stand: a new lineage voids what lies after its opening step."""
        kept: dict[int, tuple[int, ev.Committed]] = {}
        for number in sorted(self.lineages):
            lineage = self.lineages[number]
            kept = {step: entry for step, entry in kept.items() if step <= lineage.opened.step}
            kept.update({step: (number, commit) for step, commit in lineage.committed.items()})
        return dict(sorted(kept.items()))


def execution_names(plan: ev.GroupPlan) -> Iterator[str]:
    return (f"{plan.group}-{index:02d}" for index in range(plan.executions))
