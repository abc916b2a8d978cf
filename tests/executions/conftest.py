"""A laboratory for sandbox tests: small tasks, commands run in a real sandbox, and a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.apptainer import Apptainer
from gyre.executions.bubblewrap import Bubblewrap
from gyre.executions.enroot import Enroot
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import MIB, Limits
from gyre.executions.namespaced import NamespacedSandbox
from gyre.executions.sandbox import Bind, ExitStatus, RunningSandbox, SandboxSpec
from gyre.executions.tasks import Task, load_task

TEST_SH = '#!/bin/bash\n[[ "$(cat out.txt)" == hello ]] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
KINDS: dict[str, type[NamespacedSandbox]] = {"bubblewrap": Bubblewrap, "apptainer": Apptainer, "enroot": Enroot}
LIMITS = Limits(memory=512 * MIB, processes=64, disk=64 * MIB, open_files=256, log=MIB)


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small root file system, to make images of."""
    from tests.executions.image_lab import small_system

    return small_system(tmp_path_factory.mktemp("system"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where images are unpacked."""
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass
class Lab:
    """Folders of one test. Shared layers are kept for the session."""

    root: Path
    folder: Path
    sandbox: NamespacedSandbox = field(default_factory=Bubblewrap)
    limits: Limits = LIMITS
    count: int = 0

    def task(self, test_sh: str = TEST_SH, toml: str = "", name: str = "task", dockerfile: str = "") -> Task:
        folder = self.folder / "tasks" / name
        shutil.rmtree(folder, ignore_errors=True)
        files = {
            "instruction.md": "Write hello to out.txt.\n",
            "task.toml": toml or 'schema_version = "1.0"\n',
            "tests/test.sh": test_sh,
            "environment/Dockerfile": dockerfile or "FROM debian:12\nWORKDIR /app\n",
            "solution/solve.sh": "echo hello > out.txt\n",
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        (folder / "tests/test.sh").chmod(0o755)
        return load_task(folder)

    def spec(self, command: str, task: Task | None = None, limits: Limits = LIMITS, **more: Any) -> SandboxSpec:
        self.count += 1
        place = self.folder / f"sandbox-{self.count}"
        upper, scratch = (private_folder(place / name) for name in ("upper", "scratch"))
        lowers = self.sandbox.lowers(self.root, task or self.task(name="other"))
        return SandboxSpec(
            lowers=lowers,
            upper=upper,
            scratch=scratch,
            workdir=task.workdir if task else "/app",
            argv=("bash", "-c", command),
            log=place / "log",
            limits=limits,
            image=task is not None and task.image is not None,
            **more,
        )

    async def start(self, command: str, **more: Any) -> tuple[RunningSandbox, SandboxSpec]:
        spec = self.spec(command, **more)
        return await self.sandbox.start(spec), spec

    async def run(self, command: str, timeout: float = 20.0, **more: Any) -> tuple[ExitStatus, str, Path]:
        """How the command ended, its output, and the snapshot."""
        running, spec = await self.start(command, **more)
        try:
            status = await running.wait(timeout)
        finally:
            await running.kill()
            if running.listener is not None:
                running.listener.close()
        snapshot = running.snapshot(spec.log.parent / "snapshot")
        return status, spec.log.read_text(errors="replace"), snapshot


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


def kinds(but: tuple[str, ...]) -> list[Any]:
    """The kinds of sandbox as parameters, some left out: bubblewrap in the default tier, the others in the slow one."""
    chosen = [kind for kind in KINDS if kind not in but]
    return [pytest.param(kind, marks=() if kind == "bubblewrap" else pytest.mark.slow) for kind in chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of the conformance suite (`every_kind`, of some kinds not: `but`) runs once a kind."""
    mark = metafunc.definition.get_closest_marker("every_kind")
    if "lab" in metafunc.fixturenames and mark is not None:
        metafunc.parametrize("lab", kinds(mark.kwargs.get("but", ())), indirect=True)


@pytest.fixture
def lab(layers: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    yield Lab(layers, tmp_path, installed(getattr(request, "param", "bubblewrap")))
    remove_tree(tmp_path)


def installed(kind: str) -> NamespacedSandbox:
    try:
        return KINDS[kind]()
    except UserError as error:
        pytest.skip(f"no {kind} here: {error}")


@pytest.fixture
def lab_of(lab: Lab) -> Callable[[str], Lab]:
    """The laboratory of one kind, for what is that kind's own; skips where it is not installed."""

    def of(kind: str) -> Lab:
        lab.sandbox = installed(kind)
        return lab

    return of


class ScriptedModel:
    """Answers chat completions from a script: a string is a command, None is the end, an int is an HTTP status."""

    def __init__(self, script: list[str | int | None]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        self.server = await asyncio.start_server(self._answer, sock=listener)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        self.keys.add(fields["authorization"].removeprefix("bearer "))
        request = json.loads(await reader.readexactly(int(fields["content-length"])))
        self.requests.append(request)
        step = self.script.pop(0) if self.script else None
        status = step if isinstance(step, int) else 200
        message = _message(step, len(self.requests))
        if status != 200:
            kind, body = "application/json", b'{"error": {"message": "no"}}'
        elif request.get("stream"):
            kind, body = "text/event-stream", _stream(message)
        else:
            kind, body = "application/json", json.dumps({"choices": [{"message": message}]}).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n".encode())
        if kind == "text/event-stream":
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for start in range(0, len(body), 37):
                piece = body[start : start + 37]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


def _message(step: str | int | None, number: int) -> dict[str, Any]:
    if not isinstance(step, str):
        return {"role": "assistant", "content": "It is done."}
    function = {"name": "bash", "arguments": json.dumps({"command": step})}
    calls = [{"id": f"call-{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _stream(message: dict[str, Any]) -> bytes:
    """The message as server-sent events, its arguments in two pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
    for index, call in enumerate(message.get("tool_calls", ())):
        text = call["function"]["arguments"]
        first = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": text[:5]}}
        deltas += [{"tool_calls": [first]}, {"tool_calls": [{"index": index, "function": {"arguments": text[5:]}}]}]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


@pytest.fixture
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture
def bind() -> type[Bind]:
    return Bind


def processes_with(word: str) -> list[str]:
    """Command lines of live processes on the host that hold `word`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in line and int(name) != os.getpid():
            found.append(line)
    return found


@pytest.fixture
def live() -> Any:
    return processes_with
