"""What the proxy spends on one call of a long conversation.

Run: `python tests/bench/bench_proxy.py [--calls 300] [--tokens 200000]`.

Prints CPU milliseconds (median of the last 10 calls) of reading the body, matching it, rendering and comparing its tail
and encoding the request; and the same for a short conversation, so that what grows with the context is seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

import msgspec
from conftest import TINY, model_folder

from gyre.engines.types import GenerateRequest
from gyre.engines.wire import generate_body
from gyre.proxy.conversation import Message, ToolCall
from gyre.proxy.dialects.chat import Chat
from gyre.proxy.matching import Turns, match, plan
from gyre.proxy.roles import Shell
from gyre.proxy.template import Renderer, load
from gyre.proxy.tree import CallTree

STAGES = ("read", "match", "plan", "encode")


def conversation(renderer: Renderer, calls: int, tokens: int) -> dict[str, float]:
    """Play `calls` calls that reach `tokens` tokens; median milliseconds of the last 10, by stage."""
    chat, tree, turns, rules = Chat(), CallTree(), Turns(), Shell()
    history: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "begin"}]
    unit = renderer.encode("ls -la && cat a.txt\n")
    result = "ls -la && cat a.txt\n" * max(1, tokens // calls // len(unit) - 4)
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    prompt: list[int] = []
    for number in range(calls):
        body = json.dumps({"model": "m", "messages": history}).encode()
        marks = [time.thread_time()]
        request = chat.read(body)
        marks.append(time.thread_time())
        found = match(request.conversation, "main", turns, rules.normal)
        marks.append(time.thread_time())
        planned = plan(request.conversation, found, tree, renderer)
        marks.append(time.thread_time())
        wanted = GenerateRequest(input_ids=planned.prompt, rid="0" * 32, max_new_tokens=100)
        msgspec.json.encode(generate_body(wanted, stream=True))
        marks.append(time.thread_time())
        for stage, start, end in zip(STAGES, marks, marks[1:], strict=False):
            times[stage].append((end - start) * 1000)
        assert (planned.parent, number == 0) in ((number - 1, False), (-1, True))
        arguments = json.dumps({"command": f"ls {number}"})
        output = renderer.encode(f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call><|im_end|>')
        tree.add(number, planned.parent, planned.keep, planned.context, output)
        call = ToolCall(f"call_{number}", "bash", arguments)
        turns.add(number, planned.key, Message(role="assistant", calls=(call,)), rules.normal)
        issued = {"id": call.id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        history.append({"role": "assistant", "content": None, "tool_calls": [issued]})
        history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        prompt = planned.prompt
    medians = {stage: statistics.median(values[-10:]) for stage, values in times.items()}
    return {"tokens": len(prompt), **medians, "match + plan": medians["match"] + medians["plan"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200_000)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        renderer = load(model_folder(Path(folder), TINY.read_text()), "qwen3")
    for calls, tokens in ((30, told.tokens * 30 // told.calls), (told.calls, told.tokens)):
        measured = conversation(renderer, calls, tokens)
        stages = ", ".join(f"{name} {value:.2f}" for name, value in measured.items() if name != "tokens")
        print(f"call {calls} of a conversation of {measured['tokens']:.0f} tokens, CPU ms: {stages}")


if __name__ == "__main__":
    main()
