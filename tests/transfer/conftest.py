"""Publishing processes, and tests that run in another process than pytest's.

Mooncake's settings are fixed for a process, and a defect in it may end one: all tests marked `other_process` run in
one interpreter of their own; here each gets the outcome that it had there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from gyre.transfer.manifest import RankBuffer

_CHILD = "GYRE_TEST_OTHER_PROCESS"
_OUTCOMES = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "other_process: runs in an interpreter of its own")


def _run_elsewhere(items: list[pytest.Item]) -> dict[str, str]:
    """Name of the test -> "" if it passed, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        names = [f"{item.path}::{item.name}" for item in items]
        environment = {**os.environ, _CHILD: "1"}
        result = subprocess.run([*command, *names], env=environment, capture_output=True, text=True, timeout=300)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
        outcomes = {case.attrib["name"]: "\n".join(part.text or part.tag for part in case) for case in cases}
    lost = f"no outcome; the process ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return {item.name: outcomes.get(item.name, lost) for item in items}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("other_process") is None or os.environ.get(_CHILD):
        return None
    stash = pyfuncitem.session.stash
    if _OUTCOMES not in stash:
        marked = [item for item in pyfuncitem.session.items if item.get_closest_marker("other_process")]
        stash[_OUTCOMES] = _run_elsewhere(marked)
    if stash[_OUTCOMES][pyfuncitem.name]:
        pytest.fail(stash[_OUTCOMES][pyfuncitem.name][-8000:], pytrace=False)
    return True


class PublishingProcess:
    """A running peer.py: its descriptor, and ways to hurt it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "peer.py"), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            raise ChildProcessError(f"peer.py {' '.join(arguments)} ended with {self.process.returncode}")
        self.buffer = msgspec.json.decode(line, type=RankBuffer)

    def tell(self, command: str) -> None:
        """Send a command and wait until it is done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def freeze(self) -> None:
        """SIGSTOP, and wait until the kernel says that it stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


StartPublisher = Callable[..., PublishingProcess]
_drawn: set[str] = set()


def start_process(nbytes: int, seed: int = 1) -> PublishingProcess:
    """A publishing process on a port that none had before.

    A fresh publisher was seen on the port of one that had just died: to a session, that is a restarted peer.
    """
    while True:
        process = PublishingProcess(str(nbytes), str(seed))
        if process.buffer.session not in _drawn:
            _drawn.add(process.buffer.session)
            return process
        process.stop()


class Switchboard:
    """One port that leads to a publisher's handshake port, and to its successor's after `target` was changed: a
    restart on the same port, without the minute for which the kernel may keep the dead one's port from it."""

    def __init__(self) -> None:
        self.target = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:  # closed
                return
            callee = socket.create_connection(("127.0.0.1", self.target))
            for source, sink in ((caller, callee), (callee, caller)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side is gone: so is this connection
            return

    def lead_to(self, process: PublishingProcess) -> RankBuffer:
        """The publisher's descriptor, by way of this port."""
        self.target = int(process.buffer.session.rpartition(":")[2])
        return msgspec.structs.replace(process.buffer, session=f"127.0.0.1:{self.port}")

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


@pytest.fixture
def switchboard() -> Iterator[Switchboard]:
    made = Switchboard()
    yield made
    made.close()


@pytest.fixture
def start_publisher() -> Iterator[StartPublisher]:
    """`start_publisher(nbytes, seed=1)`; every process it started is killed at the end."""
    started: list[PublishingProcess] = []

    def start(nbytes: int, seed: int = 1) -> PublishingProcess:
        started.append(start_process(nbytes, seed))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="module")
def healthy() -> Iterator[PublishingProcess]:
    """A peer that nobody hurts: 1000 bytes of seed 2."""
    process = start_process(1000, seed=2)
    yield process
    process.stop()
