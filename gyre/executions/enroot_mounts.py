"""The mounts of an enroot container, as the two tables that its script hands to enroot-mount.

Owns their lines and order. Invariants: what lies at a path of the task's is found below the task's root, whatever links
it left there; the layers' paths never stand in an overlay's options, so their names may hold anything; a host folder is
read-only with all that is mounted below it, unless it is to be written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from gyre.executions.enroot_init import PREFIX
from gyre.executions.fstab import entry
from gyre.executions.host_python import HOST
from gyre.executions.layers import host_system
from gyre.executions.namespaced import DEVICES, hides_root
from gyre.executions.sandbox import SandboxSpec
from gyre.executions.users import layers_of, writable_places

SCRIPT = """environ() {{
    echo SHELL=/init
    for name in "${{!{words}@}}"; do echo "${{name}}=${{!name}}"; done
}}
mounts() {{
    cd "${{ENROOT_ROOTFS}}"
    echo 1 > /proc/sys/user/max_user_namespaces
    {folders}
    enroot-mount --root "${{ENROOT_ROOTFS}}" - << 'END OF MOUNTS'
{container}
END OF MOUNTS
    enroot-mount --root "${{ENROOT_ROOTFS}}/task" - << 'END OF MOUNTS'
{task}
END OF MOUNTS
}}
"""
"""The container script. What enroot takes for the shell is enroot_init.py, with the words for it; one user namespace
may be made below enroot's, which is that program's. The layers' paths are relative to the container's root: whatever
their names hold does not matter to an overlay's options."""


def binds(source: Path | str, target: str, writable: bool = False) -> list[str]:
    """The lines that show `source` at `target`, read-only with all that is mounted below it unless `writable`."""
    source = str(source)
    mode = "" if writable else ",ro"
    lines = [entry(source, target, "none", f"rbind,nosuid,nodev,x-create=auto{mode}")]
    if not writable:
        lines += [
            entry("none", target + below, "none", "remount,bind,nosuid,nodev,ro") for below in mounted_below(source)
        ]
    return lines


def mounted_below(folder: str) -> list[str]:
    """What is mounted below `folder`, as paths from it."""
    real = os.path.realpath(folder).rstrip("/")
    fields = (line.split(b" ")[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    places = [os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field)) for field in fields]
    return [place[len(real) :] for place in places if place.startswith(f"{real}/")]


def comma_free(path: str) -> str:
    """`path` for the options of an overlay's changes. Raises OSError for one that they cannot hold."""
    if set(path) & set(",\\:"):
        raise OSError(f"{path}: enroot takes no comma, colon or backslash in the path of a writable folder")
    return path


class Mounts:
    """The two tables of one container, in the order of mounting."""

    def __init__(self, spec: SandboxSpec, place: Path) -> None:
        self.container: list[str] = []
        self.task: list[str] = []
        self.folders: list[str] = []
        """What the script must make in enroot's own tmpfs."""
        self._layers = self._overlays = 0
        self._spec = spec
        self._above = os.path.commonpath([spec.upper.absolute(), place]) if spec.upper is not None else ""
        self._place = place

    def lay_out(self) -> None:
        """All of `spec`. Raises OSError."""
        spec, limits, host = self._spec, self._spec.limits, system()
        self.container += [entry("/proc", "/proc", "none", "rbind,x-create=dir"), *host]
        changes = self._above or f"{self._place}/run/overlay"
        self.container.append(entry(changes, "/changes", "none", "rbind,x-create=dir"))
        if spec.user is None:
            self._overlay(spec.lowers, "/", "/task", self.container)
        else:
            lowers = self._lower(spec.lowers)
            self.container.append(entry("overlay", "/task", "overlay", f"x-create=dir,nosuid,nodev,ro,{lowers}"))
            for place in writable_places(spec.user, spec.workdir):
                self._overlay(layers_of(place, spec.lowers), place, place, self.task)
        self.task += [] if spec.image else host
        self.task += devices(self._place / "dev", limits.shared_memory)
        self.task.append(entry(f"{self._place}/empty", "/proc", "none", "bind,ro,x-create=dir"))
        self.task.append(
            entry("tmpfs", "/run", "tmpfs", f"nosuid,nodev,mode=755,size={limits.shared_memory // 16},x-create=dir")
        )
        if hides_root(spec):
            self.task.append(entry("tmpfs", "/root", "tmpfs", "ro,mode=0"))
        if spec.image:
            self.task += binds("/usr", f"{HOST}/usr")
        for bind in spec.binds:
            self.task += binds(bind.source.absolute(), bind.target, bind.writable)

    def _lower(self, lowers: Iterable[Path]) -> str:
        """An overlay's option for these layers, each shown in the container's root by a number."""
        first = self._layers
        for lower in lowers:
            self.container.append(
                entry(str(lower.absolute()), f"/layers/{self._layers}", "none", "rbind,ro,x-create=dir")
            )
            self._layers += 1
        names = [f"layers/{number}" for number in range(first, self._layers)]
        return f"userxattr,xino=off,lowerdir={':'.join(reversed(names))}"

    def _overlay(self, lowers: Iterable[Path], place: str, target: str, table: list[str]) -> None:
        """One overlay with changes: in `upper` where there is one, or in enroot's tmpfs."""
        number, options = self._overlays, self._lower(lowers)
        self._overlays += 1
        if self._spec.upper is None:
            upper, work = (f"{number}/{name}" for name in ("upper", "work"))
            self.folders += [f'"${{ENROOT_RUNTIME_PATH}}/overlay/{name}"' for name in (upper, work)]
        else:
            upper = os.path.relpath(self._spec.upper.absolute() / place.lstrip("/"), self._above)
            work = os.path.relpath(self._place / f"work-{number}", self._above)
            (self._place / f"work-{number}").mkdir()
        options += f",upperdir=changes/{comma_free(upper)},workdir=changes/{comma_free(work)}"
        table.append(entry("overlay", target, "overlay", f"x-create=dir,nosuid,nodev,{options}"))

    def script(self) -> str:
        folders = f"mkdir -p {' '.join(self.folders)}" if self.folders else ""
        return SCRIPT.format(
            words=PREFIX, container="\n".join(self.container), task="\n".join(self.task), folders=folders
        )


def system() -> list[str]:
    """The lines that show the host's /usr, and what a system without a merged /usr has beside it."""
    return [line for name in host_system() for line in binds(f"/{name}", f"/{name}")]


def devices(folder: Path, shared_memory: int) -> list[str]:
    """The lines of a minimal read-only /dev, over the skeleton in `folder`."""
    lines = [entry(str(folder), "/dev", "none", "bind,ro,nosuid,noexec,x-create=dir")]
    lines += [entry(f"/dev/{name}", f"/dev/{name}", "none", "bind,nosuid,noexec") for name in DEVICES]
    options = "nosuid,noexec,newinstance,ptmxmode=0666,mode=620"
    lines.append(entry("devpts", "/dev/pts", "devpts", options))
    return [*lines, entry("tmpfs", "/dev/shm", "tmpfs", f"nosuid,nodev,mode=1777,size={shared_memory}")]
