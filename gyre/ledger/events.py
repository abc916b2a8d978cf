"""Events: every fact and every order that goes through a journal.

Owns the vocabulary. Each event has one owning writer, named in the section that defines it; nobody else may write it.
Invariant: an event is immutable, says what happened or what is ordered and nothing that can be derived, and holds no
secret. Orders name the incarnation they are for; times are for display only and never decide anything.

Writers: scheduler, processor, worker-<i>, cell-<i> (its lead), supervisor, control (the command line).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Purpose = Literal["train", "eval"]
Outcome = Literal["graded", "excluded", "retry"]
CellState = Literal[
    "starting", "ready", "rollout", "draining", "releasing", "joining", "training", "leaving", "resuming", "failed"
]
EndState = Literal["finished", "failed", "cancelled"]


def _tag(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_tag):
    pass


# ---- every writer -------------------------------------------------------------------------------------------------


class Opened(_Event, frozen=True):
    """First line of every journal. `pid_start` tells a recycled pid from the process."""

    pid: int
    pid_start: float
    host: str
    code: str


# ---- scheduler ----------------------------------------------------------------------------------------------------


class Accepted(_Event, frozen=True):
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


class BurstOpened(_Event, frozen=True):
    burst: int
    lineage: int
    version: int
    groups: list[GroupPlan]


class Dispatch(Struct, frozen=True, omit_defaults=True):
    execution: str
    attempt: int
    task: str
    purpose: Purpose = "train"


class Dispatched(_Event, frozen=True):
    """Order to a worker: run these."""

    worker: str
    incarnation: int
    executions: list[Dispatch]


class Routed(_Event, frozen=True):
    """New routes, execution -> cell ("" = none for now). Workers acknowledge by this line's n."""

    routes: dict[str, str]


class Consumed(_Event, frozen=True):
    """`group` goes into `step`, in the order of these lines. A void group is not trained and not in the denominator."""

    step: int
    group: str
    void: bool = False


class StepFilled(_Event, frozen=True):
    """No more groups go into `step`: the processor ends it."""

    step: int


class Flushed(_Event, frozen=True):
    """Training cells are idle: the processor closes the micro-steps that are open now."""

    step: int


class Granted(_Event, frozen=True):
    """Order to a cell: train these micro-steps. `grant` is unique in the run."""

    grant: int
    lineage: int
    step: int
    cell: str
    incarnation: int
    microsteps: list[str]


class LineageOrdered(_Event, frozen=True):
    """Order to a cell: be the core; open `lineage` from the newest complete checkpoint."""

    cell: str
    incarnation: int
    lineage: int


class TrainOrdered(_Event, frozen=True):
    """Order: end up training `step` (the next one to commit) with the weights of `manifest`; old gradients are void."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    manifest: str


class ServeOrdered(_Event, frozen=True):
    """Order: end up serving the weights of `manifest`, which answer to `weight_version`."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str


class OfferOrdered(_Event, frozen=True):
    """Order to a satellite: freeze the gradients of `step` and offer them."""

    cell: str
    incarnation: int
    lineage: int
    step: int


class MergeOrdered(_Event, frozen=True):
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


class FenceOrdered(_Event, frozen=True):
    """Order to the core: never again take a contribution of this incarnation of `source`."""

    cell: str
    incarnation: int
    lineage: int
    source: str
    source_incarnation: int


class CommitOrdered(_Event, frozen=True):
    """Order to the core: everything of `step` is merged. `microsteps` is the merged set that must hold."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    executions: int
    microsteps: list[str]
    checkpoint: bool
    version: int


class CheckpointOrdered(_Event, frozen=True):
    """Order to the core: the run is about to stop, save `step`, the newest committed, made of `microsteps`."""

    cell: str
    incarnation: int
    lineage: int
    step: int
    version: int
    microsteps: list[str]


class RestartOrdered(_Event, frozen=True):
    """Order to a cell: a deadline passed, end this incarnation; the next one starts clean."""

    cell: str
    incarnation: int
    reason: str


class StopOrdered(_Event, frozen=True):
    """Order to every process: the run is over, end cleanly."""

    reason: str


class RunEnded(_Event, frozen=True):
    state: EndState
    reason: str = ""


class Excluded(_Event, frozen=True):
    """Terminal for an execution whose attempts are used up: it leaves its group, without a reward."""

    execution: str
    reason: str


class TaskSetAside(_Event, frozen=True):
    """A task whose environment keeps failing is dispatched no more."""

    task: str
    reason: str


# ---- control (command line) ---------------------------------------------------------------------------------------


class CancelRequested(_Event, frozen=True):
    now: bool = False


class ResumeRequested(_Event, frozen=True):
    """The run goes on: an earlier cancellation no longer counts."""


# ---- processor ----------------------------------------------------------------------------------------------------


class MicroStepReady(_Event, frozen=True):
    """The file `microsteps/<microstep>.arrow` is complete. `microstep` is `step-000012/<incarnation>-00003`."""

    step: int
    microstep: str
    digest: str
    tokens: int
    targets: int
    samples: int


class Packed(_Event, frozen=True):
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
    seconds_mean: float = 0.0


# ---- worker -------------------------------------------------------------------------------------------------------


class WorkerReady(_Event, frozen=True):
    slots: int


class RoutesAcknowledged(_Event, frozen=True):
    """Calls start on the routes of the scheduler's line (epoch, n) and of all lines before it."""

    epoch: int
    n: int


class Started(_Event, frozen=True):
    execution: str
    attempt: int


class Finished(_Event, frozen=True):
    """Terminal for this attempt. `retry` asks for another attempt within the budget. Its turns are fsynced."""

    execution: str
    attempt: int
    outcome: Outcome
    reason: str = ""
    reward: float | None = None
    timed_out: bool = False
    turns: int = 0
    tokens_sampled: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = {}


# ---- cell (its lead) ----------------------------------------------------------------------------------------------


class CellEntered(_Event, frozen=True):
    """The cell is in `state` now; the state before it lasted `seconds` (by the lead's own monotonic clock)."""

    state: CellState
    seconds: float = 0.0
    lineage: int = 0
    step: int = 0
    """with state training: the step whose gradients are summed, and its lineage"""
    detail: str = ""


class EngineStarted(_Event, frozen=True):
    """An engine of the cell answers at `url`; its keys are in the 0600 file keys/`key_file`."""

    engine: int
    url: str
    key_file: str
    pid: int


class Serving(_Event, frozen=True):
    """All engines of the cell report `weight_version`: the route is open."""

    lineage: int
    version: int
    weight_version: str


class ServingEnded(_Event, frozen=True):
    """The route is closed; calls in flight are cut and continue elsewhere or later."""


class LineageOpened(_Event, frozen=True):
    """Core: `lineage` reigns from the weights after `step`."""

    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str


class Pulled(_Event, frozen=True):
    """The lease on the weights of (lineage, step) that the order gave is free again."""

    lineage: int
    step: int
    seconds: float
    nbytes: int


class Done(_Event, frozen=True):
    """The gradients of these micro-steps are in this cell's buffer: also the ask for more."""

    grant: int
    lineage: int
    step: int
    microsteps: list[str]
    seconds: float = 0.0
    tokens: int = 0
    stats: dict[str, float] = {}


class Offered(_Event, frozen=True):
    """A contribution (lineage, step, cell incarnation, number): frozen until the core answers."""

    lineage: int
    step: int
    number: int
    microsteps: list[str]
    manifest: str


class Merged(_Event, frozen=True):
    """Core: all ranks have added this contribution."""

    lineage: int
    step: int
    source: str
    source_incarnation: int
    number: int
    microsteps: list[str]


class Refused(_Event, frozen=True):
    """Core: this contribution was not added, and never will be."""

    lineage: int
    step: int
    source: str
    source_incarnation: int
    number: int
    reason: str


class Fenced(_Event, frozen=True):
    """Core: contributions of this incarnation are refused from here on."""

    lineage: int
    source: str
    source_incarnation: int


class Committed(_Event, frozen=True):
    """Core: the optimizer has made `step`; its weights can be pulled at `manifest`."""

    lineage: int
    step: int
    version: int
    weight_version: str
    manifest: str
    checkpointed: bool
    skipped: bool = False
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    seconds: float = 0.0
    stats: dict[str, float] = {}


class Checkpointed(_Event, frozen=True):
    """Core: the checkpoint of a step that was committed without one is complete."""

    lineage: int
    step: int


# ---- supervisor ---------------------------------------------------------------------------------------------------


class ProcessStarted(_Event, frozen=True):
    name: str
    pid: int
    pid_start: float
    restarts: int = 0


class ProcessEnded(_Event, frozen=True):
    name: str
    pid: int
    code: int


class GaveUp(_Event, frozen=True):
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
