"""The prefix cache: KV of whole pages of tokens, found by a hash chain, bounded in tokens, LRU.

A page's key hashes the weights' epoch, the cache salt and every token up to the page's end. So KV of other weights
or of another salt can never be found, and equal keys mean equal KV. A page is touched after its successors, so it
outlives them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import torch

from gyre.engines.reference.slots import Shape, Slots

_KEY_BYTES = 16


def chain(
    epoch: int, salt: str, page: int, known: list[bytes], tokens: Callable[[int, int], list[int]], size: int
) -> None:
    """Extend `known`, the keys of a sequence's first pages, to all whole pages of its `size` tokens."""
    last = known[-1] if known else blake2b(f"{epoch}\0{salt}".encode(), digest_size=_KEY_BYTES).digest()
    for index in range(len(known), size // page):
        ids = array("q", tokens(index * page, (index + 1) * page))
        last = blake2b(last + ids.tobytes(), digest_size=_KEY_BYTES).digest()
        known.append(last)


class PrefixCache:
    """KV and experts of at most `tokens` tokens in pages of `page` tokens."""

    def __init__(self, shape: Shape, tokens: int, page: int) -> None:
        self.page = page
        self._pages = max(1, tokens // page)
        self._pool = shape.zeros(self._pages, page)
        self._experts = shape.experts(self._pages, page)
        self._index: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self._pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def clear(self) -> None:
        """Forget everything."""
        self._index.clear()
        self._free = list(range(self._pages - 1, -1, -1))

    def match(self, keys: list[bytes]) -> int:
        """How many leading pages are here."""
        for count, key in enumerate(keys):
            if key not in self._index:
                return count
        return len(keys)

    def load(self, keys: list[bytes], slots: Slots, slot: int) -> None:
        """Copy the pages of `keys` (all present) to the front of a slot."""
        if not keys:
            return
        kv, experts = slots.kv[slot], slots.experts[slot]
        chosen = torch.tensor([self._index[key] for key in keys])
        pages = self._pool.index_select(0, chosen)
        joined = pages.permute(1, 2, 3, 0, 4, 5)
        length = len(keys) * self.page
        kv[:, :, :, :length] = joined.reshape(*joined.shape[:3], length, joined.shape[5])
        experts[:length] = self._experts.index_select(0, chosen).flatten(0, 1)
        self._touch(keys)

    def store(self, keys: list[bytes], slots: Slots, slot: int) -> None:
        """Keep the leading pages of a slot, as far as the budget goes."""
        kv, experts = slots.kv[slot], slots.experts[slot]
        keys = keys[: self._pages]
        self._touch([key for key in keys if key in self._index])
        missing = [(at, key) for at, key in enumerate(keys) if key not in self._index]
        if not missing:
            return
        for _, key in missing:
            self._index[key] = self._take_page()
        length = len(keys) * self.page
        split = kv[:, :, :, :length].unflatten(3, (len(keys), self.page)).permute(3, 0, 1, 2, 4, 5)
        at, pages = [at for at, _ in missing], [self._index[key] for _, key in missing]
        self._pool[pages] = split[at]
        self._experts[pages] = experts[:length].unflatten(0, (len(keys), self.page))[at]
        self._touch(keys)

    def _take_page(self) -> int:
        if self._free:
            return self._free.pop()
        _, page = self._index.popitem(last=False)
        return page

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self._index.move_to_end(key)
