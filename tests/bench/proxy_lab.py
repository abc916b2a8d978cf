"""What the benches of the proxy share: a tokenizer, an instant engine, a proxy in a process of its own, a harness.

The harness speaks plain HTTP over one connection and keeps its history as bytes, so its own work stays small beside
what is measured. The engine throws the prompt away unread and replies at once, with the same tokens each time; it says
when it had the whole request and when it replied (CLOCK_MONOTONIC, which all processes of a machine share).

Run as a program it is one of the processes: `proxy_lab.py engine FOLDER`, `proxy_lab.py proxy FOLDER ENGINE_URL
EXECUTIONS`. They print their port, and end when their standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "tests" / "proxy" / "thinking.jinja"
VERSION = "1.1-0123456789abcdef"
SYSTEM = "You are a coding agent. Use the tools to do what you are asked, and say when you are done.\n" * 20
TOOLS = ("Bash", "Read", "Write", "Edit", "Grep", "Glob", "WebFetch", "TodoWrite", "Agent", "Skill")
ABOUT = "Takes what it needs, does it in the workspace, and gives back what a person would see. " * 8
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 32_000
CALL = "sed -n '120,180p' gyre/processes/worker.py && grep -rn 'def close' gyre | head -20"


# -- the model


def source_text() -> str:
    """Some megabytes of real text: Python's own library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))


def make_model(folder: Path) -> None:
    """A tokenizer of VOCABULARY tokens, trained on the text that it will meet, and Qwen3's kind of template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([source_text()], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{%- set opening = '' -%}" + TEMPLATE.read_text())


def key_of(number: int) -> str:
    return f"key-of-execution-{number:06d}"


# -- the engine


class _Instant(asyncio.BufferedProtocol):
    """One connection of the engine: counts a request's bytes, throws them away, replies."""

    def __init__(self, replies: dict[str, bytes], log: list[tuple[float, float]]) -> None:
        self.replies, self.log = replies, log
        self.buffer = bytearray(1 << 20)
        self.head = b""
        self.left = -1
        self.path = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.left < 0:
            self.head += self.buffer[:nbytes]
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            fields = self.head[:end].decode("latin-1").split("\r\n")
            named = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in fields[1:])}
            self.path = fields[0].split(" ")[1]
            self.left = int(named.get("content-length", "0"))
            nbytes = len(self.head) - end - 4
            self.head = b""
        self.left -= nbytes
        if self.left == 0:
            self.left = -1
            self.answer()

    def answer(self) -> None:
        had = time.monotonic()
        if self.path == "/log":
            body = json.dumps(self.log).encode()
            self.log.clear()
            self.transport.write(_head(200, len(body)) + body)
            return
        self.transport.write(self.replies.get(self.path) or _head(404, 0))
        self.log.append((had, time.monotonic()))


def _head(status: int, length: int, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def engine_replies(folder: Path) -> dict[str, bytes]:
    """By path: SGLang's event stream of one tool call, the same as an OpenAI chat completion, and nothing."""
    from gyre.proxy.template import load

    renderer = load(folder / "model", "qwen3")
    said = "I look.\n<tool_call>\n" + json.dumps({"name": "Bash", "arguments": {"command": CALL}}) + "\n</tool_call>"
    ids = [*renderer.encode(said), renderer.end_id]
    meta = {
        "finish_reason": {"type": "stop", "matched": renderer.end_id},
        "prompt_tokens": 1000,
        "cached_tokens": 900,
        "weight_version": VERSION,
        "output_token_logprobs": [[-0.1 - i / 64, token, None] for i, token in enumerate(ids)],
    }
    stream = b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\ndata: [DONE]\n\n"
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "Bash", "arguments": json.dumps({"command": CALL})},
    }
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    chat = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": len(ids), "total_tokens": 1000 + len(ids)},
        }
    ).encode()
    return {
        "/generate": _head(200, len(stream), "text/event-stream") + stream,
        "/v1/chat/completions": _head(200, len(chat)) + chat,
        "/nothing": _head(200, 2) + b"{}",
    }


async def serve_engine(folder: Path) -> None:
    replies = engine_replies(folder)
    log: list[tuple[float, float]] = []
    server = await asyncio.get_running_loop().create_server(lambda: _Instant(replies, log), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the proxy


async def serve_proxy(folder: Path, engine: str, executions: int) -> None:
    """A worker's proxy with a worker's shards, as `gyre.processes.worker` puts them together."""
    import aiohttp

    from gyre.engines.client import EngineClient
    from gyre.ledger.layout import RunFolder
    from gyre.ledger.shards import TurnWriter
    from gyre.proxy.capture import Limits
    from gyre.proxy.generate import Generator
    from gyre.proxy.heap import settle
    from gyre.proxy.roles import rules_for
    from gyre.proxy.routes import Route, Routes
    from gyre.proxy.server import Proxy, ProxyExecution
    from gyre.proxy.template import load

    settle()
    run = RunFolder(folder / "run")
    (folder / "run" / "trajectories").mkdir(parents=True, exist_ok=True)
    renderer = load(folder / "model", "qwen3")
    routes = Routes()
    route = Route(url=engine, key="k", weight_version=VERSION, cell="cell-0")
    routes.set_serving("cell-0", route)
    turns = TurnWriter(run, "worker-0", 1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = EngineClient(engine, session, "k", None, None)
        shared: dict[str, Any] = {"temperature": 1.0, "token_hex": secrets.token_hex, "now": time.time}
        generator = Generator(
            routes, lambda route: client, stop_ids=renderer.stop_ids, decode=renderer.decode, **shared
        )
        proxy = Proxy(model="m", renderer=renderer, generator=generator, sink=turns, **shared)
        limits = Limits(context=1_048_576, max_tokens=32_000)
        for number in range(executions):
            name = f"g{number:05d}-00"
            routes.set(name, "cell-0")
            proxy.register(
                ProxyExecution(
                    execution=name, attempt=0, key=key_of(number), limits=limits, rules=rules_for("claude-code")
                )
            )
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(1024)
        await proxy.add_listener(sock)
        print(sock.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await proxy.close()
    turns.close()


class Child(NamedTuple):
    """A process that serves at `url`."""

    process: subprocess.Popen[bytes]
    url: str
    port: int

    @property
    def cpu(self) -> float:
        """Seconds of its threads on a CPU so far: on a shared machine they say more than the wall clock."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    @property
    def memory(self) -> float:
        """Resident MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def child(*arguments: Any) -> Iterator[Child]:
    """One of this module's programs."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield Child(process, f"http://127.0.0.1:{port}", port)
    finally:
        process.stdin.close()
        process.wait(timeout=60)


# -- the harness


class Connection:
    """One HTTP connection to a port of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def post(self, path: str, body: list[bytes], key: str = "", more: str = "") -> tuple[int, bytes]:
        length = sum(map(len, body))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{more}"
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        self.writer.writelines([head.encode(), *body])
        fields = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        named = {n: v.strip() for n, _, v in (line.partition(":") for line in fields)}
        return int(fields[0].split()[1]), await self.reader.readexactly(int(named["content-length"]))

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Conversation:
    """The history of one agent, as bytes of one dialect. Its tools print `tail` characters a call."""

    def __init__(self, dialect: str, text: str, tail: int, seed: int, keep_messages: bool = False) -> None:
        self.dialect, self.text, self.tail = dialect, text, tail
        self.random = random.Random(seed)
        self.pieces: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        self.keep_messages = keep_messages
        self.calls = 0
        if dialect == "messages":
            self.path = "/v1/messages"
            tools = [{"name": n, "description": ABOUT, "input_schema": PARAMETERS} for n in TOOLS]
            head = {"model": "m", "max_tokens": 8000, "system": SYSTEM, "tools": tools, "messages": 0}
        else:
            self.path = "/v1/chat/completions"
            head = {"model": "m", "max_tokens": 8000, "tools": chat_tools(), "messages": 0}
        self.head = json.dumps(head).encode()[:-2] + b"["
        if dialect == "chat":
            self.say({"role": "system", "content": SYSTEM})
        self.say({"role": "user", "content": "Find out what this does, and put it right."})

    def say(self, message: dict[str, Any]) -> None:
        self.pieces.append((b"," if self.pieces else b"") + json.dumps(message).encode())
        if self.keep_messages:
            self.messages.append(message)

    def body(self) -> list[bytes]:
        return [self.head, *self.pieces, b"]}"]

    def printed(self) -> str:
        at = self.random.randrange(len(self.text) - self.tail)
        return self.text[at : at + self.tail]

    def take(self, data: bytes) -> int:
        """Put a reply and the results of its calls into the history; gives the prompt's tokens."""
        reply = json.loads(data)
        self.calls += 1
        if self.dialect == "messages":
            self.say({"role": "assistant", "content": reply["content"]})
            ids = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": i, "content": self.printed()} for i in ids]
            self.say({"role": "user", "content": results})
            usage = reply["usage"]
            return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])
        message = reply["choices"][0]["message"]
        self.say(message)
        for call in message["tool_calls"]:
            self.say({"role": "tool", "tool_call_id": call["id"], "content": self.printed()})
        return int(reply["usage"]["prompt_tokens"])


PARAMETERS = {
    "type": "object",
    "properties": {n: {"type": "string", "description": ABOUT[:87]} for n in ("command", "description", "path")},
    "required": ["command"],
}


def chat_tools() -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": n, "description": ABOUT, "parameters": PARAMETERS}} for n in TOOLS
    ]


async def timed(connection: Connection, conversation: Conversation, key: str) -> tuple[float, float, int]:
    """One call: (when it began, when its reply was there, tokens of its prompt). Raises for any error."""
    body = conversation.body()
    began = time.monotonic()
    status, data = await connection.post(conversation.path, body, key)
    ended = time.monotonic()
    if status != 200:
        raise RuntimeError(f"HTTP {status}: {data[:300]!r}")
    return began, ended, conversation.take(data)


async def engine_log(port: int) -> list[tuple[float, float]]:
    """(had the whole request, replied) of each of the engine's calls since the last time this was asked."""
    connection = await Connection.open(port)
    _, data = await connection.post("/log", [b""])
    await connection.close()
    return [(had, replied) for had, replied in json.loads(data)]


@contextlib.asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    opened = [await Connection.open(port) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            await connection.close()


def characters_per_token(folder: Path, text: str) -> float:
    from gyre.proxy.template import load

    sample = text[:400_000]
    return len(sample) / len(load(folder / "model", "qwen3").encode(sample))


def load_average() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg()[:2])


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "engine":
        asyncio.run(serve_engine(place))
    else:
        asyncio.run(serve_proxy(place, sys.argv[3], int(sys.argv[4])))
