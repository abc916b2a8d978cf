"""Every kind of sandbox that is namespaces, against programs that do not want to be held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.errors import UserError
from gyre.executions import running as running_module
from gyre.executions.bubblewrap import Bubblewrap
from gyre.executions.ends import readable
from gyre.executions.limits import MIB, Limits
from gyre.executions.namespaced import check_host
from gyre.executions.sandbox import ExitStatus, SandboxFailure, make_sandbox

pytestmark = pytest.mark.every_kind


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("exit 0", ExitStatus(code=0)),
        ("exit 7", ExitStatus(code=7)),
        ("kill -TERM $$", ExitStatus(signal=15)),
    ],
)
async def test_exit_status(lab: Any, command: str, status: ExitStatus) -> None:
    assert (await lab.run(command))[0] == status


async def test_command_that_does_not_exist_ends_with_127(lab: Any) -> None:
    running, spec = await lab.start("exec /no/such/program")
    assert await running.wait(20) == ExitStatus(code=127)
    await running.kill()
    assert "No such file" in spec.log.read_text()


async def test_what_it_sees(lab: Any) -> None:
    _, output, _ = await lab.run("id -u; hostname; cd /; echo *; ls /tests /solution 2>&1; env | sort", env={"A": "b"})
    lines = output.splitlines()
    assert lines[:2] == ["0", "task"]
    assert set(lines[2].split()) <= set(
        [
            "app",
            "bin",
            "dev",
            "etc",
            "home",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "logs",
            "mnt",
            "opt",
            "proc",
            "root",
            "run",
            "sbin",
            "srv",
            "tmp",
            "usr",
            "var",
        ]
    )
    assert lines[3:5] == [f"ls: cannot access '{path}': No such file or directory" for path in ("/tests", "/solution")]
    names = {line.partition("=")[0] for line in lines[5:]}
    assert names == {"A", "HOME", "LANG", "PATH", "PWD", "SHLVL", "_", "OLDPWD"}


async def test_changes_are_in_the_snapshot_and_nowhere_else(lab: Any) -> None:
    task = lab.task(dockerfile="FROM x\nWORKDIR /app\nCOPY Dockerfile seed.txt\n")
    status, _, snapshot = await lab.run(
        "cat seed.txt; echo new > new.txt; echo more >> seed.txt; rm /etc/hosts", task=task
    )
    assert status == ExitStatus(code=0)
    assert (snapshot / "app/new.txt").read_text() == "new\n"
    assert (snapshot / "app/seed.txt").read_text().endswith("seed.txt\nmore\n")
    base, seed = lab.sandbox.lowers(lab.root, task)
    assert (base / "etc/hosts").is_file()
    assert not (seed / "app/new.txt").exists()
    assert "more" not in (seed / "app/seed.txt").read_text()


@pytest.mark.parametrize(
    "path",
    # the kernel's settings are opened, not written: a test must not change the machine, even if it fails
    ["/usr/bin/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/run/gyre/launcher.py"],
)
async def test_what_is_read_only(lab: Any, path: str) -> None:
    status, output, _ = await lab.run(f"exec 3<>{path}")
    assert status == ExitStatus(code=1)
    assert any(
        f"{why}\n" in output for why in ("Read-only file system", "Permission denied", "No such file or directory")
    )


async def test_no_file_of_the_kernel_can_be_written(lab: Any) -> None:
    """Neither below /proc/sys nor beside it; the processes' own files aside. (bwrap alone leaves this open to root.)"""
    command = """shopt -s globstar; for file in /proc/[a-z]*/** /proc/[a-z]*; do
        [[ -f $file && -w $file && ! $file =~ ^/proc/(self|thread-self)(/|$) ]] && echo $file; done; echo end"""
    _, output, _ = await lab.run(command)
    assert output == "end\n"


async def test_no_privileges_and_no_way_to_get_them(lab: Any) -> None:
    _, output, _ = await lab.run("grep CapEff /proc/self/status; unshare -Ur true || echo refused")
    assert output.splitlines()[0].split()[1] == "0" * 16
    assert output.splitlines()[-1] == "refused"


async def test_background_processes_are_dead_before_the_snapshot(lab: Any, live: Any) -> None:
    word = f"mark-{os.getpid()}-{lab.folder.name}"
    writer = f"trap '' TERM HUP INT; : {word}; while :; do echo x >> /app/growing; sleep 0.01; done"
    command = f"""export W="{writer}"
        (setsid setsid bash -c "$W" >/dev/null 2>&1 &)
        setsid nohup bash -c "$W" >/dev/null 2>&1 &
        until [[ $(wc -l < growing) -gt 3 ]]; do sleep 0.01; done 2>/dev/null"""
    running, spec = await lab.start(command)
    assert await running.wait(20) == ExitStatus(code=0)
    await running.kill()
    assert live(word) == []
    snapshot = running.snapshot(spec.log.parent / "snapshot")
    size = (snapshot / "app/growing").stat().st_size
    assert size >= 8
    await asyncio.sleep(0.05)
    assert (snapshot / "app/growing").stat().st_size == size


async def test_kill_of_one_that_ignores_every_signal(lab: Any, live: Any) -> None:
    word = f"mark-{os.getpid()}-{lab.folder.name}"
    running, _ = await lab.start(f"trap '' TERM INT HUP QUIT; : {word}; while :; do sleep 1; done")
    assert await running.wait(0.05) == ExitStatus(timed_out=True)
    assert live(word) != []
    await running.kill()
    await running.kill()
    assert live(word) == []


async def test_only_the_handed_out_socket_leads_out(lab: Any) -> None:
    """Inside: only a loopback, on which nothing but the handed-out port listens. Outside: the port is not there."""
    host = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = host.sockets[0].getsockname()[1]
    command = f"""tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '
        (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached the host
        (exec 3<>/dev/tcp/1.1.1.1/53) 2>/dev/null && echo reached the world
        exec 3<>/dev/tcp/127.0.0.1/8400; echo ping >&3; cat <&3"""
    running, spec = await lab.start(command, listen_port=8400)

    async def pong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"pong after " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(pong, sock=running.listener)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", 8400)
    assert await running.wait(20) == ExitStatus(code=0)
    await running.kill()
    server.close()
    host.close()
    assert spec.log.read_text() == "lo\npong after ping\n"


async def test_the_command_inherits_no_descriptor(lab: Any) -> None:
    _, output, _ = await lab.run("ls /proc/$$/fd; true", listen_port=8400)
    assert output.split() == ["0", "1", "2"]


async def test_no_process_beside_it_holds_a_way_out(lab: Any) -> None:
    """Those of the tool that are seen inside have no file of the host open, no privilege, and the same root."""
    command = """for process in /proc/[0-9]*; do
        readlink $process/fd/* | grep -v -e ^/dev/null$ -e ^/proc -e : ; grep -E '^Cap(Prm|Eff)' $process/status
        [[ $process/root/app -ef /app ]] || echo $process has another root; done; true"""
    _, output, _ = await lab.run(command)
    assert {line.split()[-1] for line in output.splitlines()} == {"0" * 16}, output


async def test_big_output_is_capped(lab: Any) -> None:
    limits = Limits(log=100_000)
    status, output, _ = await lab.run("head -c 5000000 /dev/zero | tr '\\0' x; echo done >&2; exit 3", limits=limits)
    assert status == ExitStatus(code=3)
    assert output == "x" * 100_000 + "\n[gyre: 4900005 more bytes of output were dropped]\n"


@pytest.mark.parametrize(
    ("command", "limits", "name"),
    [
        ("x=$(head -c 200M /dev/zero | tr '\\0' x); sleep 20", Limits(memory=64 * MIB), "memory"),
        ("for i in {1..40}; do sleep 20 & done; wait", Limits(processes=20), "processes"),
        ("for i in {1..40}; do head -c 1M /dev/zero > $i; done; sleep 20", Limits(disk=16 * MIB), "disk"),
    ],
)
async def test_watchdog(lab: Any, command: str, limits: Limits, name: str) -> None:
    if name == "processes":  # as root the kernel's own limit does not bind; elsewhere it comes first
        status, output, _ = await lab.run(command, limits=limits, timeout=10)
        assert status.limit == "processes" or "Resource temporarily unavailable" in output
    else:
        status, _, _ = await lab.run(command, limits=limits)
        assert status == ExitStatus(signal=9, limit=name)


async def test_kernel_limits(lab: Any) -> None:
    limits = Limits(open_files=123, disk=MIB)
    _, output, _ = await lab.run("ulimit -n; ulimit -c; head -c 3M /dev/zero > big; stat -c %s big", limits=limits)
    assert output.split()[:2] == ["123", "0"]
    assert output.split()[-1] == str(MIB)


async def test_a_broken_sandbox_is_a_sandbox_failure(lab: Any) -> None:
    broken = msgspec.structs.replace(lab.spec("true"), workdir="/nowhere")
    with pytest.raises(SandboxFailure, match="/nowhere"):
        await lab.sandbox.start(broken)
    with pytest.raises(SandboxFailure, match=f"cannot start {lab.sandbox.tool}"):
        await type(lab.sandbox)("/no/program").start(lab.spec("true"))


async def test_one_that_is_killed_while_it_starts_is_a_sandbox_failure(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kills it (the kernel, an administrator), the worker goes on and the execution is tried again."""
    first_processes = running_module.first_processes

    def killed(launcher: int) -> tuple[int, int]:
        pid, innermost = first_processes(launcher)
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # the tool, which has buried its child
        os.close(fd)
        return pid, innermost

    monkeypatch.setattr(running_module, "first_processes", killed)
    with pytest.raises(SandboxFailure, match="killed while it started"):
        await lab.start("exit 0")


async def test_cancelled_start_leaves_nothing(lab: Any, live: Any) -> None:
    word = f"mark-{os.getpid()}-{lab.folder.name}"
    start = asyncio.ensure_future(lab.start(f": {word}; sleep 100"))
    while not live(word):
        await asyncio.sleep(0)
    start.cancel()
    try:
        running, _ = await start
        await running.kill()
    except asyncio.CancelledError:
        pass
    assert live(word) == []


async def test_a_tool_that_hangs_is_ended_with_all_it_started(
    lab: Any, live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "START_TIMEOUT", 0.2)
    monkeypatch.setattr(running_module, "PATIENCE", 0.2)
    word = f"{100_000 + os.getpid()}.5"
    hanging = lab.folder / "hanging"
    hanging.write_text(f"#!/bin/bash\n(sleep {word}; true)\ntrue\n")
    hanging.chmod(0o755)
    with pytest.raises(SandboxFailure, match="not ready within"):
        await type(lab.sandbox)(str(hanging)).start(lab.spec("true"))
    assert live(word) == []


async def test_sandbox_dies_with_its_parent(lab: Any, live: Any) -> None:
    """A child process starts a sandbox and is killed by SIGKILL."""
    word = f"mark-{os.getpid()}-{lab.folder.name}"
    spec = lab.spec("")
    program = f"""
import asyncio
from pathlib import Path
from {type(lab.sandbox).__module__} import {type(lab.sandbox).__name__}
from gyre.executions.sandbox import SandboxSpec
async def main():
    spec = SandboxSpec(lowers=[Path(p) for p in {list(map(str, spec.lowers))!r}], upper=Path({str(spec.upper)!r}),
        scratch=Path({str(spec.scratch)!r}), workdir="/app", log=Path({str(spec.log)!r}),
        argv=("bash", "-c", "(setsid sleep 100 &); : {word}; sleep 100; true"))
    running = await {type(lab.sandbox).__name__}().start(spec)
    print("started", flush=True)
    await running.wait(100)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await asyncio.to_thread(child.stdout.readline) == b"started\n"
    assert live(word) != []
    fds = []
    for pid in _pids(word):
        with contextlib.suppress(ProcessLookupError):  # one that ends by itself
            fds.append(os.pidfd_open(int(pid)))
    child.kill()
    child.wait()
    child.stdout.close()
    for fd in fds:
        assert await readable(fd, 20)
        os.close(fd)
    assert live(word) == []


def _pids(word: str) -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path("/proc", name, "cmdline").read_bytes() and int(name) != os.getpid():
                found.append(name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_make_sandbox_checks_the_machine(tmp_path: Path) -> None:
    assert (await make_sandbox("bubblewrap", tmp_path)).kind == "bubblewrap"
    assert list(tmp_path.iterdir()) == []


async def test_a_machine_without_working_bubblewrap(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(UserError) as caught:
        await check_host(Bubblewrap(str(broken)), tmp_path / "root")
    message = str(caught.value)
    assert "bubblewrap does not work on this machine (bwrap failed: bwrap: No permissions" in message
    assert 'sandbox.kind = "process"' in message
    assert "\n" not in message


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts an overlay in a mount namespace of its own")
def test_a_file_system_that_cannot_hold_an_upper_layer(tmp_path: Path) -> None:
    """An overlay on an overlay."""
    for name in ("lower", "upper", "work", "on-overlay"):
        (tmp_path / name).mkdir()
    program = """
import asyncio, sys
from pathlib import Path
from gyre.errors import UserError
from gyre.executions.sandbox import make_sandbox
try:
    asyncio.run(make_sandbox("bubblewrap", Path("on-overlay/root")))
except UserError as error:
    print(error)
"""
    mount = "mount -t overlay x -o lowerdir=lower,upperdir=upper,workdir=work on-overlay"
    command = ["unshare", "-m", "bash", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "on-overlay/root: its file system cannot hold a sandbox's upper layer; put workspaces"
    )
    assert len(done.stdout.splitlines()) == 1


async def test_descriptors_do_not_pile_up(lab: Any) -> None:
    await lab.run("true", listen_port=8400)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await lab.run("true", listen_port=8400)
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_fork_bomb_is_ended(lab: Any, live: Any) -> None:
    word = f"bomb{os.getpid()}"
    running, _ = await lab.start(f"{word}() {{ {word} | {word} & }}; {word}; sleep 20; true")
    as_root = os.geteuid() == 0  # for others the kernel refuses to fork, and the bomb just goes on
    status = await running.wait(30 if as_root else 0.5)
    await running.kill()
    assert status.limit in ("processes", "memory") or not as_root
    assert live(word) == []
