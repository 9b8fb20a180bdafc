"""Bodies on payload Redis instances, without persistence, away from the control Redis.

A body is cut into strings at the borders of its columns: a whole column is one GET, which the
server sends from where it lies; some rows of it are a GETRANGE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vla_storage.errors import PayloadCorruptError, PayloadFullError, PayloadNotFoundError
from vla_storage.payloads.base import Pieces, Spans, Tier, Want
from vla_storage.payloads.parts import checked_cuts, contiguous, cuts, num_parts, ranges_of
from vla_storage.payloads.redis_connections import Shards, as_array, head, translated
from vla_storage.payloads.redis_index import RedisIndex, meta_key
from vla_storage.payloads.segments import Key, Place, Segment
from vla_storage.payloads.store import DEFAULT_QUOTA_BYTES, PayloadStore
from vla_storage.tensors import Array


class RedisTier(Tier):
    """`watermark`: the used share of a server's memory above which it takes no more bodies, so
    that headers and other tenants' late columns still fit; what comes then spills or waits."""

    name = "redis"

    def __init__(self, shards: Shards, *, watermark: float = 0.9) -> None:
        self._shards = shards
        self._watermark = watermark

    def allocate(self, key: Key, segment_id: str, spans: Spans, *, ttl_s: float) -> Place:
        with translated(key):
            share = self._shards.of(key).fill()
        if share >= self._watermark:
            raise PayloadFullError(
                f"payload Redis is {share:.0%} full", reason="tier", tier=self.name,
                partition_id=key.partition_id,
            )  # fmt: skip
        return {"tier": self.name, "cuts": cuts(spans), "ttl_ms": max(1, int(ttl_s * 1000))}

    def write(self, key: Key, segment_id: str, place: Place, pieces: Pieces) -> None:
        parts = place["cuts"]

        def commands() -> Iterator[Any]:
            open_part = -1
            for number, data in contiguous(pieces(), parts):
                if number != open_part:
                    if open_part >= 0:
                        yield b"\r\n"
                    size = parts[number + 1] - parts[number]
                    name = _part_key(key, segment_id, number)
                    yield head("PSETEX", name, place["ttl_ms"], last_bytes=size)
                    open_part = number
                yield data.data
            if open_part >= 0:
                yield b"\r\n"

        with translated(key):
            self._shards.of(key).stream(commands, len(parts) - 1)

    def read(self, key: Key, wants: Sequence[Want], *, copy: bool) -> list[Array]:
        requests: list[bytes] = []
        sizes: list[list[int]] = []
        for want in wants:
            parts = checked_cuts(key, want.segment)
            ranges = list(ranges_of(parts, want.offset, want.offset + want.size_bytes))
            sizes.append([end - begin for _, begin, end, _ in ranges])
            for number, begin, end, whole in ranges:
                name = _part_key(key, want.segment.segment_id, number)
                requests.append(
                    head("GET", name) if whole else head("GETRANGE", name, begin, end - 1)
                )
        with translated(key):
            replies = iter(self._shards.of(key).stream(lambda: iter(requests), len(requests)))
        found = []
        for want, expected in zip(wants, sizes, strict=True):
            raws = [self._checked(key, want, next(replies), size) for size in expected]
            found.append(raws[0] if len(raws) == 1 else np.concatenate(raws))
        return found

    def free(self, key: Key, segment_id: str, place: Place) -> None:
        names = _part_keys(key, segment_id, place)
        if names:
            with translated(key):
                # UNLINK frees large values off the server's main thread.
                self._shards.of(key).client.unlink(*names)

    def extend(self, key: Key, segments: Sequence[Segment], *, ttl_s: float) -> None:
        with translated(key), self._shards.of(key).client.pipeline(transaction=False) as pipe:
            for segment in segments:
                for name in _part_keys(key, segment.segment_id, segment.place):
                    pipe.pexpire(name, max(1, int(ttl_s * 1000)), gt=True)
            pipe.execute()

    def reset(self) -> None:
        self._shards.reset()

    def close(self) -> None:
        self._shards.close()

    @staticmethod
    def _checked(key: Key, want: Want, reply: Any, size_bytes: int) -> Array:
        if reply is None or len(reply) == 0:
            raise PayloadNotFoundError(
                f"{key} is gone", partition_id=key.partition_id,
                columns=[block.name for block in want.segment.blocks if not block.is_pool],
            )  # fmt: skip
        if not isinstance(reply, bytes | np.ndarray) or len(reply) != size_bytes:
            raise PayloadCorruptError(
                f"{key} has the wrong number of bytes",
                tenant_id=key.tenant_id, partition_id=key.partition_id,
            )  # fmt: skip
        return as_array(reply)


class RedisPayloadStore(PayloadStore):
    """Index and bodies on one or several payload Redis instances, with more tiers around.

    `local` tiers are tried before Redis (a shared-memory arena), `spill` tiers after it.
    """

    def __init__(
        self, urls: Iterable[str], *, local: Sequence[Tier] = (), spill: Sequence[Tier] = (),
        quota_bytes: int = DEFAULT_QUOTA_BYTES, watermark: float = 0.9, timeout_s: float = 15.0,
    ) -> None:  # fmt: skip
        shards = Shards(urls, timeout_s=timeout_s)
        tiers = (*local, RedisTier(shards, watermark=watermark), *spill)
        super().__init__(RedisIndex(shards), tiers, quota_bytes=quota_bytes)


def _part_key(key: Key, segment_id: str, number: int) -> str:
    return f"{meta_key(key)}:{segment_id}:{number}"


def _part_keys(key: Key, segment_id: str, place: Place) -> list[str]:
    return [_part_key(key, segment_id, number) for number in range(num_parts(place))]
