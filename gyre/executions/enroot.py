"""The enroot sandbox: NVIDIA's enroot puts the root file system together, and the closed namespaces come inside it.

Owns what enroot is told: variables that switch off whatever the site's configuration would show of the host, and a
container script. Invariants: the container that enroot itself enters is a folder of ours with the host's /usr, so that
none of the files it reads there (fstab, environment, rc) are the task's: the task's root lies below it at /task, and
enroot_init.py makes that the root and gives up every privilege before anything of the task runs; enroot sees none of
the task's variables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from gyre.errors import UserError
from gyre.executions import enroot_init, launcher
from gyre.executions.enroot_mounts import Mounts
from gyre.executions.host_python import PYTHON
from gyre.executions.layers import link_usr, private_folder
from gyre.executions.namespaced import (
    DEVICE_LINKS,
    DEVICES,
    HIDDEN_PROC,
    READ_ONLY_PROC,
    NamespacedSandbox,
    after_channel,
    command,
    with_user,
)
from gyre.executions.sandbox import PATH, SandboxSpec

OLDEST = (3, 5)
PIECE = 100_000
"""Characters in one variable: the kernel takes 128 KiB."""


def find_enroot() -> str:
    """The program on PATH. Raises UserError when there is none, or one that is too old."""
    found = shutil.which("enroot")
    if found is None:
        raise UserError('enroot is not installed: install NVIDIA enroot, or set sandbox.kind = "bubblewrap"')
    if (version := version_of(found)) < OLDEST:
        raise UserError(
            f"{found} is enroot {'.'.join(map(str, version))}: {'.'.join(map(str, OLDEST))} or later is needed"
        )
    return found


@cache
def version_of(program: str) -> tuple[int, ...]:
    """What `enroot version` says. Raises UserError when it says nothing of the kind."""
    with tempfile.TemporaryDirectory() as place:
        env = settings(program, Path(place))
        done = subprocess.run([program, "version"], env=env, capture_output=True, text=True, check=False)
    numbers = done.stdout.strip().split("-")[0].split(".")
    if done.returncode or not all(map(str.isdigit, numbers)):
        raise UserError(
            f"{program} version says {(done.stderr or done.stdout).strip()[:200]!r}: is enroot installed well?"
        )
    return tuple(map(int, numbers))


def skeleton(place: Path) -> None:
    """The folders of one container below the new folder `place`: the root that enroot enters, an empty /dev, and what
    stands for the site's and the user's configuration.
    """
    for name in ("data/root", "dev/pts", "dev/shm", "empty", "none", "run"):
        (place / name).mkdir(parents=True)
    root = place / "data/root"
    link_usr(root)
    shutil.copyfile(launcher.__file__, root / "launcher.py")
    program = Path(enroot_init.__file__).read_text()
    (root / "init").write_text(f"#!{os.path.realpath(PYTHON)} -ISB\n{program}")
    (root / "init").chmod(0o755)
    for name in DEVICES:
        (place / "dev" / name).touch()
    for name, link in (*DEVICE_LINKS.items(), ("ptmx", "pts/ptmx")):
        (place / "dev" / name).symlink_to(link)


def settings(program: str, place: Path) -> dict[str, str]:
    """enroot's variables: they come before the site's configuration. `place`/none is an empty folder."""
    none = str(place / "none")
    switches = "ALLOW_SUPERUSER LOGIN_SHELL MOUNT_HOME REMAP_ROOT RESTRICT_DEV ROOTFS_WRITABLE"
    switches += " UNSHARE_IPC UNSHARE_NET UNSHARE_PID UNSHARE_UTS"
    paths = {"SYSCONF": none, "CONFIG": none, "CACHE": none, "TEMP": none}
    paths |= {"DATA": str(place / "data"), "RUNTIME": str(place / "run")}
    return {
        "PATH": f"{os.path.dirname(program)}:{PATH}",
        "HOME": none,
        **{f"ENROOT_{name}": "no" for name in switches.split()},
        **{f"ENROOT_{name}_PATH": path for name, path in paths.items()},
    }


def init_words(spec: SandboxSpec) -> dict[str, str]:
    """What enroot_init.py wants, as variables."""
    user = spec.user
    words = [str(user.uid), str(user.gid)] if user is not None else ["0", "0"]
    words += [spec.workdir, " ".join(READ_ONLY_PROC), " ".join(HIDDEN_PROC)]
    words += after_channel(spec)
    text = "\0".join(words).encode("utf-8", "surrogateescape").hex()
    starts = range(0, len(text), PIECE)
    return {f"{enroot_init.PREFIX}{number}": text[start : start + PIECE] for number, start in enumerate(starts)}


class Enroot(NamespacedSandbox):
    """Starts commands under enroot."""

    kind = "enroot"
    tool = "enroot"

    def __init__(self, enroot: str | None = None) -> None:
        self._enroot = enroot or find_enroot()

    def lay_out(self, spec: SandboxSpec) -> SandboxSpec:
        spec = with_user(spec)
        place = private_folder(spec.scratch.absolute() / "enroot")
        skeleton(place)
        mounts = Mounts(spec, place)
        mounts.lay_out()
        (place / "container.sh").write_text(mounts.script(), errors="surrogateescape")
        return spec

    def launch(self, spec: SandboxSpec, channel: int, log: int) -> subprocess.Popen[bytes]:
        place = spec.scratch.absolute() / "enroot"
        # enroot runs /init on the command, which is here only to be seen in a list of processes
        return subprocess.Popen(
            [self._enroot, "start", "--conf", str(place / "container.sh"), "root", *command(spec)],
            stdin=channel,
            stdout=log,
            stderr=log,
            env={**settings(self._enroot, place), **init_words(spec)},
            cwd="/",
        )
