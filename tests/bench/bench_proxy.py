"""What the proxy adds to a call, by the length of its context.

Run: `python tests/bench/bench_proxy.py [--contexts 10000,100000,700000] [--samples 30] [--dialect messages]`.

A harness plays a conversation whose every call adds about 1,000 tokens (a tool's output) against the proxy, which calls
an instant engine over HTTP; three processes. Added latency is the time from the request's first byte to the reply's
last, less the time in which the engine had it. The parts that no proxy can avoid are measured beside it: the same body
sent to a server that throws it away, and the same ids sent to the engine. The reference is what a proxy without memory
does to the same conversation: transformers' `apply_chat_template`, tokenizing all of it. Medians, and p99 where there
are enough samples to have one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import proxy_lab as lab

TAIL = 900
"""Tokens of a tool's output: with what the model said and the template, a call adds about 1,000."""


async def play(
    told: argparse.Namespace, folder: Path, engine: lab.Child, proxy: lab.Child
) -> tuple[dict[int, list[dict[str, float]]], dict[int, lab.Conversation]]:
    """Rows of measurements by context, and the conversation as it was at its end (the longest one of each)."""
    text = lab.source_text()
    tail = int(TAIL * lab.characters_per_token(folder, text))
    rows: dict[int, list[dict[str, float]]] = {}
    ends: dict[int, lab.Conversation] = {}
    execution = 0
    for context in told.contexts:
        rows[context] = []
        while len(rows[context]) < told.samples:
            conversation = lab.Conversation(told.dialect, text, tail, seed=execution, keep_messages=True)
            async with lab.connections(proxy.port, 1) as (connection,), lab.connections(engine.port, 1) as (straight,):
                await one(told, engine, proxy, connection, straight, conversation, execution, context, rows[context])
            execution += 1
            ends[context] = conversation
    return rows, ends


async def one(told, engine, proxy, connection, straight, conversation, execution, context, rows) -> None:  # type: ignore[no-untyped-def]
    tokens = 0
    window = max(3_000, 1_100 * told.samples // 2) if context > 50_000 else 3_000
    while tokens < context + window and len(rows) < told.samples:
        cpu = proxy.cpu
        began, ended, tokens = await lab.timed(connection, conversation, lab.key_of(execution))
        cpu = proxy.cpu - cpu
        if tokens < context - window:
            continue
        ((had, replied),) = (await lab.engine_log(engine.port))[-1:]
        row = {"tokens": float(tokens), "added": (ended - began) - (replied - had), "before": had - began}
        row |= {"cpu": cpu, "after": ended - replied}
        body = conversation.body()
        start = time.monotonic()
        await straight.post("/nothing", body)
        row["body"] = time.monotonic() - start
        ids = json.dumps(list(range(10_000, 10_000 + min(tokens, 20_000))), separators=(",", ":")).encode()
        ids = ids * (tokens // 20_000 or 1)
        start = time.monotonic()
        await straight.post("/nothing", [ids])
        row["ids"] = time.monotonic() - start
        row["bytes"] = float(sum(map(len, body)))
        rows.append(row)


def reference(folder: Path, conversation: lab.Conversation, repeats: int) -> float:
    """Median seconds of rendering and tokenizing the whole conversation, as transformers does it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "model" / "tokenizer.json"))
    tokenizer.chat_template = (folder / "model" / "chat_template.jinja").read_text()
    messages: list[dict[str, Any]] = [{"role": "system", "content": lab.SYSTEM}]
    for message in conversation.messages:
        messages += chat_messages(message)
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        tokenizer.apply_chat_template(messages, tools=lab.chat_tools(), tokenize=True, add_generation_prompt=True)
        times.append(time.monotonic() - start)
    return statistics.median(times)


def chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of the Messages or Chat dialect as templates take it."""
    if message["role"] == "assistant" and isinstance(message["content"], list):
        texts = [block["text"] for block in message["content"] if block["type"] == "text"]
        calls = [
            {"type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
            for block in message["content"]
            if block["type"] == "tool_use"
        ]
        return [{"role": "assistant", "content": "".join(texts), "tool_calls": calls}]
    if isinstance(message["content"], list):
        return [{"role": "tool", "content": block["content"]} for block in message["content"]]
    return [message]


def milliseconds(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=lambda s: [int(n) for n in s.split(",")], default=[10_000, 100_000, 700_000])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--dialect", choices=("messages", "chat"), default="messages")
    parser.add_argument("--repeats", type=int, default=3, help="of the reference")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.make_model(folder / "model")
        with lab.child("engine", folder) as engine, lab.child("proxy", folder, engine.url, 64) as proxy:
            rows, ends = asyncio.run(play(told, folder, engine, proxy))
            print(f"{told.dialect}, {told.samples} calls at each context; load {lab.load_average()}; medians in ms")
            for context, found in rows.items():
                slow = reference(folder, ends[context], told.repeats)
                added = milliseconds(found, "added")
                worst = sorted(row["added"] for row in found)[-1] * 1000
                print(
                    f"{context:>7} tokens ({statistics.median(r['bytes'] for r in found) / 1e6:.2f} MB body): "
                    f"added {added:.1f} (worst {worst:.1f}, before the engine {milliseconds(found, 'before'):.1f}, "
                    f"after {milliseconds(found, 'after'):.1f}), proxy's CPU {milliseconds(found, 'cpu'):.1f}, "
                    f"body alone {milliseconds(found, 'body'):.1f}, ids alone {milliseconds(found, 'ids'):.1f}; "
                    f"apply_chat_template {slow * 1000:.0f}: 1/{slow * 1000 / added:.0f}"
                )


if __name__ == "__main__":
    main()
