"""Custody of one execution's calls: every sampled token is in its shard before anyone outside sees it.

Invariants
- Intent before generation (in memory: a pending call), committed row before reply. A dangling intent is
  reported at the end.
- A failed call never changes the tree; tokens that it did sample get a row with status "aborted", which has
  no children.
- A row is written "committed" before the reply is sent, for it must survive us. If the reply was not sent
  whole, a second row of the same turn number says "undelivered"; if a retry then gets it whole, a third says
  "committed". The last row of a turn number wins (gyre/ledger/turns_merge.py); an undelivered turn that a
  later turn continues counts as committed.
- Identical requests: while the first is in flight or not fully delivered they get its reply; after that each
  samples a sibling, up to a cap, beyond which the newest reply is given again.

Rows are appended in the event loop: turn numbers, rows and tree stay in one order without locks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from gyre.engines.types import TokenHex
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.turns import Turn
from gyre.proxy.conversation import Message, ToolCall
from gyre.proxy.exchange import Evidence, Refusal, Reply, Request, ThreadRules
from gyre.proxy.generate import GenerationFailed, Generator, Sampled, Wanted, nothing_sampled
from gyre.proxy.histories import Histories
from gyre.proxy.matching import Plan, Trails, Turns, match, plan
from gyre.proxy.parser import Parsed
from gyre.proxy.seen import Seen
from gyre.proxy.template import Renderer, RenderError
from gyre.proxy.tree import CallTree

WRITE_ERRORS = (OSError, LedgerWriteError)
"""What a sink raises when the row is not in the shard: the call fails, and nothing of it is visible."""


class TurnSink(Protocol):
    """Where rows go: the worker's growing shard. A row is in the file when `append` returns."""

    def append(self, turn: Turn) -> None:
        """Raises OSError or LedgerWriteError if the row is not in the shard."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one execution. Tokens: `context` of a whole sequence, `max_tokens` sampled a call, `tokens`
    in all.
    """

    context: int
    max_tokens: int
    calls: int = 100_000
    tokens: int = 10_000_000
    call_seconds: float = 7200.0
    body_bytes: int = 64 << 20
    siblings: int = 8


class Stats(msgspec.Struct, kw_only=True):
    """What one execution did. `server_errors`: calls that failed on our side; `dangling`: calls in flight at
    the end.
    """

    calls: int = 0
    turns: int = 0
    tokens_sampled: int = 0
    tokens_context: int = 0
    tokens_cached: int = 0
    tokens_discarded: int = 0
    continuations: int = 0
    replayed: int = 0
    refused: int = 0
    undelivered: int = 0
    malformed_calls: int = 0
    server_errors: int = 0
    dangling: int = 0
    roles: dict[str, tuple[int, int]] = {}
    """role -> (turns, tokens sampled in them)"""
    last_error: str = ""


class Call:
    """A call in flight or done. `reply` gives the recorded reply, or raises Refusal; its id and time are known from the
    start. `row` is there from the commit until the delivery.
    """

    reply: asyncio.Task[Reply]

    def __init__(self, reply_id: str, created: int, siblings: int) -> None:
        self.id = reply_id
        self.created = created
        self.siblings = siblings
        self.row: Turn | None = None
        self.delivered = False


class Capture:
    """The calls of one execution."""

    def __init__(
        self,
        *,
        execution: str,
        attempt: int,
        renderer: Renderer,
        generator: Generator,
        sink: TurnSink,
        rules: ThreadRules,
        limits: Limits,
        temperature: float,
        model: str,
        token_hex: TokenHex,
        now: Callable[[], float],
    ) -> None:
        self.execution, self.attempt = execution, attempt
        self.stats = Stats()
        self._limits = limits
        self._renderer, self._generator, self._sink, self._rules = renderer, generator, sink, rules
        self._temperature, self._model = temperature, model
        self._token_hex, self._now = token_hex, now
        self._tree, self._turns, self._seen = CallTree(), Turns(), Seen()
        self._trails = Trails()
        self.histories = Histories()
        self._rows = 0
        self._calls: dict[str, Call] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    def begin(self, request: Request, headers: Mapping[str, str]) -> Call:
        """Start a call, or join the one that it repeats. Raises Refusal before anything is sampled."""
        evidence = self._rules.classify(headers, request, self._seen)
        digest = hashlib.sha256(evidence.thread.encode() + b"\0" + request.identity).hexdigest()
        self.stats.calls += 1
        twin = self._calls.get(digest)
        if twin is not None and (not twin.delivered or twin.siblings >= self._limits.siblings):
            self.stats.replayed += 1
            return twin
        if self.stats.calls > self._limits.calls:
            raise Refusal("limit", f"this execution made its {self._limits.calls} calls")
        planned, wanted = self._plan(request, evidence)
        self._seen.note(evidence.thread, evidence.role, request.conversation)
        siblings = 1 if twin is None else twin.siblings + 1
        call = self._calls[digest] = Call(f"gyre-{self._token_hex(12)}", int(self._now()), siblings)
        call.reply = asyncio.get_running_loop().create_task(
            self._run(call, request, evidence, planned, wanted, digest), name=f"call {self.execution}"
        )
        # Whoever waits gets the exception; nobody may wait any more.
        call.reply.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call

    def count(self, request: Request, headers: Mapping[str, str]) -> int:
        """How many tokens the prompt of `request` has. Changes nothing. Raises Refusal."""
        evidence = self._rules.classify(headers, request, self._seen)
        return len(self._continue(request, evidence).prompt)

    def settle(self, call: Call, sent_whole: bool) -> None:
        """Note how the reply's delivery went. The call must be done."""
        if call.row is None or call.delivered:
            return
        status = "committed" if sent_whole else "undelivered"
        call.delivered = sent_whole
        if call.row.status != status:
            call.row = msgspec.structs.replace(call.row, status=status)
            try:
                self._sink.append(call.row)
            except WRITE_ERRORS as error:
                # The reply is out already; a flagged execution is dispatched again.
                self.flag(error)
            self.stats.undelivered += -1 if sent_whole else 1
        if sent_whole:
            # Nothing can change the row any more.
            call.row = None

    def flag(self, error: Exception) -> None:
        """Count a failure on our side."""
        self.stats.server_errors += 1
        self.stats.last_error = f"{type(error).__name__}: {error}"

    async def cut(self) -> Stats:
        """Cut the calls in flight, which count as dangling: at a session's end nobody waits for them."""
        pending = [call.reply for call in self._calls.values() if not call.reply.done()]
        self.stats.dangling += len(pending)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        # One that was cut before it ran could not take itself out.
        self._calls = {digest: call for digest, call in self._calls.items() if not call.reply.cancelled()}
        return self.stats

    # -- one call

    def _continue(self, request: Request, evidence: Evidence) -> Plan:
        found = match(request.conversation, evidence.thread, self._turns, self._rules, self._trails)
        try:
            return plan(request.conversation, found, self._tree, self._renderer)
        except RenderError as error:
            raise Refusal("invalid", str(error)) from error

    def _plan(self, request: Request, evidence: Evidence) -> tuple[Plan, Wanted]:
        planned = self._continue(request, evidence)
        # Engines want a free position after the last sampled token.
        length, context = len(planned.prompt), self._limits.context
        room = context - 1 - length
        if room < 1:
            raise Refusal("context", f"the prompt has {length} tokens, the context holds {context}", (length, context))
        left = self._limits.tokens - self.stats.tokens_sampled
        if left < 1:
            raise Refusal("limit", f"this execution sampled its {self._limits.tokens} tokens")
        budget = min(request.max_tokens or self._limits.max_tokens, self._limits.max_tokens, room, left)
        wanted = Wanted(execution=self.execution, prompt=planned.prompt, max_tokens=budget, stops=request.stops)
        return planned, wanted

    async def _run(
        self,
        call: Call,
        request: Request,
        evidence: Evidence,
        planned: Plan,
        wanted: Wanted,
        digest: str,
    ) -> Reply:
        started = self._now()
        sampled = nothing_sampled()
        row = Turn(
            execution=self.execution,
            attempt=self.attempt,
            turn=-1,
            parent=planned.parent,
            keep=planned.keep,
            thread=evidence.thread,
            role=evidence.role,
            evidence=_evidence(evidence, request),
            context=planned.context,
            temperature=self._temperature,
            started=started,
            request_digest=digest,
        )
        try:
            await self._sample(wanted, sampled)
            row = self._append(row, sampled, sampled.finish, "committed")
        except BaseException as error:
            # A retry of a failed call starts anew. Cancelled: the execution ended.
            if self._calls.get(digest) is call:
                del self._calls[digest]
            if isinstance(error, Exception):
                self.flag(error)
            if not isinstance(error, WRITE_ERRORS):
                self._account(row, sampled)
            if isinstance(error, (GenerationFailed, TimeoutError, *WRITE_ERRORS)):
                raise Refusal("server", str(error) or "the call took too long") from error
            raise
        call.row = row
        return self._commit(call, row, planned, sampled, request)

    async def _sample(self, wanted: Wanted, sampled: Sampled) -> None:
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                await self._generator.sample(wanted, sampled)
        finally:
            self.stats.continuations += sampled.continuations
            self.stats.tokens_discarded += sampled.discarded
            self.stats.tokens_sampled += len(sampled.output)
            self.stats.tokens_cached += sampled.cached_tokens

    def _account(self, row: Turn, sampled: Sampled) -> None:
        """A row for what a failed call did sample."""
        if not sampled.output:
            return
        try:
            self._append(row, sampled, "abort", "aborted")
        except WRITE_ERRORS as error:
            # The call has failed already, and the tokens are nobody's targets.
            self.flag(error)

    def _append(self, row: Turn, sampled: Sampled, finish: str, status: str) -> Turn:
        whole = msgspec.structs.replace(
            row,
            turn=self._rows,
            output=sampled.output.tolist(),
            logprobs=sampled.logprobs.tolist(),
            spans=list(sampled.spans),
            finish=finish,
            status=status,
            first_token=sampled.first_token,
            finished=self._now(),
            cell=sampled.cell,
            cached_tokens=sampled.cached_tokens,
        )
        self._sink.append(whole)
        self._rows += 1
        return whole

    def _commit(self, call: Call, row: Turn, planned: Plan, sampled: Sampled, request: Request) -> Reply:
        """The row is in the shard: make the turn known, and its reply."""
        text = self._renderer.decode(self._renderer.unstopped(sampled.output))
        if sampled.stop_at is not None:
            text = text[: sampled.stop_at]
        parsed: Parsed = self._renderer.rules.parse(text, self._renderer.thinking_open, request.conversation.tools)
        calls = tuple(ToolCall(f"call_{self._token_hex(12)}", c.name, c.arguments) for c in parsed.calls)
        said = Message(role="assistant", text=parsed.text, thinking=parsed.thinking, calls=calls, issued=call.id)
        self._tree.add(row.turn, row.parent, row.keep, row.context, row.output)
        self._turns.add(row.turn, planned.key, said, self._rules.normal)
        self._seen.note_calls(calls)
        self.stats.turns += 1
        turns, tokens = self.stats.roles.get(row.role, (0, 0))
        self.stats.roles[row.role] = (turns + 1, tokens + len(row.output))
        self.stats.tokens_context += len(row.context)
        self.stats.malformed_calls += parsed.malformed
        return Reply(
            id=call.id,
            model=request.model or self._model,
            created=call.created,
            text=parsed.text,
            thinking=parsed.thinking,
            calls=calls,
            finish="length" if sampled.finish == "length" else "stop",
            prompt_tokens=len(planned.prompt),
            output_tokens=len(sampled.output),
            cached_tokens=sampled.cached_tokens,
        )


def _evidence(evidence: Evidence, request: Request) -> str:
    """JSON of what decided the role and of what the harness asked for; "" if there is neither."""
    facts = {"role": evidence.why} if evidence.why else {}
    whole = {**facts, **({"asked": request.asked} if request.asked else {})}
    return msgspec.json.encode(whole).decode() if whole else ""
