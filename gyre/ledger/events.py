"""Events: every fact and every order that goes through a journal.

Owns the vocabulary. Each event has one owning writer, named in the section that defines it; nobody else may write it.
Invariant: an event is immutable, says what happened or what is ordered and nothing that can be derived, and holds no
secret. Orders name the incarnation they are for; times are for display only and never decide anything.

Writers: scheduler, processor, worker-<i>, cell-<i> (its lead), supervisor, control (the command line).
"""

from __future__ import annotations

from msgspec import Struct

from gyre.ledger.cell_events import (
    CellEntered as CellEntered,
    Checkpointed as Checkpointed,
    Committed as Committed,
    Done as Done,
    EngineStarted as EngineStarted,
    Fenced as Fenced,
    LineageOpened as LineageOpened,
    Merged as Merged,
    Offered as Offered,
    PartEnded as PartEnded,
    PartOrdered as PartOrdered,
    Pulled as Pulled,
    Refused as Refused,
    Serving as Serving,
    ServingEnded as ServingEnded,
    StoreStarted as StoreStarted,
)
from gyre.ledger.event_base import (
    CellState as CellState,
    EndState as EndState,
    JournalEvent,
    Outcome as Outcome,
    Purpose as Purpose,
)

# ---- every writer -------------------------------------------------------------------------------------------------


class Opened(JournalEvent, frozen=True):
    """First line of every journal. `pid_start` tells a recycled pid from the process."""

    pid: int
    pid_start: float
    host: str
    code: str


# ---- scheduler ----------------------------------------------------------------------------------------------------


class Accepted(JournalEvent, frozen=True):
    """From here on `incarnation` of `writer` counts; lines of incarnation i beyond `cut[i]` never count."""

    writer: str
    incarnation: int
    cut: dict[int, int] = {}


class GroupPlan(Struct, frozen=True, omit_defaults=True):
    """Executions are named `<group>-<index>`: g00012-03, or e00004-00 for an evaluation."""

    group: str
    task: str
    executions: int
    purpose: Purpose = "train"


class BurstOpened(JournalEvent, frozen=True):
    burst: int
    lineage: int
    version: int
    groups: list[GroupPlan]


class Dispatch(Struct, frozen=True, omit_defaults=True):
    execution: str
    attempt: int
    task: str
    purpose: Purpose = "train"


class Dispatched(JournalEvent, frozen=True):
    """Order to a worker: run these."""

    worker: str
    incarnation: int
    executions: list[Dispatch]


class Routed(JournalEvent, frozen=True):
    """New routes, execution -> cell ("" = none for now). Workers acknowledge by this line's n."""

    routes: dict[str, str]


class Consumed(JournalEvent, frozen=True):
    """`group` goes into `step`, in the order of these lines. A void group is not trained and not in the denominator."""

    step: int
    group: str
    void: bool = False


class StepFilled(JournalEvent, frozen=True):
    """No more groups go into `step`: the processor ends it."""

    step: int


class Flushed(JournalEvent, frozen=True):
    """Training cells are idle: the processor closes the micro-steps that are open now."""

    step: int


class Granted(JournalEvent, frozen=True):
    """Order to a cell: train these micro-steps. `grant` is unique in the run."""

    grant: int
    lineage: int
    step: int
    cell: str
    incarnation: int
    microsteps: list[str]


class LineageOrdered(JournalEvent, frozen=True):
    """Order to a cell: be the core; open `lineage` from the newest complete checkpoint."""

    cell: str
    incarnation: int
    lineage: int


class TrainOrdered(JournalEvent, frozen=True):
    """Order: end up training `step` (the next one to commit) with the weights of `manifest`; old gradients are void."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    manifest: str


class ServeOrdered(JournalEvent, frozen=True):
    """Order: end up serving the weights of `manifest`, which answer to `weight_version`."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str


class OfferOrdered(JournalEvent, frozen=True):
    """Order to a satellite: freeze the gradients of `step` and offer them."""

    cell: str
    incarnation: int
    lineage: int
    step: int


class MergeOrdered(JournalEvent, frozen=True):
    """Order to the core: pull this contribution, and add it or refuse it."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    source: str
    source_incarnation: int
    number: int
    manifest: str
    microsteps: list[str]


class FenceOrdered(JournalEvent, frozen=True):
    """Order to the core: never again take a contribution of this incarnation of `source`."""

    cell: str
    incarnation: int
    lineage: int
    source: str
    source_incarnation: int


class CommitOrdered(JournalEvent, frozen=True):
    """Order to the core: everything of `step` is merged. `microsteps` is the merged set that must hold."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    executions: int
    microsteps: list[str]
    checkpoint: bool
    version: int


class CheckpointOrdered(JournalEvent, frozen=True):
    """Order to the core: the run is about to stop, save `step`, the newest committed, made of `microsteps`."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    version: int
    microsteps: list[str]


class RestartOrdered(JournalEvent, frozen=True):
    """Order to a cell: a deadline passed, end this incarnation; the next one starts clean."""

    cell: str
    incarnation: int
    reason: str


class StopOrdered(JournalEvent, frozen=True):
    """Order to every process: the run is over, end cleanly."""

    reason: str


class RunEnded(JournalEvent, frozen=True):
    state: EndState
    reason: str = ""


class Excluded(JournalEvent, frozen=True):
    """Terminal for an execution whose attempts are used up: it leaves its group, without a reward."""

    execution: str
    reason: str


class TaskSetAside(JournalEvent, frozen=True):
    """A task whose environment keeps failing is dispatched no more."""

    task: str
    reason: str


# ---- control (command line) ---------------------------------------------------------------------------------------


class CancelRequested(JournalEvent, frozen=True):
    """`leaving`: the run goes on later, for it is its job that ends."""

    now: bool = False
    leaving: bool = False


class ResumeRequested(JournalEvent, frozen=True):
    """The run goes on: an earlier cancellation no longer counts."""


# ---- processor ----------------------------------------------------------------------------------------------------


class MicroStepReady(JournalEvent, frozen=True):
    """The file `microsteps/<microstep>.arrow` is complete. `microstep` is `step-000012/<incarnation>-00003`."""

    step: int
    microstep: str
    digest: str
    tokens: int
    targets: int
    samples: int


class Packed(JournalEvent, frozen=True):
    """The processor has ended `step`: exactly these micro-steps; `executions` is the loss denominator.

    tokens_sampled = tokens_trained + sum(tokens_dropped.values()), exactly. Rewards are over graded executions.
    """

    step: int
    microsteps: list[str]
    executions: int
    tokens_sampled: int
    tokens_trained: int
    tokens_dropped: dict[str, int]
    reward: float | None = None
    staleness_max: int = 0
    staleness_mean: float = 0.0
    lag_max: int = 0
    lag_mean: float = 0.0
    seconds_mean: float = 0.0


# ---- worker -------------------------------------------------------------------------------------------------------


class WorkerReady(JournalEvent, frozen=True):
    slots: int


class RoutesAcknowledged(JournalEvent, frozen=True):
    """Calls start on the routes of the scheduler's line (epoch, n) and of all lines before it."""

    epoch: int
    n: int


class Started(JournalEvent, frozen=True):
    execution: str
    attempt: int


class TranscriptCount(Struct, frozen=True, kw_only=True):
    """What the harness's own transcript counts, and the turns and tokens of the roles that it covers.

    Where they differ, one of the two saw what the other did not; that is a fact, and no failure.
    """

    calls: int
    tokens: int
    turns: int
    sampled: int

    @property
    def equal(self) -> bool:
        return (self.calls, self.tokens) == (self.turns, self.sampled)


class StepEnd(Struct, frozen=True, kw_only=True):
    """How one step of a task of several steps ended; `rewards` are all numbers that its grader gave, by name."""

    name: str
    outcome: Outcome
    reason: str
    reward: float | None = None
    rewards: dict[str, float] = {}
    model_calls: int = 0
    seconds: float = 0.0


class Finished(JournalEvent, frozen=True):
    """Terminal for this attempt. `retry` asks for another attempt within the budget. Its turns are fsynced."""

    execution: str
    attempt: int
    outcome: Outcome
    reason: str = ""
    reward: float | None = None
    timed_out: bool = False
    interrupted: bool = False
    """Its harness was ended with its job: graded as it stands, or `retry`, which costs no attempt."""
    turns: int = 0
    tokens_sampled: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = {}
    transcript: TranscriptCount | None = None
    """None: the harness keeps none, or it could not be read."""
    steps: list[StepEnd] = []
    """Of a task of several steps, those that ran; `reward` is made of theirs."""

    @property
    def kind(self) -> str:
        """The reason's word, without the detail that follows it."""
        return self.reason.partition(":")[0]


# ---- supervisor ---------------------------------------------------------------------------------------------------


class ProcessStarted(JournalEvent, frozen=True):
    name: str
    pid: int
    pid_start: float
    restarts: int = 0


class ProcessEnded(JournalEvent, frozen=True):
    name: str
    pid: int
    code: int


class GaveUp(JournalEvent, frozen=True):
    """The supervisor's restart budget is used up, or a process ended with a user's error: the run failed."""

    reason: str


Event = (
    Opened
    | Accepted
    | BurstOpened
    | Dispatched
    | Routed
    | Consumed
    | StepFilled
    | Flushed
    | Granted
    | LineageOrdered
    | TrainOrdered
    | ServeOrdered
    | OfferOrdered
    | MergeOrdered
    | FenceOrdered
    | CommitOrdered
    | CheckpointOrdered
    | RestartOrdered
    | StopOrdered
    | RunEnded
    | Excluded
    | TaskSetAside
    | CancelRequested
    | ResumeRequested
    | MicroStepReady
    | Packed
    | WorkerReady
    | RoutesAcknowledged
    | Started
    | Finished
    | CellEntered
    | EngineStarted
    | StoreStarted
    | PartOrdered
    | PartEnded
    | Serving
    | ServingEnded
    | LineageOpened
    | Pulled
    | Done
    | Offered
    | Merged
    | Refused
    | Fenced
    | Committed
    | Checkpointed
    | ProcessStarted
    | ProcessEnded
    | GaveUp
)
