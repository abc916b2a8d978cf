"""Mooncake's process-wide settings, and its import.

Owns the `MC_*` environment variables. Invariant: the library is imported once, lazily, in the process that uses it,
after its variables were set and checked; it reads them at import and at each engine's start, so they never change.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gyre.errors import UserError
from gyre.transfer.errors import Misuse

Protocol = Literal["tcp", "rdma"]


class Timeouts(msgspec.Struct, frozen=True):
    """Limits of one process's transfers, in seconds. `progress` < `transfer`, or failed reads could write late."""

    liveness: float = 3.0  # the peer's beacon must have answered
    contact: float = 10.0  # the first handshake with a peer must have ended
    progress: int = 5  # a connection without a byte moved is dropped
    transfer: int = 30  # a chunk (64 MiB) must have arrived


class _Loaded(msgspec.Struct, frozen=True):
    pid: int
    protocol: Protocol
    timeouts: Timeouts


_loaded: _Loaded | None = None


def variables(protocol: Protocol, timeouts: Timeouts) -> dict[str, str]:
    """The variables that gyre sets where the user did not. Raises UserError if the timeouts are unsafe."""
    if not 0 < timeouts.progress < timeouts.transfer:
        raise UserError(
            f"transfer timeouts: progress ({timeouts.progress} s) must be positive and below transfer"
            f" ({timeouts.transfer} s), or bytes of a failed read could land later"
        )
    wanted = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_SLICE_SIZE": str(1 << 20),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(timeouts.progress)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(math.ceil(timeouts.progress)),
        "MC_TRANSFER_TIMEOUT": str(math.ceil(timeouts.transfer)),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    }
    if protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
    return wanted


def check(environment: Mapping[str, str], protocol: Protocol) -> None:
    """Refuse (UserError) a complete environment under which Mooncake would abort, lie, or write late."""
    folder = environment.get("MC_LOG_DIR")
    if folder is not None and os.path.isdir(folder):
        raise UserError(f"MC_LOG_DIR={folder}: Mooncake aborts when this folder exists; unset MC_LOG_DIR")
    if protocol == "rdma" and "MC_FORCE_TCP" in environment:
        raise UserError("MC_FORCE_TCP is set, but the transfer protocol is rdma; unset MC_FORCE_TCP")
    seconds: dict[str, int] = {}
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TRANSFER_TIMEOUT"):
        if not environment[name].isdecimal():
            raise UserError(f"{name}={environment[name]}: must be a whole number of seconds")
        seconds[name] = int(environment[name])
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        if not 0 < seconds[name] < seconds["MC_TRANSFER_TIMEOUT"]:
            raise UserError(
                f"{name}={seconds[name]} must be positive and below MC_TRANSFER_TIMEOUT="
                f"{seconds['MC_TRANSFER_TIMEOUT']}: bytes of a failed read could land later"
            )


def load_engine_class(protocol: Protocol, timeouts: Timeouts) -> Any:
    """Mooncake's `TransferEngine` class, imported with this process's settings.

    Raises UserError (bad environment, package or system library missing, settings that differ from the ones this
    process already uses) and Misuse (in a fork of a process that had loaded it: Mooncake needs spawned processes).
    """
    global _loaded
    wanted = _Loaded(os.getpid(), protocol, timeouts)
    if _loaded is None:
        if "mooncake.engine" in sys.modules:
            raise Misuse("mooncake.engine was imported before gyre could set its environment")
        merged = {**variables(protocol, timeouts), **os.environ}
        check(merged, protocol)
        os.environ.update(merged)
    elif _loaded.pid != wanted.pid:
        raise Misuse("Mooncake does not survive fork(): start processes that transfer by spawning them")
    elif _loaded != wanted:
        raise UserError("transfer: one process cannot use two protocols or two sets of timeouts")
    try:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError(
            f"cannot load Mooncake ({error}): install gyre[train], and libibverbs1 from the system's packages",
            1,
        ) from error
    _loaded = wanted
    return TransferEngine


def rdma_devices(topology: str) -> set[str]:
    """Names of the RDMA devices in the JSON of `get_local_topology` ({location: [[preferred], [others]]})."""
    try:
        locations = json.loads(topology or "{}")
    except ValueError:
        return set()
    return {device for lists in locations.values() for devices in lists for device in devices}


def refuse_silent_tcp(topology: str, devices: str, host: str) -> None:
    """Raise UserError unless the wanted RDMA devices exist: the engine ignores its protocol argument and, where it
    finds no device, uses TCP without a word. `devices` is a comma-separated list, "" for any."""
    found = rdma_devices(topology)
    missing = sorted({name.strip() for name in devices.split(",") if name.strip()} - found)
    if not found or missing:
        what = f"devices {', '.join(missing)}" if missing else "an RDMA device"
        raise UserError(
            f"transfer protocol rdma: {host} does not show {what} (it has: {', '.join(sorted(found)) or 'none'});"
            " load its RDMA drivers or choose tcp"
        )
