"""Reading a bucket of weights from a pickle that may be hostile.

Only the few functions that rebuild tensors are reachable, and the storage inside is read by torch's own weights-only
loader: no code of the sender ever runs.
"""

from __future__ import annotations

import base64
import binascii
import collections
import io
import pickle
from typing import Any

import torch
import torch._utils


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not a tensor")
        return found


def read_bucket(encoded: str) -> list[tuple[str, torch.Tensor]]:
    """Decode base64 of a pickled list of (name, tensor). Raises ValueError for anything else."""
    try:
        data = base64.b64decode(encoded, validate=True)
        value = _TensorUnpickler(io.BytesIO(data)).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"the serialized tensors cannot be read: {error}") from error
    except RuntimeError as error:  # torch: a storage that does not fit its tensor
        raise ValueError(f"the serialized tensors cannot be rebuilt: {error}") from error
    if not isinstance(value, list):
        raise ValueError("the serialized tensors are not a list of (name, tensor)")
    for item in value:
        pair = isinstance(item, tuple) and len(item) == 2
        if not pair or not isinstance(item[0], str) or not isinstance(item[1], torch.Tensor):
            raise ValueError("the serialized tensors are not a list of (name, tensor)")
    return value
