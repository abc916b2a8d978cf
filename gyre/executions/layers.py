"""Builds and removes the folders that a sandbox's root file system is laid out of.

Owns the *base* layer (a skeleton with the host's /usr to be bound in), the *seed* layer of a task (what its
Dockerfile copies), and the *guard* layer that lies above a snapshot while it is graded. Invariants: a
finished layer is never written again and appears under its name only when complete; nothing here follows a
link that an execution left; every folder is 0700, so that no other user of the machine reaches what a sandbox
wrote.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.executions.dockerfile import Environment

if TYPE_CHECKING:
    from gyre.executions.tasks import Task

MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders that a merged-/usr system keeps as links into /usr."""
ETC_FILES = (
    "ld.so.cache",
    "ld.so.conf",
    "nsswitch.conf",
    "protocols",
    "services",
    "debian_version",
    "os-release",
)
FOLDERS = (
    "usr",
    "etc",
    "proc",
    "dev",
    "tmp",
    "var/tmp",
    "run",
    "root",
    "home",
    "opt",
    "srv",
    "mnt",
    "logs/agent",
)


def private_folder(path: Path) -> Path:
    """Make `path` (and its parents) if need be, for this user only."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def base_layer(root: Path) -> Path:
    """The skeleton under `root`/base:

    links into /usr, a minimal /etc, empty folders. Built at the first call.
    """
    return _built_once(root / "base", _build_base)


def seed_layer(root: Path, task: Task) -> Path:
    """The task's own layer under `root`/seeds, shared by all its executions. Built at the first call.

    Raises OSError when a file cannot be copied.
    """
    private_folder(root / "seeds")

    def build(folder: Path) -> None:
        _build_seed(folder, task.environment, task.workdir)

    return _built_once(root / "seeds" / f"{task.name}-{task.digest}", build)


def dressing_layer(root: Path) -> Path:
    """What a container runtime puts over an image, under `root`/dressing: names of hosts, and folders that must be."""

    def build(folder: Path) -> None:
        for name in ("tmp", "root", "etc", "logs/agent"):
            (folder / name).mkdir(parents=True)
        (folder / "tmp").chmod(0o1777)
        _name_hosts(folder / "etc")

    return _built_once(root / "dressing", build)


def guard_layer(root: Path, workdir: str, on_image: bool = False) -> Path:
    """The layer above a snapshot while it is graded, under `root`/guards.

    Whatever the execution put at a mount point, at the links into /usr or in the dynamic loader's
    configuration (links, files, deletions) is covered by the real thing: it cannot redirect the tests, the
    reward or the interpreter. On an image the system is the execution's to change, as in the container that the task
    was made for; only what is mounted there, and what would be loaded into every program, is covered.
    """
    private_folder(root / "guards")

    def build(folder: Path) -> None:
        for name in ("proc", "dev", "run", "tests", "logs/verifier", workdir.lstrip("/")):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "etc").mkdir(exist_ok=True)
        (folder / "etc/ld.so.preload").touch()
        if not on_image:
            (folder / "usr").mkdir(exist_ok=True)
            link_usr(folder)
            _copy_if_there(Path("/etc/ld.so.cache"), folder / "etc/ld.so.cache")

    name = workdir.strip("/").replace("/", "+")
    return _built_once(root / "guards" / (f"image+{name}" if on_image else name), build)


def host_system() -> list[str]:
    """The folders in / that make the host's system: usr, and where /usr is not merged those beside it."""
    apart = (name for name in MERGED if Path("/", name).is_dir() and not Path("/", name).is_symlink())
    return ["usr", *apart]


def link_usr(folder: Path) -> None:
    """In the root `folder`: links into /usr as the host has them, folders where it has folders of its own."""
    for name in MERGED:
        host = Path("/", name)
        if host.is_symlink():
            (folder / name).symlink_to(os.readlink(host).lstrip("/"))
        elif host.is_dir():
            (folder / name).mkdir()


def remove_tree(folder: Path) -> None:
    """Remove a folder that a sandbox wrote, whatever it left: no link is followed, and neither locked folders
    nor very deep ones keep it. Missing is fine. Raises OSError when something of it stays.
    """
    if folder.is_symlink() or not folder.exists():
        folder.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # Both programs walk by descriptor, so no depth is too deep for them; chmod -R leaves links alone.
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], stderr=subprocess.DEVNULL, check=False)
        removed = subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.PIPE, text=True, check=False)
        if removed.returncode:
            raise OSError(f"cannot remove {folder}: {removed.stderr.strip()[:500]}") from None


def _built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build aside and rename, so that a concurrent builder or a crash never shows half a layer."""
    if folder.is_dir():
        return folder
    private_folder(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    build(aside)
    aside.chmod(0o755)
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        remove_tree(aside)
    return folder


def _build_base(folder: Path) -> None:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    link_usr(folder)
    etc = folder / "etc"
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n")
    (etc / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    _name_hosts(etc)
    for name in ETC_FILES:
        _copy_if_there(Path("/etc") / name, etc / name)
    for name in ("alternatives", "ld.so.conf.d", "ssl/certs", "terminfo"):
        if Path("/etc", name).is_dir():
            shutil.copytree(Path("/etc", name), etc / name, symlinks=True, ignore=_unreadable)


def _name_hosts(etc: Path) -> None:
    (etc / "hosts").write_text("127.0.0.1 localhost task\n::1 localhost\n")
    (etc / "hostname").write_text("task\n")
    (etc / "resolv.conf").touch()


def _build_seed(folder: Path, environment: Environment, workdir: str) -> None:
    for name in (*environment.folders, workdir):
        (folder / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for copy in environment.copies:
        target = folder / copy.target.lstrip("/")
        for source in copy.sources:
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
                continue
            place = target / source.name if copy.target.endswith("/") or target.is_dir() else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)


def _copy_if_there(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copyfile(source, target)


def _unreadable(folder: str, names: list[str]) -> set[str]:
    """Entries that this user cannot read, and special files."""
    kept = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return {
        name
        for name in names
        if stat.S_IFMT(os.lstat(os.path.join(folder, name)).st_mode) not in kept
        or not (os.path.islink(os.path.join(folder, name)) or os.access(os.path.join(folder, name), os.R_OK))
    }
