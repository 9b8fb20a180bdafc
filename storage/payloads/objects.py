"""Bodies in an object store: where payloads spill when everything nearer is full.

One object per part of a body, cut as on Redis, below `platform/payloads/<tenant>/<partition>/`,
where tenants' own credentials do not reach. Objects do not expire: clears and the collector
remove them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from vla_storage.errors import ObjectNotFoundError, PayloadCorruptError, PayloadNotFoundError
from vla_storage.objects import ObjectStore
from vla_storage.payloads.base import Pieces, Spans, Tier, Want
from vla_storage.payloads.parts import checked_cuts, contiguous, cuts, num_parts, ranges_of
from vla_storage.payloads.segments import Key, Place
from vla_storage.tensors import Array

PREFIX = "platform/payloads/"


class ObjectTier(Tier):
    name = "objects"

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def allocate(self, key: Key, segment_id: str, spans: Spans, *, ttl_s: float) -> Place:
        return {"tier": self.name, "cuts": cuts(spans)}

    def write(self, key: Key, segment_id: str, place: Place, pieces: Pieces) -> None:
        parts = place["cuts"]
        held: list[bytes] = []
        open_part = 0
        for number, data in contiguous(pieces(), parts):
            if number != open_part:
                self._objects.put(_part_key(key, segment_id, open_part), b"".join(held))
                held, open_part = [], number
            held.append(data.tobytes())
        if held:
            self._objects.put(_part_key(key, segment_id, open_part), b"".join(held))

    def read(self, key: Key, wants: Sequence[Want], *, copy: bool) -> list[Array]:
        return [self._read(key, want) for want in wants]

    def _read(self, key: Key, want: Want) -> Array:
        parts = checked_cuts(key, want.segment)
        found = []
        for number, begin, end, whole in ranges_of(
            parts, want.offset, want.offset + want.size_bytes
        ):
            name = _part_key(key, want.segment.segment_id, number)
            try:
                if whole:
                    raw = self._objects.get(name, max_bytes=end)
                else:
                    raw = self._objects.get_range(name, begin, end - begin)
            except ObjectNotFoundError as error:
                raise PayloadNotFoundError(
                    f"{key} is gone", partition_id=key.partition_id, columns=[]
                ) from error
            if len(raw) != end - begin:
                raise PayloadCorruptError(
                    f"{key} has the wrong number of bytes",
                    tenant_id=key.tenant_id, partition_id=key.partition_id,
                )  # fmt: skip
            found.append(np.frombuffer(raw, np.uint8))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def free(self, key: Key, segment_id: str, place: Place) -> None:
        for number in range(num_parts(place)):
            self._objects.delete(_part_key(key, segment_id, number))

    def sweep(self, known: Collection[Key], *, grace_s: float) -> int:
        before = time.time() - grace_s
        removed = 0
        for info in self._objects.list(PREFIX):
            tenant, _, rest = info.key.removeprefix(PREFIX).partition("/")
            if Key(tenant, rest.partition("/")[0]) not in known and info.modified <= before:
                self._objects.delete(info.key)
                removed += 1
        return removed


def _part_key(key: Key, segment_id: str, number: int) -> str:
    return f"{PREFIX}{key.tenant_id}/{key.partition_id}/{segment_id}.{number}"
