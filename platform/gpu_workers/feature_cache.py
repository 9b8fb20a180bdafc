"""Features of rows already seen, kept in memory up to a bound.

The backbone is frozen, so a row's features never change: the second epoch, and a second tenant on
the same data, need no forward. The key covers everything that features depend on: base-model and
preprocessing digests, pixels, prompt, queries and kind of feature.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vla_platform.gpu_workers.canonical import Row

DEFAULT_MAX_BYTES = 512 * 1024 * 1024
ENTRY_OVERHEAD_BYTES = 512  # key, tensor header and dictionary slot, so that small rows count too


@dataclass
class CacheStatistics:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    size_bytes: int = 0
    num_entries: int = 0


class FeatureCache:
    """Least recently used first out. `max_bytes=0` switches it off. Not thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.statistics = CacheStatistics()
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, key: bytes) -> Tensor | None:
        found = self._entries.get(key)
        if found is None:
            self.statistics.misses += 1
            return None
        self._entries.move_to_end(key)
        self.statistics.hits += 1
        return found

    def put(self, key: bytes, feature: Tensor) -> None:
        """Keep `feature`, which must own its memory: a view would pin the whole batch."""
        size = _size_bytes(feature)
        if size > self.max_bytes or key in self._entries:
            return
        self._entries[key] = feature
        self.statistics.size_bytes += size
        while self.statistics.size_bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.statistics.size_bytes -= _size_bytes(dropped)
            self.statistics.evictions += 1
        self.statistics.num_entries = len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
        self.statistics.size_bytes = self.statistics.num_entries = 0


def _size_bytes(feature: Tensor) -> int:
    return feature.numel() * feature.element_size() + ENTRY_OVERHEAD_BYTES


def row_key(row: Row, kind: str, base: bytes) -> bytes:
    """The cache key of a row, 16 bytes. `base` stands for the digests of model and preprocessing.

    Pixels are named by themselves: a digest that comes with them is its sender's word, and would
    give another tenant the features of whatever that sender likes.
    """
    digest = hashlib.blake2b(base, digest_size=16)
    prompt = row.prompt.encode()
    shape = (*row.images.shape, row.num_queries, len(prompt))
    digest.update(f"{kind} {shape} ".encode())
    digest.update(prompt)
    digest.update(np.ascontiguousarray(row.images).data)
    return digest.digest()
