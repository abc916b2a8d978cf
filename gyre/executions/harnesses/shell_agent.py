"""The `shell` harness: a minimal coding agent over OpenAI Chat Completions with one tool, `bash`.

A stand-alone program for `python3 -I -S`: standard library only, and little of it, since it starts once an
execution. It owns the conversations of its execution and nothing else. Exit codes: 0 finished (or out of
turns), 2 wrong environment, 3 the server kept failing, 4 the server refused a request. Environment:
OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, SHELL_INSTRUCTION (a file); optional SHELL_MAX_TURNS,
SHELL_CONVERSATIONS (how often the instruction is given, each time anew, in the same workspace), SHELL_MAX_TOKENS,
SHELL_STREAM=1, SHELL_COMMAND_TIMEOUT (s), SHELL_OUTPUT_LIMIT (bytes), SHELL_HTTP_TIMEOUT (s), SHELL_RETRIES.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

SYSTEM = "You are a coding agent."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class Retry(Exception):
    """The request may be sent again: no answer, or an answer that says so."""


class Refused(Exception):
    """The server understood the request and will never accept it."""


def setting(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


def tool_content(output: str, code: int | None) -> str:
    text = output.rstrip("\n")
    if code == 0:
        return text or "ok"
    ending = "[timed out]" if code is None else f"[exit code {code}]"
    return f"{text}\n{ending}" if text else ending


def run_command(command: str) -> tuple[str, int | None]:
    """Run in bash; (output, exit code), code None at the time limit.

    Background processes do not hold it up.
    """
    limit, timeout = setting("SHELL_OUTPUT_LIMIT", 16384), setting("SHELL_COMMAND_TIMEOUT", 120)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "SHELL_"))}
    pipe, write_end = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=write_end,
        start_new_session=True,
        env=environment,
    )
    os.close(write_end)
    os.set_blocking(pipe, False)
    end = os.pidfd_open(process.pid)
    output, dropped, code = b"", 0, None
    deadline, watched = time.monotonic() + timeout, [pipe, end]
    while code is None and (left := deadline - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left)[0]
        data = b""
        if pipe in ready:
            data = os.read(pipe, 65536)
            if not data:
                watched.remove(pipe)
        kept = data[: limit - len(output)]
        output, dropped = output + kept, dropped + len(data) - len(kept)
        if end in ready and (dropped or not data):
            code = process.wait()
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(end)
    os.close(pipe)
    text = output.decode("utf-8", "replace")
    return (f"{text}\n[{dropped} more bytes]" if dropped else text), code


def post(path: str, body: dict[str, Any]) -> tuple[int, Iterator[bytes]]:
    """One HTTP request; (status, reader of the body)."""
    host, _, base = os.environ["OPENAI_BASE_URL"].partition("://")[2].partition("/")
    name, _, port = host.partition(":")
    data = json.dumps(body).encode()
    head = (
        f"POST /{base.strip('/')}/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        connection = socket.create_connection((name, int(port or 80)), setting("SHELL_HTTP_TIMEOUT", 3600))
        connection.sendall(head.encode() + data)
        reader = connection.makefile("rb")
        connection.close()
        status = int(reader.readline().split()[1])
        headers = {}
        while line := reader.readline().strip():
            key, _, value = line.decode("latin-1").partition(":")
            headers[key.lower()] = value.strip()
    except (OSError, IndexError, ValueError) as error:
        raise Retry(f"no answer: {error}") from error
    return status, body_pieces(reader, headers)


def body_pieces(reader: BinaryIO, headers: dict[str, str]) -> Iterator[bytes]:
    """The body, in pieces: chunks, or all of it."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(reader.readline(), 16):
                yield reader.read(size)
                reader.readline()
            return
        length = int(headers.get("content-length", -1))
        data = reader.read(length)
        if len(data) < length:
            raise Retry("the answer broke off")
        yield data
    except (OSError, ValueError) as error:
        raise Retry(f"the answer broke off: {error}") from error
    finally:
        reader.close()


def sse_events(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises Retry when it ends without [DONE] or carries an error."""
    pending = b""
    for piece in pieces:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise Retry(str(event["error"]))
                yield event
    raise Retry("the stream broke off")


def streamed_message(pieces: Iterator[bytes]) -> dict[str, Any]:
    """The assistant message of an SSE stream."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in sse_events(pieces):
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["id"] = part.get("id") or call["id"]
                for key, value in (part.get("function") or {}).items():
                    call["function"][key] += value or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One model call; the assistant's message."""
    body: dict[str, Any] = {"model": os.environ.get("OPENAI_MODEL", "model"), "messages": messages}
    body["tools"] = [TOOL]
    if os.environ.get("SHELL_MAX_TOKENS"):
        body["max_tokens"] = setting("SHELL_MAX_TOKENS", 0)
    stream = os.environ.get("SHELL_STREAM") == "1"
    if stream:
        body["stream"] = True
    status, pieces = post("chat/completions", body)
    if status == 429 or status >= 500:
        raise Retry(f"status {status}: {b''.join(pieces)[:500].decode('utf-8', 'replace')}")
    if status != 200:
        raise Refused(f"status {status}: {b''.join(pieces)[:500].decode('utf-8', 'replace')}")
    try:
        return streamed_message(pieces) if stream else json.loads(b"".join(pieces))["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Retry(f"not a completion: {error!r}") from error


def complete_with_retries(messages: list[dict[str, Any]]) -> dict[str, Any]:
    wait, left = 0.25, setting("SHELL_RETRIES", 6)
    while True:
        try:
            return complete(messages)
        except Retry as error:
            if not left:
                raise
            print(f"[retry] {error}", flush=True)
        time.sleep(wait)
        wait, left = min(8.0, wait * 2), left - 1


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """The tool message for one tool call."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
        command = arguments["command"]
        if function.get("name") != "bash" or not isinstance(command, str) or "\0" in command:
            raise ValueError("not a command for bash")
    except (ValueError, KeyError, TypeError) as error:
        content = f"error: call bash with a command, a string ({error})"
    else:
        print(f"$ {command}", flush=True)
        content = tool_content(*run_command(command))
    print(content, flush=True)
    return {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}


def main() -> int:
    try:
        with open(os.environ["SHELL_INSTRUCTION"], encoding="utf-8") as file:
            instruction = file.read()
    except (KeyError, OSError) as error:
        print(f"no instruction: {error}", file=sys.stderr)
        return 2
    code = 0
    for _ in range(setting("SHELL_CONVERSATIONS", 1)):
        code = code or converse(instruction)
    return code


def converse(instruction: str) -> int:
    """One conversation, from the instruction to a reply without a tool call; the exit code."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for _ in range(setting("SHELL_MAX_TURNS", 8)):
        try:
            message = complete_with_retries(messages)
        except Retry as error:
            print(f"the server keeps failing: {error}", file=sys.stderr)
            return 3
        except Refused as error:
            print(f"the server refused: {error}", file=sys.stderr)
            return 4
        messages.append(message)
        if message.get("content"):
            print(message["content"], flush=True)
        calls = message.get("tool_calls") or []
        if not calls:
            return 0
        messages.extend(answer(call) for call in calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
