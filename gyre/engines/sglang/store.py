"""The master of the store of KV pages: Mooncake's own program, found in gyre's environment and told where to listen.

Owns its command line. Invariant: it listens on the node's address only. The store keeps SGLang's pages by a key made of
the tokens before them, the salt (the weights' version) and the run's namespace; the memory is the engines' own.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from gyre.errors import UserError


def master_program() -> Path:
    """mooncake_master. Raises UserError when no Mooncake is installed here."""
    found = importlib.util.find_spec("mooncake")
    for folder in found.submodule_search_locations or [] if found is not None else []:
        if (program := Path(folder) / "mooncake_master").exists():
            return program
    raise UserError(
        "rollout.store_mb: there is no mooncake_master in gyre's environment: install gyre[mooncake-cuda] or"
        " gyre[mooncake-cpu], or set it to 0"
    )


def master_arguments(host: str, port: int, metrics: int) -> list[str]:
    """The master on `host`:`port`, which keeps nothing on disk; `metrics` is the port of its own status page."""
    return [
        str(master_program()),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics}",
        "--enable_metric_reporting=false",
        "--rpc_thread_num=4",
    ]


def free_port(host: str, wanted: int = 0) -> int:
    """`wanted` if nobody listens there, else another that is free on `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError:
            probe.bind((host, 0))
        return int(probe.getsockname()[1])
