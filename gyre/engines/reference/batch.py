"""Continuous batching: which sequences run, and one step of all of them.

Invariants: live sequence i is in slot i; a step computes each live sequence's next tokens at most once; the token
budget of a step bounds prefill, never decoding; a sequence's KV goes to the prefix cache only if one set of weights
computed all of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from gyre.engines.reference.model import Model
from gyre.engines.reference.prefix import PrefixCache, chain
from gyre.engines.reference.sampling import sample, token_logprobs
from gyre.engines.reference.sequence import Sequence
from gyre.engines.reference.slots import Chunk, Plan, Slots


@dataclass(frozen=True)
class Limits:
    """slots: sequences that run at once. context: tokens of prompt + output. step_tokens: prefill tokens a step.
    cache_tokens, page: budget and granularity of the prefix cache."""

    slots: int
    context: int
    step_tokens: int
    cache_tokens: int
    page: int


class Batch:
    """The live and waiting sequences of one model."""

    def __init__(self, model: Model, limits: Limits, seed: int) -> None:
        self.model = model
        self.limits = limits
        self.live: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.version = "default"
        self.epoch = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0
        self._shared = torch.Generator().manual_seed(seed)
        self.slots: Slots | None = None
        self.cache: PrefixCache | None = None
        self.take_memory()

    # -- memory

    def take_memory(self) -> None:
        """Allocate KV, empty."""
        self.slots = Slots(self.model.shape, self.limits.slots, self.limits.context)
        self.cache = PrefixCache(self.model.shape, self.limits.cache_tokens, self.limits.page)

    def drop_memory(self) -> None:
        """Free all KV. Only with no live sequence."""
        if self.live:
            raise RuntimeError("KV is dropped only with no live sequence")
        self.slots = None
        self.cache = None

    def flush(self) -> None:
        """Forget the prefix cache."""
        if self.cache is not None:
            self.cache.clear()

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV live sequences hold."""
        return sum(sequence.length for sequence in self.live)

    # -- leaving

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue or slot; the highest slot moves into the hole."""
        if sequence.slot < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        assert self.slots is not None
        last = self.live.pop()
        if last is not sequence:
            self.slots.move(last.slot, sequence.slot, last.length)
            self.live[sequence.slot] = last
            last.slot = sequence.slot
        sequence.slot = -1

    def retract(self) -> None:
        """Send every live sequence back to the head of the queue, without its KV."""
        back = list(self.live)
        for sequence in back:
            self.remove(sequence)
            sequence.length = 0
            sequence.retractions += 1
        self.waiting.extendleft(reversed(back))

    # -- entering

    def admit(self) -> None:
        """Give free slots to waiting sequences, in order, with what the prefix cache knows of them.

        A sequence whose next unknown page is being computed by another waits for it: siblings of one prompt prefill
        it once.
        """
        if not self.waiting or len(self.live) >= self.limits.slots:
            return
        pending = {key for other in self.live if other.length < len(other.prompt) for key in other.keys}
        for sequence in list(self.waiting):
            if len(self.live) >= self.limits.slots:
                return
            if self._enter(sequence, pending):
                self.waiting.remove(sequence)
                pending.update(sequence.keys)

    def _enter(self, sequence: Sequence, pending: set[bytes]) -> bool:
        assert self.slots is not None and self.cache is not None
        page = self.limits.page
        if sequence.epoch != self.epoch:
            sequence.epoch = self.epoch
            sequence.keys.clear()
        found = 0
        if not sequence.score:
            # The last token is always computed: its logits are what the first sample needs.
            chain(self.epoch, sequence.salt, page, sequence.keys, sequence.tokens, sequence.size - 1)
            found = self.cache.match(sequence.keys)
            if found < len(sequence.keys) and sequence.keys[found] in pending:
                return False
        sequence.slot = len(self.live)
        self.live.append(sequence)
        self.cache.load(sequence.keys[:found], self.slots, sequence.slot)
        sequence.length = found * page
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached = sequence.length
            self.cached_tokens += sequence.length
            if sequence.seed is not None:
                sequence.generator = torch.Generator().manual_seed(sequence.seed)
        return True

    # -- one step

    def step(self) -> list[Sequence]:
        """Compute every live sequence's next tokens; return those with news (new tokens, or done and removed)."""
        assert self.slots is not None
        work = self._plan()
        if not work:
            return []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, chunk in work:
            end = chunk.start + chunk.count
            tokens += sequence.tokens(chunk.start, end)
            positions += range(chunk.start, end)
        chunks = [chunk for _, chunk in work]
        decode = [chunk for chunk in chunks if chunk.count == 1]
        hidden = self.model.hidden(tokens, positions, Plan(self.slots, decode, chunks[len(decode) :]))
        routed = self.model.routed()
        for sequence, chunk in work:
            sequence.length += chunk.count
            if routed is not None:
                new = slice(chunk.start, chunk.start + chunk.count)
                self.slots.experts[chunk.slot, new] = routed[chunk.row : chunk.row + chunk.count]
            if sequence.score:
                self._score(sequence, chunk, hidden)
        return self._sample(work, hidden)

    def _plan(self) -> list[tuple[Sequence, Chunk]]:
        """Chunks of this step in batch order: one-token chunks by slot, then prefill chunks within the budget."""
        work: list[tuple[Sequence, Chunk]] = []
        longer: list[tuple[Sequence, int]] = []
        budget = self.limits.step_tokens
        for sequence in self.live:
            todo = sequence.size - sequence.length
            if todo > 1 and budget > 0:
                count = min(todo, budget)
                budget -= count
                longer.append((sequence, count))
            if todo == 1:
                longer.append((sequence, 1))
        row = 0
        for sequence, count in sorted(longer, key=lambda item: item[1] > 1):
            work.append((sequence, Chunk(sequence.slot, sequence.length, count, row)))
            row += count
        return work

    def _score(self, sequence: Sequence, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's."""
        wanted = sequence.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
        if wanted:
            logits = self.model.logits(hidden[chunk.row : chunk.row + len(wanted)])
            sequence.input_logprobs += token_logprobs(logits, wanted)

    def _sample(self, work: list[tuple[Sequence, Chunk]], hidden: torch.Tensor) -> list[Sequence]:
        ready = [(s, c) for s, c in work if s.length == s.size]
        drawing = [(s, c.row + c.count - 1) for s, c in ready if s.max_new_tokens > len(s.output)]
        first = [s for s, _ in ready if not s.output]
        if drawing:
            rows = torch.tensor([row for _, row in drawing])
            ids, logprobs = sample(
                self.model.logits(hidden[rows]),
                [s.temperature for s, _ in drawing],
                [s.generator for s, _ in drawing],
                self._shared,
            )
            for (sequence, _), token, logprob in zip(drawing, ids, logprobs, strict=True):
                self._take(sequence, token, logprob)
        for sequence, _ in ready:
            if not sequence.done and len(sequence.output) >= sequence.max_new_tokens:
                self._finish(sequence, {"type": "length", "length": len(sequence.output)})
        for sequence in first:
            if not sequence.done:
                self._keep(sequence)
        news = [sequence for sequence, _ in ready]
        for sequence in news:
            if sequence.done:
                self._leave(sequence)
        return news

    def _take(self, sequence: Sequence, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            sequence.error = (500, "the model's logits are not finite")
            return
        self.sampled_tokens += 1
        sequence.append(token, logprob, self.version)
        if token in sequence.stop_ids:
            self._finish(sequence, {"type": "stop", "matched": token})

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        """The reason comes last: with it readers take the sequence for whole."""
        assert self.slots is not None
        if sequence.experts_from is not None:
            rows = self.slots.experts[sequence.slot, sequence.experts_from : sequence.size - 1]
            sequence.experts = rows.numpy().astype("<i4").tobytes()
        sequence.finish = reason

    def _leave(self, sequence: Sequence) -> None:
        assert self.slots is not None
        if sequence.error is None:
            self._keep(sequence)
        else:
            self.slots.wipe(sequence.slot)
        self.remove(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Offer a sequence's KV to the prefix cache."""
        assert self.slots is not None and self.cache is not None
        if sequence.epoch != self.epoch or sequence.score:
            return
        chain(self.epoch, sequence.salt, self.limits.page, sequence.keys, sequence.tokens, sequence.length)
        pages = sequence.length // self.limits.page
        self.cache.store(sequence.keys[:pages], self.slots, sequence.slot)
