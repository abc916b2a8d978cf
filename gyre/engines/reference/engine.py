"""The compute thread: it owns the batch, and everything that touches model or KV runs in it, between two steps.

Invariant: between `begin_update` and `end_update`, while paused, and while memory is released, no step runs.
Commands are executed in order of arrival, except that one with a condition waits for it (and keeps new sequences
out meanwhile).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from gyre.engines.reference.batch import Batch
from gyre.engines.reference.model import Model
from gyre.engines.reference.pickles import read_bucket
from gyre.engines.reference.sequence import Sequence

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"


class Refused(Exception):
    """A command that the engine will not carry out; the message goes to the client with HTTP 400."""


@dataclass
class _Command:
    work: Callable[[], Any]
    ready: Callable[[], bool] | None = None
    deadline: float | None = None
    late: str = ""
    future: Future[Any] = field(default_factory=Future)


class Engine:
    """Start it, then `submit` commands and `add` sequences from any thread.

    on_news(sequences) is called in the compute thread after each step, with the sequences that have new tokens or
    are done.
    """

    def __init__(self, batch: Batch, on_news: Callable[[list[Sequence]], None]) -> None:
        self.batch = batch
        self.model: Model = batch.model
        self.failure: str | None = None
        self.paused = False
        self.updating = False
        self.released: set[str] = set()
        self._on_news = on_news
        self._held: list[Sequence] = []
        self._mail: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._deferred: list[_Command] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    # -- from any thread

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it and wait; sequences in hand are dropped."""
        self._stopping = True
        self._mail.put(None)
        self._thread.join()

    def submit(
        self,
        work: Callable[[], Any],
        ready: Callable[[], bool] | None = None,
        timeout: float | None = None,
        late: str = "",
    ) -> Future[Any]:
        """Run `work` in the compute thread, once `ready` holds; after `timeout` seconds fail with Refused(late)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        command = _Command(work, ready, deadline, late)
        if self.failure is not None:
            command.future.set_exception(RuntimeError(self.failure))
        else:
            self._mail.put(command)
        return command.future

    # -- commands (compute thread only)

    def quiet(self) -> bool:
        """True if weights may change now: nothing is in a slot, or it is paused."""
        return self.paused or not self.batch.live

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; while paused it is held back."""
        if self.paused:
            self._held.append(sequence)
        elif self.released or not self.model.ready:
            sequence.error = (503, "the engine's memory is released or its weights are missing")
            self._tell([sequence])
        else:
            self.batch.waiting.append(sequence)

    def abort(self, chosen: Callable[[Sequence], bool]) -> None:
        """Finish the chosen sequences with what they have."""
        news: list[Sequence] = []
        for sequence in [*self.batch.live, *self.batch.waiting, *self._held]:
            if not chosen(sequence):
                continue
            message = ABORTED if sequence.admitted else ABORTED_WAITING
            sequence.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}
            if sequence in self._held:
                self._held.remove(sequence)
            self.batch.remove(sequence)
            news.append(sequence)
        self._tell(news)

    def pause(self, mode: str) -> None:
        """abort: finish all; in_place: keep all and their KV; retract: keep all, drop their KV."""
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            self.batch.retract()
        elif mode != "in_place":
            raise Refused(f"unknown pause mode {mode!r}")
        self.paused = True

    def resume(self) -> None:
        """Go on; what was held back is queued."""
        self.paused = False
        held, self._held = self._held, []
        for sequence in held:
            self.add(sequence)

    def begin_update(self) -> None:
        """Open a weight update."""
        if self.updating:
            raise Refused("begin_weight_update called while a weight update is already open")
        if "weights" in self.released:
            raise Refused("weights are released: resume_memory_occupation first")
        self.updating = True

    def update_tensors(self, encoded: str, version: str | None, flush: bool) -> None:
        """Load one bucket of an open update."""
        if not self.updating:
            raise Refused("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        self._changing(flush)
        try:
            self.model.load(read_bucket(encoded))
        except ValueError as error:
            raise Refused(str(error)) from error
        self._changed(version, flush)

    def end_update(self) -> None:
        """Close the update. Parameters that are missing after a release still keep the engine from serving."""
        if not self.updating:
            raise Refused("end_weight_update called without begin_weight_update")
        self.updating = False

    def update_from_disk(self, path: str, version: str | None, flush: bool) -> None:
        """Load a folder; on failure the old weights stay."""
        if "weights" in self.released:
            raise Refused("weights are released: resume_memory_occupation first")
        self._changing(flush)
        try:
            self.model.load_folder(path)
        except ValueError as error:
            raise Refused(str(error)) from error
        self._changed(version, flush)

    def _changing(self, flush: bool) -> None:
        if flush and self.batch.live:
            raise Refused("the cache cannot be flushed while requests hold KV: update with flush_cache false")

    def _changed(self, version: str | None, flush: bool) -> None:
        self.batch.epoch += 1
        if version is not None:
            self.batch.version = version
        if flush:
            self.batch.flush()

    def set_version(self, version: str, abort_all: bool) -> None:
        """Name the current weights."""
        if abort_all:
            self.abort(lambda _: True)
        self.batch.version = version

    def release(self, tags: set[str]) -> None:
        """Free the memory of `weights` and `kv_cache`; refused while busy."""
        if self.batch.live or (self.batch.waiting and not self.paused):
            raise Refused("release_memory_occupation should be called only when the server is idle")
        if "kv_cache" in tags - self.released:
            self.batch.drop_memory()
        if "weights" in tags - self.released:
            self.model.release()
            self.batch.epoch += 1
        self.released |= tags

    def take_back(self, tags: set[str]) -> None:
        """Take released memory again."""
        if tags - self.released:
            raise Refused(f"not released: {', '.join(sorted(tags - self.released))}")
        if "kv_cache" in tags:
            self.batch.take_memory()
        if "weights" in tags:
            self.model.resume()
        self.released -= tags

    # -- the thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._commands(wait=not self._runnable())
                    if self._runnable():
                        if not self._deferred:
                            self.batch.admit()
                        self._tell(self.batch.step())
        except Exception as error:
            # A defect: nothing in this process can be trusted to go on. Everyone waiting is told; the server then
            # exits.
            traceback.print_exc()
            self.failure = f"the compute thread failed: {type(error).__name__}: {error}"
            self._fail_all(self.failure)

    def _tell(self, news: list[Sequence]) -> None:
        if news:
            self._on_news(news)

    def _runnable(self) -> bool:
        if self.paused or self.updating or self.released or self._stopping or not self.model.ready:
            return False
        return bool(self.batch.live or (self.batch.waiting and not self._deferred))

    def _commands(self, wait: bool) -> None:
        self._run_deferred()
        timeout = self._patience() if wait and not self._runnable() else 0.0
        while True:
            try:
                command = self._mail.get(timeout=timeout) if timeout != 0.0 else self._mail.get_nowait()
            except queue.Empty:
                break
            timeout = 0.0
            if command is None:
                break
            if command.ready is None or (not self._deferred and command.ready()):
                _execute(command)
            else:
                self._deferred.append(command)
        self._run_deferred()

    def _patience(self) -> float | None:
        """Seconds until the next deadline of a deferred command; None if there is none."""
        deadlines = [command.deadline for command in self._deferred if command.deadline is not None]
        return max(0.001, min(deadlines) - time.monotonic()) if deadlines else None

    def _run_deferred(self) -> None:
        now = time.monotonic()
        for command in list(self._deferred):
            assert command.ready is not None
            if command.ready():
                self._deferred.remove(command)
                _execute(command)
            elif command.deadline is not None and now >= command.deadline:
                self._deferred.remove(command)
                command.future.set_exception(Refused(command.late))

    def _fail_all(self, message: str) -> None:
        everyone = [*self.batch.live, *self.batch.waiting, *self._held]
        for sequence in everyone:
            sequence.error = (500, message)
        self._tell(everyone)
        while not self._mail.empty():
            command = self._mail.get()
            if command is not None:
                self._deferred.append(command)
        for command in self._deferred:
            command.future.set_exception(RuntimeError(message))


def _execute(command: _Command) -> None:
    if not command.future.set_running_or_notify_cancel():
        return
    try:
        command.future.set_result(command.work())
    except Refused as refusal:
        command.future.set_exception(refusal)
    except BaseException as error:
        command.future.set_exception(error)
        raise
