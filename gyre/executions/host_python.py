"""The host's Python inside a sandbox whose root file system is an image, which may have none, or another libc.

Owns where the host's /usr is seen there and the words that start its interpreter by its own dynamic loader. Invariant:
neither the loader nor its libraries come from the image, so what an execution changed of the image does not reach the
launcher of its grader.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from gyre.errors import UserError

PYTHON = "/usr/bin/python3"
HOST = "/run/gyre/host"
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
LIBRARIES = ("/usr/lib64", "/usr/lib")


def host_binds() -> list[str]:
    """bwrap's words that show the host's /usr at HOST, read-only."""
    return ["--ro-bind", "/usr", f"{HOST}/usr"]


def host_python() -> tuple[str, ...]:
    """The words before the interpreter's own options. Raises UserError on a machine that is not covered."""
    loader = LOADERS.get(platform.machine())
    real = os.path.realpath(loader) if loader else ""
    if not real.startswith("/usr/") or not Path(real).exists():
        raise UserError(
            f"sandbox.images: no dynamic loader of this machine ({platform.machine()}) below /usr: images are covered"
            " on x86-64 and ARM systems with a merged /usr and glibc"
        )
    python = HOST + os.path.realpath(PYTHON)
    libraries = ":".join(HOST + folder for folder in (os.path.dirname(real), *LIBRARIES))
    return (HOST + real, "--argv0", python, "--inhibit-cache", "--library-path", libraries, python)
