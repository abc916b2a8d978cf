"""The first program in an enroot container: closes the namespaces that enroot leaves open, and becomes pid 1 there.

Runs stand-alone under `python3 -I -S -B` with the standard library only; gyre copies it into the container's root, with
launcher.py beside it. enroot has made a user and a mount namespace and put the task's root file system together at
/task. Here a second user namespace comes below it (which owns nothing of the host's), with its own processes, network,
IPC, host name and mounts; /task becomes the root; pid 1 gives up every capability and starts the launcher.

Invariants: nothing of the task's files runs before that; the channel (standard input) stays open in pid 1, so that its
end is the sandbox's end.
"""

import fcntl
import os
import sys
import warnings  # noqa: F401  (os.execvp imports it at its first call)
from _signal import SIG_DFL, SIGINT, SIGKILL, signal
from _socket import AF_INET, SOCK_DGRAM, sethostname, socket

try:
    import ctypes
except ImportError:
    sys.exit("/usr/bin/python3 is without ctypes (Debian: apt install python3)")

PREFIX = "GYRE_WORDS_"
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS."""
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, SLAVE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 19
DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    except OSError as error:
        raise OSError(error.errno, f"{target}: {error.strerror}") from None


def own_words() -> list[str]:
    """What the host wants: hexadecimal, in variables of at most 100,000 characters."""
    pieces: list[str] = []
    while (piece := os.environ.pop(f"{PREFIX}{len(pieces)}", None)) is not None:
        pieces.append(piece)
    return bytes.fromhex("".join(pieces)).decode("utf-8", "surrogateescape").split("\0")


def close_namespaces(uid: str, gid: str) -> None:
    """Become `uid` in a new user namespace, alone with a loopback that is up."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    call("unshare", NEW_NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {outer_uid} 1"), ("gid_map", f"{gid} {outer_gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    sethostname("task")
    handle = socket(AF_INET, SOCK_DGRAM)
    fcntl.ioctl(handle, SIOCSIFFLAGS, b"lo".ljust(16, b"\0") + IFF_UP.to_bytes(2, sys.byteorder) + bytes(22))
    handle.close()


def enter(folder: str) -> None:
    """Make `folder` the root. The old one stays below it until /proc is mounted: the kernel gives a new one only to who
    can see one."""
    mount("none", "/", "none", SLAVE | RECURSIVE)
    mount(folder, folder, "none", BIND | RECURSIVE)
    os.chdir(folder)
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), b".", b".")


PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203}


def mount_proc(read_only: list[str], hidden: list[str]) -> None:
    """This namespace's /proc, its settings of the kernel closed; and the old root goes."""
    flags = NO_SUID | NO_DEV | NO_EXEC
    mount("proc", "/proc", "proc", flags)
    for name in read_only:
        if os.path.exists(f"/proc/{name}"):
            mount(f"/proc/{name}", f"/proc/{name}", "none", BIND)
            mount("none", f"/proc/{name}", "none", BIND | REMOUNT | READ_ONLY | flags)
    for name in hidden:
        if os.path.exists(f"/proc/{name}"):
            mount("/dev/null", f"/proc/{name}", "none", BIND)
    call("umount2", b".", DETACH)
    os.chdir("/")


def drop_capabilities() -> None:
    """All of them, for good: an empty bounding set binds root as well."""
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, sets)


def leave(status: int) -> None:
    """End as the process with this wait status did."""
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def first_process(words: list[str], workdir: str) -> None:
    """pid 1: start the launcher, bury whoever ends, and end with it."""
    signal(SIGINT, SIG_DFL)  # which for pid 1 means that nobody inside can send it
    os.setsid()
    os.chdir(workdir)
    command = os.fork()
    if command:
        while True:
            pid, status = os.wait()
            if pid == command:
                leave(status)
    channel = os.dup(0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sys.argv = ["launcher", str(channel), *words]
    import launcher

    launcher.main()


def main() -> None:
    uid, gid, workdir, read_only, hidden, *words = own_words()
    sys.path.insert(0, "/")
    import launcher  # noqa: F401

    sys.path.clear()  # all is imported that will be: nothing comes from where the task's files will lie
    close_namespaces(uid, gid)
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    enter("/task")
    child = os.fork()
    if child:
        leave(os.waitpid(child, 0)[1])
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    mount_proc(read_only.split(), hidden.split())
    drop_capabilities()
    first_process(words, workdir)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"enroot: {error.filename or ''}{': ' if error.filename else ''}{error.strerror}", file=sys.stderr)
        os._exit(1)
