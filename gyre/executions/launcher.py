"""The first program inside a sandbox: opens the listening socket, takes the limits, and becomes the command.

Runs stand-alone under `python3 -I -S` with the standard library only; gyre binds this file in read-only.
Usage: `launcher.py CHANNEL PORT OPEN_FILES PROCESSES FILE_SIZE COMMAND...`, where CHANNEL is the number of an
inherited Unix socket. Invariant: it passes the socket (PORT 0: none) to the host, waits for the host's word,
and is gone by exec: the sandboxed command inherits neither the channel nor the listening socket. The host's word is
`g`, four bytes that say how long the rest is, and the command's whole environment (`NAME=VALUE`, each with a zero byte
after it): whatever tool made the sandbox, no variable passes through it, and none of its own stays.

`_socket` in the place of `socket` halves its CPU time: it starts twice an execution.
"""

import os
import resource
import sys
from _socket import AF_INET, AF_UNIX, SCM_RIGHTS, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket


def receive(channel: socket, size: int) -> bytes:
    """`size` bytes; fewer when the host is gone."""
    text = b""
    while len(text) < size and (more := channel.recv(size - len(text))):
        text += more
    return text


def main() -> None:
    channel_number, port, open_files, processes, file_size = map(int, sys.argv[1:6])
    command = sys.argv[6:]
    channel = socket(AF_UNIX, SOCK_STREAM, 0, channel_number)
    if port:
        listener = socket(AF_INET, SOCK_STREAM)
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        number = listener.fileno().to_bytes(4, sys.byteorder)
        channel.sendmsg([b"r"], [(SOL_SOCKET, SCM_RIGHTS, number)])
        listener.close()
    else:
        channel.send(b"r")
    if receive(channel, 1) != b"g":
        sys.exit(125)
    text = receive(channel, int.from_bytes(receive(channel, 4), "big"))
    environment = dict(entry.split(b"=", 1) for entry in text.split(b"\0") if entry)
    channel.close()
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_size),
    ):
        if value >= 0:
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
