"""Where the processes of other nodes reach this one.

Invariant: on one machine that is loopback; in a job it is what the launcher found for this node.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def node_address() -> str:
    """The IPv4 address that engines and transfer sessions bind to and announce."""
    return os.environ.get("GYRE_HOST") or LOOPBACK


def node_interface() -> dict[str, str]:
    """Environment of what meets its like on other nodes by gloo: the interface that has `node_address()`.

    Unsaid, gloo takes the one of the host's own name, which may be one that no other node reaches. What the site has
    set stays; empty when no interface has the address.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no such address
            if socket.inet_ntoa(answer[20:24]) == node_address():
                return {"GLOO_SOCKET_IFNAME": name}
    return {}


def meeting_socket() -> socket.socket:
    """Listens on this node's address alone, on a port of the kernel's choice: where the ranks of several nodes meet."""
    listener = socket.create_server((node_address(), 0), backlog=1024)
    listener.set_inheritable(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """host:port"""
    host, port = listener.getsockname()
    return f"{host}:{port}"
