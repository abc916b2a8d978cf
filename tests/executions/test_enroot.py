"""What is enroot's own in its kind of sandbox: what it must not read, what it refuses, and paths that hold anything.

The conformance suite (`every_kind`) runs on it too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.check import check_task
from gyre.executions.enroot import Enroot, find_enroot
from gyre.executions.enroot_mounts import binds, entry
from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.harnesses import find_harness
from gyre.executions.layers import private_folder
from gyre.executions.namespaced import check_host
from gyre.executions.sandbox import ExitStatus, make_sandbox
from gyre.executions.tasks import load_task

TASK = Path(__file__).parents[2] / "recipes/tasks/quickstart/sort-01"
TIMEOUTS = Timeouts(harness=60, grader=60, execution=200)
PROBLEMATIC = "a b,c:d\\e#é"


@pytest.fixture
def enroot_lab(lab_of: Any) -> Any:
    return lab_of("enroot")


def program(folder: Path, version: str, start: str = "exit 1") -> Path:
    """Something called enroot."""
    path = private_folder(folder) / "enroot"
    path.write_text(f"#!/bin/bash\n[[ $1 == version ]] && exec echo '{version}'\n{start}\n")
    path.chmod(0o755)
    return path


def test_where_it_is_not_installed_or_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^enroot is not installed: .*sandbox.kind"):
        find_enroot()
    for number, version in enumerate(("3.4.1", "2.0.0-rc1")):
        old = program(tmp_path / str(number), version)
        monkeypatch.setenv("PATH", str(old.parent))
        with pytest.raises(UserError, match=r"is enroot [23][.\d]+: 3\.5 or later is needed"):
            find_enroot()
    monkeypatch.setenv("PATH", str(program(tmp_path / "odd", "what?").parent))
    with pytest.raises(UserError, match="is enroot installed well"):
        find_enroot()


async def test_a_machine_where_it_does_not_work(tmp_path: Path) -> None:
    start = "echo 'enroot-nsenter: failed to create user namespace: Operation not permitted' >&2; exit 1"
    broken = program(tmp_path / "bin", "4.1.2", start)
    with pytest.raises(UserError) as caught:
        await check_host(Enroot(str(broken)), tmp_path / "root")
    message = str(caught.value)
    assert message.startswith("enroot does not work on this machine (enroot failed: enroot-nsenter: failed to create")
    assert "user namespaces" in message
    assert "\n" not in message


def test_an_entry_holds_any_path(tmp_path: Path) -> None:
    assert entry("/a b\\c\n", "/d", "none", "bind") == "/a\\040b\\134c\\012 /d none bind"
    assert binds(tmp_path, "/x") == [f"{tmp_path} /x none rbind,nosuid,nodev,x-create=auto,ro"]
    assert binds(tmp_path, "/x", writable=True) == [f"{tmp_path} /x none rbind,nosuid,nodev,x-create=auto"]


def test_what_is_mounted_below_a_read_only_folder_is_read_only_too() -> None:
    lines = binds("/", "/x")[1:]
    assert "none /x/proc none remount,bind,nosuid,nodev,ro" in lines
    assert not binds("/", "/x", writable=True)[1:]


@pytest.mark.slow
async def test_nothing_that_the_task_left_is_read_by_enroot_itself(enroot_lab: Any) -> None:
    """A container's fstab, environment, rc script, shell and bundle are enroot's to read, with privileges: here they
    would be what an earlier step of the task left."""
    spec = enroot_lab.spec("ls -d /host /marked; echo ${EVIL:-none}; grep CapEff /proc/self/status", resumed=True)
    assert spec.upper is not None
    etc = spec.upper / "etc"
    etc.mkdir()
    (etc / "fstab").write_text("/ /host none rbind,x-create=dir 0 -1\n/ /host none rbind,x-create=dir\n")
    (etc / "environment").write_text("EVIL=set\nSHELL=/evil\nBASH_ENV=/evil\n")
    for script in (etc / "rc", spec.upper / "evil", spec.upper / "init", spec.upper / "launcher.py"):
        script.write_text("#!/bin/bash\nmkdir /marked\n")
        script.chmod(0o755)
    for link in (".enroot", ".lock", "task", "layers", "changes"):
        (spec.upper / link).symlink_to("/etc")
    running = await enroot_lab.sandbox.start(spec)
    assert await running.wait(60) == ExitStatus(code=0)
    await running.kill()
    lines = spec.log.read_text().splitlines()
    assert lines[:2] == [f"ls: cannot access '{path}': No such file or directory" for path in ("/host", "/marked")]
    assert lines[2:] == ["none", "CapEff:\t0000000000000000"]


@pytest.mark.slow
async def test_the_users_own_configuration_shows_nothing(
    enroot_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "home/.config/enroot"
    for folder, name, text in (
        ("mounts.d", "a.fstab", f"{tmp_path} /shown none rbind,x-create=dir\n"),
        ("environ.d", "a.env", "SHOWN=yes\n"),
        ("hooks.d", "a.sh", f"#!/bin/bash\ntouch {tmp_path}/hooked\n"),
    ):
        (config / folder).mkdir(parents=True)
        (config / folder / name).write_text(text)
        (config / folder / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent))
    for name in ("MOUNT_HOME", "ROOTFS_WRITABLE", "ALLOW_SUPERUSER", "LOGIN_SHELL"):
        monkeypatch.setenv(f"ENROOT_{name}", "yes")
    _, output, _ = await enroot_lab.run("echo ${SHOWN:-none} /shown* $(ls -A /root | wc -l)")
    assert output == "none /shown* 0\n"
    assert not (tmp_path / "hooked").exists()


@pytest.mark.slow
async def test_paths_may_hold_anything(enroot_lab: Any, bind: Any) -> None:
    """Layers, binds and the log; only the folders of changes may not, by their own names."""
    enroot_lab.root = private_folder(enroot_lab.folder / PROBLEMATIC / "layers")
    shown = private_folder(enroot_lab.folder / PROBLEMATIC / "shown")
    (shown / "file").write_text("seen\n")
    binds = (bind(shown, "/mnt/read"), bind(shown, f"/mnt/{PROBLEMATIC}", writable=True))
    command = f"cat '/mnt/read/file'; echo more >> '/mnt/{PROBLEMATIC}/file'; echo no >> /mnt/read/file"
    status, output, _ = await enroot_lab.run(command, binds=binds)
    assert (status.code, output.splitlines()[0]) == (1, "seen")
    assert "Read-only file system" in output
    assert (shown / "file").read_text() == "seen\nmore\n"


@pytest.mark.slow
async def test_changes_of_owner_succeed_and_do_nothing(enroot_lab: Any) -> None:
    """The filter that enroot sets (unlike bubblewrap): package managers go on, and nobody becomes another."""
    _, output, _ = await enroot_lab.run("touch x; chown 1234:1234 x && stat -c %u:%g x; cat /proc/sys/kernel/hostname")
    assert output == "0:0\ntask\n"


@pytest.mark.slow
async def test_a_task_of_a_recipe(enroot_lab: Any, scripted: Any) -> None:
    """As a worker runs it: the sandbox by its kind, the shell harness, the task's own tests. And `gyre tasks check`."""
    sandbox, task = await make_sandbox("enroot", enroot_lab.root), load_task(TASK)
    for script, reward in ((["sort text.txt > out.txt", None], 1.0), (["cp text.txt out.txt", None], 0.0)):
        model = scripted(script)
        request = ExecutionRequest(name=f"e-{reward}", task=task, key="key", model="m", timeouts=TIMEOUTS)
        result = await run_execution(
            request,
            find_harness("shell"),
            sandbox,
            enroot_lab.root,
            model.serve,
            lambda model=model: CallReport(len(model.requests)),
        )
        model.close()
        assert (result.outcome, result.reward, result.model_calls) == ("graded", reward, 2)
    check = await check_task(task, sandbox, enroot_lab.root, enroot_lab.limits)
    assert (check.solution, check.untouched, check.problems) == (1.0, 0.0, ())


@pytest.mark.slow
async def test_many_at_once_leave_nothing(enroot_lab: Any, live: Any) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    results = await asyncio.gather(*(enroot_lab.run("echo $$ > mine", timeout=120) for _ in range(8)))
    assert [status.code for status, _, _ in results] == [0] * 8
    assert {(snapshot / "app/mine").read_text() for _, _, snapshot in results} == {"2\n"}
    assert Path("/proc/self/mountinfo").read_text() == before
    assert live(str(enroot_lab.folder)) == []
