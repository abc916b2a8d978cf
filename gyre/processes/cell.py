"""A cell's lead: it obeys the scheduler's orders and alone speaks for the cell.

Owns the journal `cell-<i>`, the cell's engines and its trainer ranks. Invariants: orders are done one at a time, in
their order; every change of state is journalled when it is true; the loss of a rank ends this incarnation, the loss of
an engine only its service. From releasing on, a switch completes or the incarnation ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gyre.engines.errors import EngineError
from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.ledger.orders import CELL_ORDERS
from gyre.ledger.tail import Line
from gyre.processes.base import EXIT_RESTART, EndProcess, Process, run_process
from gyre.processes.children import Child, ChildDied
from gyre.processes.gang import Gang
from gyre.processes.leases import keep_manifests
from gyre.processes.parts import Nodes, Part
from gyre.processes.ranks import Ranks

log = logging.getLogger("gyre")

RETRY_SECONDS = 0.2
WRITING_SECONDS = 1.0
"""How often a checkpoint that is being written is looked after."""


@dataclass(frozen=True)
class EngineEnded:
    """What the lead tells itself: this engine has ended. Whether that matters is seen when its turn comes."""

    child: Child | Part


class Cell(Process):
    """gyre's cell agent."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        self.nodes = Nodes(self)
        self.gang = Gang(self, self.nodes)
        self.ranks: Ranks | None = None
        self.orders: deque[Any] = deque()
        self.news = asyncio.Event()
        self.current: ev.CellState = "starting"
        self.since = time.monotonic()
        self.lineage = 0
        """the lineage whose core this incarnation is; 0: it is a satellite"""
        self.committed = (0, 0)
        """(lineage, step) of its newest commit"""
        self.fenced: set[tuple[str, int]] = set()
        self.offers = 0
        self.frozen = False
        self.deferred: list[ev.Granted] = []
        self.summing = (0, 0)
        """(lineage, step) whose gradients are in the buffer"""
        self.served: ev.ServeOrdered | None = None
        self.writing: tuple[int, int] | None = None
        """(lineage, step) of the checkpoint that is being written in the background"""

    # ---- speaking ----

    def enter(self, state: ev.CellState, lineage: int = 0, step: int = 0, detail: str = "") -> None:
        now = time.monotonic()
        self.say(ev.CellEntered(state=state, seconds=now - self.since, lineage=lineage, step=step, detail=detail))
        self.current, self.since = state, now

    # ---- hearing ----

    async def on_lines(self, lines: list[Line]) -> None:
        self.nodes.hear(lines)
        for line in lines:
            event = line.event
            if isinstance(event, ev.RestartOrdered) and self._for_me(event):
                raise EndProcess(EXIT_RESTART, f"ordered to restart: {event.reason}")
            if (isinstance(event, CELL_ORDERS) and self._for_me(event)) or (
                isinstance(event, ev.Merged | ev.Refused) and self._mine(event)
            ):
                self.orders.append(event)
        self.news.set()

    def _for_me(self, order: Any) -> bool:
        return bool((order.cell, order.incarnation) == (self.name, self.incarnation))

    def _mine(self, answer: ev.Merged | ev.Refused) -> bool:
        return (answer.source, answer.source_incarnation) == (self.name, self.incarnation)

    def superseded(self) -> bool:
        """Is there a newer role to take than the one being taken?"""
        return any(isinstance(order, ev.TrainOrdered | ev.ServeOrdered) for order in self.orders)

    # ---- life ----

    async def work(self) -> None:
        try:
            await asyncio.gather(self.gang.start(), self._start_ranks())
            self.enter("ready")
            watches = [asyncio.create_task(self.gang.watch(self._hear_end)), asyncio.create_task(self.nodes.watch())]
            try:
                await self._obey()
            finally:
                for watch in watches:
                    watch.cancel()
        except ChildDied as error:
            self.enter("failed", detail=str(error))
            raise EndProcess(EXIT_RESTART, str(error)) from error

    async def _start_ranks(self) -> None:
        await self.nodes.come()
        with self.nodes.meeting() as (rendezvous, listener):
            here = self.nodes.ranks(0)
            self.ranks = await Ranks.of_cell(self, self.name, self.incarnation, here, rendezvous, listener)
            self.ranks.parts = self.nodes.start_ranks(rendezvous)
        await self.ranks.ready()

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self.ranks is None:
            raise ChildDied(f"{self.name} has no trainer ranks")
        return await self.ranks.ask(op, **arguments)

    def _hear_end(self, child: Child | Part) -> None:
        self.orders.append(EngineEnded(child))
        self.news.set()

    async def _engine_ended(self, child: Child | Part) -> None:
        """One that should serve is started again, with its weights; in other roles that waits for the next serving.
        The others of its cell give their memory back first: what comes in needs its place."""
        order = self.served
        if self.gang.has(child) and self.current == "rollout" and order is not None:
            log.error("%s has ended while it served", child.name)
            self.say(ev.ServingEnded())
            await self.gang.drain()
            await self.gang.release()
            await self._serve_role(order)

    async def _watch_ranks(self) -> None:
        if self.ranks is not None:
            raise await self.ranks.death()

    async def _obey(self) -> None:
        await self.until_accepted()
        dead = asyncio.create_task(self._watch_ranks())
        try:
            while True:
                while self.orders:
                    await self._do(self.orders.popleft())
                self.news.clear()
                news = asyncio.create_task(self.news.wait())
                patience = WRITING_SECONDS if self.writing is not None else None
                await asyncio.wait({news, dead}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if dead.done():
                    dead.result()
                await self._look_after_checkpoint(wait=False)
        finally:
            dead.cancel()

    async def _do(self, order: Any) -> None:
        log.info("%s", order)
        match order:
            case ev.LineageOrdered():
                await self._open_lineage(order)
            case ev.TrainOrdered():
                await self._train_role(order)
            case ev.ServeOrdered():
                await self._serve_role(order)
            case ev.Granted():
                await self._train(order)
            case ev.OfferOrdered():
                await self._offer(order)
            case ev.Merged() | ev.Refused():
                await self._answered(order)
            case ev.MergeOrdered():
                await self._merge(order)
            case ev.FenceOrdered():
                self._fence(order)
            case ev.CommitOrdered():
                await self._commit(order)
            case ev.CheckpointOrdered():
                await self._checkpoint(order)
            case EngineEnded():
                await self._engine_ended(order.child)

    # ---- roles ----

    async def _open_lineage(self, order: ev.LineageOrdered) -> None:
        opened = await self.ask("open_lineage", lineage=order.lineage, openings=self.state.openings())
        for line in opened["skipped"]:
            log.warning("checkpoint passed over: %s", line)
        self.lineage = order.lineage
        self.say(
            ev.LineageOpened(
                lineage=order.lineage,
                step=opened["step"],
                version=opened["version"],
                weight_version=opened["weight_version"],
                manifest=opened["manifest"],
            )
        )

    async def _train_role(self, order: ev.TrainOrdered) -> None:
        if self.current == "rollout" or self.gang.holds_memory:
            await self._leave_rollout()
        if self.lineage != order.lineage:
            self.enter("joining")
            if not await self._pull(order.manifest, order.lineage, order.step - 1):
                return
        self._thaw()
        self.summing = (order.lineage, order.step)
        self.enter("training", order.lineage, order.step)

    async def _leave_rollout(self) -> None:
        self.enter("draining")
        self.say(ev.ServingEnded())
        self.served = None
        await self.gang.drain()
        self.enter("releasing")
        await self.gang.release()
        await self._move("onload")

    async def _serve_role(self, order: ev.ServeOrdered) -> None:
        if self.current == "training":
            self.enter("leaving")
            await self.ask("zero")
        self.enter("resuming")
        self.say(ev.ServingEnded())
        self._thaw()
        await self._move("onload")  # it serves again: what comes in needs its place
        if not await self._pull(order.manifest, order.lineage, order.step):
            return
        await self._move("offload", weights=False)
        for _ in range(3):
            try:
                await self.gang.push(self.ask, order)
                break
            except EngineError as error:
                log.error("weights did not reach the engines: %s", error)
        else:
            raise ChildDied(f"engines of {self.name} do not take their weights")
        await self._move("offload", weights=True)
        self.served = order
        self.say(ev.Serving(lineage=order.lineage, version=order.version, weight_version=order.weight_version))
        self.enter("rollout")

    async def _move(self, op: str, **arguments: Any) -> None:
        """Give the trainer's device memory away, or take it back; what that cost is in the log."""
        moved = await self.ask(op, **arguments)
        log.info("%s: %d bytes in %.3f s, %d free afterwards", op, moved["nbytes"], moved["seconds"], moved["free"])

    async def _pull(self, manifest: str, lineage: int, step: int) -> bool:
        """Pull, again and again while the publisher may come back; False when a newer role order has arrived."""
        while True:
            pulled = await self.ask("pull", manifest=manifest)
            if "transfer_failed" not in pulled:
                self.say(ev.Pulled(lineage=lineage, step=step, seconds=pulled["seconds"], nbytes=pulled["nbytes"]))
                return True
            log.error("pull of %s failed: %s", manifest, pulled["transfer_failed"])
            if self.superseded():
                return False
            await asyncio.sleep(RETRY_SECONDS)

    # ---- gradients ----

    def _thaw(self) -> None:
        """A role begins: what was frozen, and what waited for its answer, belongs to a step that is over."""
        self.frozen = False
        self.deferred = []
        self.summing = (0, 0)

    async def _train(self, grant: ev.Granted) -> None:
        if self.frozen:
            self.deferred.append(grant)  # the core's answer is in another journal, and on its way
            return
        if (grant.lineage, grant.step) != self.summing:
            log.info("grant %d belongs to a step that is over", grant.grant)
            return
        if self.current != "training":
            raise ChildDied(f"grant {grant.grant} came in state {self.current}: the lead is out of step")
        step = self.state.steps[grant.step]
        began = time.monotonic()
        announced = [{"microstep": name, "digest": step.microsteps[name].digest} for name in grant.microsteps]
        answer = await self.ask("train", microsteps=announced)
        self.say(
            ev.Done(
                grant=grant.grant,
                lineage=grant.lineage,
                step=grant.step,
                microsteps=grant.microsteps,
                seconds=time.monotonic() - began,
                tokens=sum(s["tokens"] for s in answer["stats"]),
                stats=summed(answer["stats"]),
            )
        )

    async def _offer(self, order: ev.OfferOrdered) -> None:
        self.offers += 1
        self.frozen = True
        frozen = await self.ask("freeze", lineage=order.lineage, step=order.step, number=self.offers)
        self.say(
            ev.Offered(
                lineage=order.lineage,
                step=order.step,
                number=self.offers,
                microsteps=frozen["microsteps"],
                manifest=frozen["manifest"],
            )
        )

    async def _answered(self, answer: ev.Merged | ev.Refused) -> None:
        """The frozen buffer is free again. An answer that comes after the gradients were voided is late: ignore it."""
        if not self.frozen or answer.number != self.offers:
            return
        await self.ask("zero")
        await self.ask("retire", keep=[])
        self.frozen = False
        self.orders.extendleft(reversed(self.deferred))
        self.deferred = []

    async def _merge(self, order: ev.MergeOrdered) -> None:
        about: dict[str, Any] = {
            "lineage": order.lineage,
            "step": order.step,
            "source": order.source,
            "source_incarnation": order.source_incarnation,
            "number": order.number,
        }
        reason = ""
        if order.lineage != self.lineage:
            reason = "the lineage is over"
        elif (order.source, order.source_incarnation) in self.fenced:
            reason = "fenced"
        else:
            answer = await self.ask("merge", manifest=order.manifest, microsteps=order.microsteps)
            reason = answer.get("refused", "")
        if reason:
            self.say(ev.Refused(**about, reason=reason))
        else:
            self.say(ev.Merged(**about, microsteps=order.microsteps))

    def _fence(self, order: ev.FenceOrdered) -> None:
        self.fenced.add((order.source, order.source_incarnation))
        self.say(ev.Fenced(lineage=order.lineage, source=order.source, source_incarnation=order.source_incarnation))

    async def _commit(self, order: ev.CommitOrdered) -> None:
        began = time.monotonic()
        if order.checkpoint:
            await self._look_after_checkpoint(wait=True)
        made = await self.ask(
            "commit",
            lineage=order.lineage,
            step=order.step,
            version=order.version,
            executions=order.executions,
            microsteps=order.microsteps,
            checkpoint=order.checkpoint,
            wait=order.step >= self.recipe.train.steps,  # the run may end with this step
        )
        self.say(
            ev.Committed(
                lineage=order.lineage,
                step=order.step,
                version=order.version,
                weight_version=made["weight_version"],
                manifest=made["manifest"],
                checkpointed=made["checkpointed"],
                skipped=made["skipped"],
                learning_rate=made["learning_rate"],
                gradient_norm=made["gradient_norm"],
                seconds=time.monotonic() - began,
            )
        )
        self.committed = (order.lineage, order.step)
        self.writing = self.committed if made["writing"] else None
        boundary = order.step // self.recipe.schedule.steps_per_burst * self.recipe.schedule.steps_per_burst
        await self.look()  # a cell may have been ordered to pull what this step would retire, while it was made
        await self.ask("retire", keep=keep_manifests(self.state, self.name, made["manifest"], boundary))

    async def _checkpoint(self, order: ev.CheckpointOrdered) -> None:
        """Save what a commit made; the tensors have to be on their devices. Of a step that is not the newest: ignore
        it, the newer one will be ordered."""
        if (order.lineage, order.step) != self.committed:
            return
        if self.writing == self.committed:
            await self._look_after_checkpoint(wait=True)
            return
        if self.current == "rollout" or self.gang.holds_memory:
            await self._leave_rollout()
        await self.ask(
            "checkpoint",
            lineage=order.lineage,
            step=order.step,
            version=order.version,
            microsteps=order.microsteps,
        )
        self.say(ev.Checkpointed(lineage=order.lineage, step=order.step))

    async def _look_after_checkpoint(self, wait: bool) -> None:
        if self.writing is not None and (await self.ask("written", wait=wait))["written"]:
            lineage, step = self.writing
            self.writing = None
            self.say(ev.Checkpointed(lineage=lineage, step=step))

    async def close(self) -> None:
        await self.gang.close()
        if self.ranks is not None:
            await self.ranks.end()


def summed(stats: list[dict[str, Any]]) -> dict[str, float]:
    """Statistics of a bundle: sums, extremes where a name says so, and `<name>_total` = mean times its units."""
    total: dict[str, float] = {}
    for row in stats:
        for name, value in row.items():
            if name.endswith("_max"):
                total[name] = max(total.get(name, value), value)
            elif name.endswith("_min"):
                total[name] = min(total.get(name, value), value)
            elif name.endswith("_mean"):
                units = row["units"] if name == "ratio_mean" else row["targets"]
                name = name.replace("_mean", "_total")
                total[name] = total.get(name, 0.0) + value * units
            else:
                total[name] = total.get(name, 0.0) + value
    return total


if __name__ == "__main__":
    run_process(Cell)
