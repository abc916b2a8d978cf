"""Conservation of tokens: whatever a harness does, rows reconstruct exactly what was sent and what was sampled."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.proxy.capture import Limits
from gyre.proxy.dialects.chat import Chat
from gyre.proxy.matching import Trails, match
from gyre.proxy.tree import CallTree, common_prefix

CHAT = Chat()
ODD = ["go", "a\nb\n", " ", "", "é\u2028 <|im_end|>", "</tool_response>", "x" * 40]
TEXTS = st.sampled_from(ODD) | st.text(max_size=12)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8), max_size=3)
REPLIES = st.lists(TEXTS | ARGUMENTS, min_size=1, max_size=3)
ACTIONS = st.sampled_from(["go on", "go on", "go on", "edit", "drop", "again", "branch", "compact", "respell"])
STEPS = st.lists(st.tuples(ACTIONS, TEXTS, REPLIES, st.integers(0, 30), st.integers(0, 10_000)), min_size=1, max_size=8)


def reply_text(parts: list[Any]) -> str:
    written = []
    for part in parts:
        if isinstance(part, dict):
            call = json.dumps({"name": "bash", "arguments": part}, ensure_ascii=False)
            written.append(f"<tool_call>\n{call}\n</tool_call>")
        else:
            written.append(part)
    return "\n".join(written)


class Harness:
    """Keeps a history as a harness does, and misbehaves on demand."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
        self.turns: list[tuple[int, int]] = []
        """(length of the history, row) of each reply that stands in it unedited."""

    async def call(self) -> None:
        rows = len(self.world.sink.rows)
        body = json.dumps({"messages": self.history}).encode()
        capture = self.world.capture
        request = CHAT.read(body, capture.histories)
        # Reading on from earlier requests gives what reading anew gives.
        assert request == CHAT.read(body)
        walk = (request.conversation, "main", capture._turns, self.world.rules)
        # Going on from the last walk finds what a walk from the start finds.
        assert match(*walk, capture._trails) == match(*walk, Trails())
        call = self.world.capture.begin(request, {})
        reply = await call.reply
        self.world.capture.settle(call, True)
        (row,) = self.world.sink.rows[rows:]
        self.check(row)
        message = json.loads(CHAT.write(request, reply))["choices"][0]["message"]
        self.history.append(message)
        self.turns.append((len(self.history), row.turn))
        for issued in message.get("tool_calls", []):
            self.history.append({"role": "tool", "tool_call_id": issued["id"], "content": "ok"})

    def check(self, row: Any) -> None:
        world = self.world
        sent = world.sent(0)
        assert world.whole(row.turn) == sent + row.output
        assert row.parent < row.turn
        assert row.output == [token for ids in world.engine.given for token in ids]
        assert len(row.logprobs) == len(row.output) == sum(span.length for span in row.spans)
        if self.turns:
            # What stands in the history was sampled: its recorded tokens begin the prompt.
            known = world.whole(self.turns[-1][1])
            assert sent[: len(known)] == known

    def act(self, action: str, text: str, seed: int) -> None:
        rng = random.Random(seed)
        spoken = [i for i, message in enumerate(self.history) if message["role"] == "assistant"]
        if action == "edit" and spoken:
            at = rng.choice(spoken)
            self.history[at] = {**self.history[at], "content": "edited " + text}
            self.forget(at)
        elif action == "drop" and spoken:
            at = rng.choice(spoken)
            del self.history[at:]
            self.forget(at)
        elif action == "branch":
            del self.history[max(1, rng.randrange(len(self.history) + 1)) :]
            self.forget(len(self.history))
        elif action == "compact":
            self.history = [{"role": "user", "content": "summary " + text}, *self.history[-2:]]
            self.turns = []
        elif action == "respell":
            for message in self.history:
                for call in message.get("tool_calls") or []:
                    arguments = json.loads(call["function"]["arguments"])
                    spelt = json.dumps(dict(reversed(arguments.items())), indent=1, ensure_ascii=True)
                    call["function"]["arguments"] = spelt
        if action != "again":
            self.history.append({"role": "user", "content": text})

    def forget(self, at: int) -> None:
        self.turns = [turn for turn in self.turns if turn[0] <= at]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, model=st.sampled_from(["tiny", "hybrid", "thinking", "coder", "qwen3.5"]))
def test_rows_reconstruct_what_was_sent(new_world, renderers, steps, model):
    async def play() -> None:
        world = new_world(renderers[model], Limits(context=100_000, max_tokens=200, siblings=100))
        harness = Harness(world)
        for action, text, reply, cut, seed in steps:
            world.said = reply_text(reply)
            told = {"cut": cut} if 0 < cut < len(world.renderer.encode(world.said)) else {}
            world.engine.say(world.said, **told)
            if told:
                world.engine.say(world.renderer.decode(world.renderer.encode(world.said)[cut:]))
            world.engine.requests.clear()
            world.engine.given.clear()
            harness.act(action, text, seed)
            await harness.call()
            world.engine.scripts.clear()
        await world.proxy.close()

    asyncio.run(play())


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(SEQUENCE, SEQUENCE, st.integers(-1, 6)), max_size=12), SEQUENCE)
def test_branch_finds_the_longest_shared_prefix(turns, tokens):
    tree = CallTree()
    wholes: list[list[int]] = []
    for number, (new, output, wanted) in enumerate(turns):
        parent = min(wanted, number - 1)
        base = wholes[parent] if parent >= 0 else []
        found, keep = tree.branch(new, parent, len(base))
        prompt = base + new
        assert keep >= len(base)
        assert tree.sequence(found).tolist()[:keep] == prompt[:keep]
        tree.add(number, found, keep, prompt[keep:], output)
        wholes.append(prompt + output)
        assert tree.sequence(number).tolist() == wholes[-1]
        assert tree[number].output.tolist() == output
    found, keep = tree.branch(tokens, -1, 0)
    longest = max((common_prefix(array("i", tokens), 0, array("i", w), 0) for w in wholes), default=0)
    assert keep == longest
    assert found == -1 or tree.sequence(found).tolist()[:keep] == tokens[:keep]
