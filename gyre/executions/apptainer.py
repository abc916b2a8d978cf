"""The Apptainer sandbox: `apptainer exec` in a pid namespace of ours, on a root file system laid out before.

Owns Apptainer's words and configuration, and what is done just before it starts. Apptainer cannot do three things that
a sandbox needs: its overlay in a user namespace has no `userxattr`, so a folder of a lower layer could not be removed;
its tmpfs have no sizes; and what it starts outlives its SIGKILL. So a user, mount and pid namespace comes first, in
which `mount` lays out the layers and the small file systems (`laid_out`), user namespaces are switched off, and
Apptainer runs on the result: it makes the network, IPC and inner pid namespace, /proc, the binds, and drops every
privilege. Invariants: the end of the first pid namespace ends all of it; the machine's own configuration of Apptainer
decides nothing, and no script of the root file system is run by it; a mount that fails ends the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gyre.errors import UserError
from gyre.executions.apptainer_layout import Layout, laid_out, lay_out
from gyre.executions.namespaced import HIDDEN_PROC, READ_ONLY_PROC, NamespacedSandbox, launcher_words
from gyre.executions.sandbox import SandboxSpec
from gyre.executions.tasks import Task
from gyre.executions.users import ROOT, User

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
FIRST = (
    *("unshare", "--user", "--map-root-user", "--", "setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount"),
    *("--propagation", "private", "--uts", "--cgroup", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
)
"""The first namespaces, which end with the thread that started them. (The parent-death signal comes after the user
namespace, whose making clears it.)"""
PREPARE = """
mount --no-mtab --all --fstab "$1" && echo 0 > /proc/sys/user/max_user_namespaces && hostname task &&
  shift && "$@"
exit $?
"""
"""What the first pid 1 does. It stays, since Apptainer's starter would lose the parent-death signal."""
CONFIGURATION = """\
allow setuid = no
allow pid ns = yes
allow user ns = yes
allow uts ns = yes
allow ipc ns = yes
config passwd = no
config group = no
config resolv_conf = no
mount proc = yes
mount sys = no
mount dev = no
mount devpts = no
mount home = no
mount tmp = no
mount hostfs = no
mount slave = yes
user bind control = yes
enable overlay = no
enable underlay = no
enable fusemount = no
allow container sif = no
allow container encrypted = no
allow container squashfs = no
allow container extfs = no
allow container dir = yes
memory fs type = tmpfs
systemd cgroups = no
binary path = /nonexistent
"""
"""Nothing of the machine's is mounted, no FUSE helper is ever started."""


def find_apptainer() -> str:
    """apptainer's program, with those that come before it. Raises UserError naming the one that is missing."""
    found = shutil.which("apptainer")
    if found is None:
        raise UserError("apptainer is missing: install Apptainer 1.1 or newer, or load your cluster's module of it")
    for name in ("setpriv", "unshare", "mount", "hostname"):
        if shutil.which(name, path=PATH) is None:
            raise UserError(f"the apptainer sandbox needs {name} (util-linux 2.33 or newer; hostname is a package)")
    return found


def arguments(apptainer: str, spec: SandboxSpec) -> list[str]:
    """The whole command line up to the launcher's words (pure but for the look at the host's /proc)."""
    layout = Layout(spec.scratch)
    binds = [(str(source), target, writable) for source, target, writable in laid_out(spec)]
    binds += [(f"/proc/{name}", f"/proc/{name}", False) for name in READ_ONLY_PROC if os.path.exists(f"/proc/{name}")]
    covered = [name for name in HIDDEN_PROC if os.path.exists(f"/proc/{name}")]
    binds += [(str(layout.devices / "null"), f"/proc/{name}", False) for name in covered]
    words = [*FIRST, "bash", "-c", PREPARE, "prepare", str(layout.fstab)]
    words += [apptainer, "--silent", "--config", str(layout.configuration), "exec", "--writable", "--contain"]
    words += ["--pid", "--ipc", "--net", "--network", "none", "--cleanenv", "--no-home", "--no-privs"]
    words += ["--no-mount", "bind-paths"]
    for source, target, writable in binds:
        words += ["--bind", f"{source}:{target}" + ("" if writable else ":ro")]
    return [*words, "--pwd", spec.workdir, str(layout.root)]


class Apptainer(NamespacedSandbox):
    """Starts commands under Apptainer."""

    kind = "apptainer"
    tool = "apptainer"
    advice = "allow user namespaces (Linux 5.11 or newer), or set another sandbox.kind"

    def __init__(self, apptainer: str | None = None) -> None:
        self._apptainer = apptainer or find_apptainer()

    def user(self, root: Path, task: Task, name: str) -> User | None:
        if name not in ROOT:
            raise OSError(f"the apptainer sandbox has one user, and {task.name} wants {name!r}")
        return None

    def lay_out(self, spec: SandboxSpec) -> SandboxSpec:
        if spec.user is not None:
            raise OSError(f"the apptainer sandbox has one user, and this is {spec.user.name or spec.user.uid}")
        layout = Layout(spec.scratch)
        spec = lay_out(spec)
        layout.configuration.write_text(CONFIGURATION)
        return spec

    def launch(self, spec: SandboxSpec, channel: int, log: int) -> subprocess.Popen[bytes]:
        if shutil.which(self._apptainer) is None:
            raise FileNotFoundError(f"no program {self._apptainer}")
        layout = Layout(spec.scratch)
        places = {name: str(layout.own) for name in ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")}
        return subprocess.Popen(
            [*arguments(self._apptainer, spec), *launcher_words(spec, channel)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(channel,),
            env={"PATH": PATH, "LANG": "C.UTF-8", **places},
            cwd="/",
            start_new_session=True,
        )
