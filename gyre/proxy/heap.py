"""How this process's allocator treats big buffers: it keeps them, for every call needs them again.

Bodies, prompts and their JSON have megabytes. glibc gives such blocks back to the kernel as soon as they are free, and
the next call pays for every page anew, which takes longer than filling them.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
"""The largest threshold that glibc takes."""


def keep_buffers(kept: int = 256 << 20) -> bool:
    """Keep up to `kept` bytes of free memory at the heap's end. False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, kept))
