"""Payload stores: one interface, Redis for real, memory for tests."""

from vla_storage.payloads.base import ColumnInfo, PayloadStore
from vla_storage.payloads.memory import MemoryPayloadStore
from vla_storage.payloads.redis import RedisPayloadStore

__all__ = ["ColumnInfo", "MemoryPayloadStore", "PayloadStore", "RedisPayloadStore"]
