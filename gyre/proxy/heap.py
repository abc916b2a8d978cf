"""How a worker's memory is managed: it holds much for long, needs big buffers for every call, and makes little garbage.

Bodies, prompts and their JSON have megabytes. glibc gives such blocks back to the kernel as soon as they are free, and
the next call pays for every page anew, which takes longer than filling them. And Python's collector goes through all
objects that ever were made, imported modules included, again and again, while every call waits.
"""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
"""The largest threshold that glibc takes."""
_KEPT = 256 << 20
"""Bytes of free memory that stay with the process."""


def settle() -> None:
    """Call once, when everything is imported: what is there now is never garbage, and freed buffers are kept."""
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Other C libraries have no such thing, and need none.
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
