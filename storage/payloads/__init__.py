"""Payload stores: rows of samples in columns, in memory, shared memory, Redis and S3."""

from vla_storage.payloads.arena import ArenaTier
from vla_storage.payloads.asynchronous import AsyncPayloadStore
from vla_storage.payloads.columns import Column, ColumnInfo, FrameColumn, Frames, Kind
from vla_storage.payloads.memory import MemoryPayloadStore
from vla_storage.payloads.objects import ObjectTier
from vla_storage.payloads.redis import RedisPayloadStore
from vla_storage.payloads.store import DEFAULT_QUOTA_BYTES, PayloadStore

__all__ = [
    "DEFAULT_QUOTA_BYTES",
    "ArenaTier",
    "AsyncPayloadStore",
    "Column",
    "ColumnInfo",
    "FrameColumn",
    "Frames",
    "Kind",
    "MemoryPayloadStore",
    "ObjectTier",
    "PayloadStore",
    "RedisPayloadStore",
]
