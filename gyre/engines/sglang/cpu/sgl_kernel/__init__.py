"""Stand-in for SGLang's compiled CPU kernels, which need AMX: what SGLang 0.5.23 cannot do without.

Invariant: a kernel that is not here raises when it is called, and a name that is no CPU kernel is missing as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, locations: Any, pool_length: int
) -> None:
    """Write each request's new KV locations into its row of `table` [requests, positions], in place.

    `locations` holds them for all requests, one after the other; request i gets positions starts[i]..ends[i].
    """
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code that this machine has not got")

    return missing
