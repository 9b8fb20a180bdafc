"""The connections of one platform process, made once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import redis

from vla_platform.control.ledger import Ledger
from vla_platform.metrics.events import Emitter
from vla_platform.settings import Settings, load_settings
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import StorageError
from vla_storage.objects import ObjectStore, S3ObjectStore
from vla_storage.payloads import ArenaTier, ObjectTier, PayloadStore, RedisPayloadStore
from vla_storage.payloads.base import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: Settings
    ledger: Ledger
    objects: ObjectStore
    payloads: PayloadStore
    payload_clients: tuple[redis.Redis, ...]  # for users and functions; the first has the streams
    emitter: Emitter

    @property
    def signing_key(self) -> bytes:
        return self.settings.signing_key_file.read_bytes().strip()

    def checkpoints(self, tenant: str) -> CheckpointStore:
        """One tenant's, signed and verified with the platform's key."""
        return CheckpointStore(objects=self.objects, tenant_id=tenant, signing_key=self.signing_key)


def connect(settings: Settings) -> Services:
    ledger = Ledger.connect(settings.redis_url)
    objects = object_store(settings)
    return Services(
        settings=settings,
        ledger=ledger,
        objects=objects,
        payloads=payload_store(settings, objects),
        payload_clients=payload_clients(settings.payload_urls),
        emitter=Emitter(ledger.client),
    )


def object_store(settings: Settings) -> S3ObjectStore:
    return S3ObjectStore(
        settings.s3_bucket,
        endpoint=settings.s3_endpoint,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
    )


def payload_clients(urls: Iterable[str]) -> tuple[redis.Redis, ...]:
    """One per payload Redis; they connect when they are used."""
    return tuple(
        redis.Redis.from_url(url, socket_timeout=15, socket_connect_timeout=5) for url in urls
    )


def payload_store(settings: Settings, objects: ObjectStore) -> PayloadStore:
    """This process's tiers: the host's arena where there is one, the payload Redis, and S3 for
    what no longer fits."""
    local: list[Tier] = []
    if settings.arena is not None:
        try:
            local.append(ArenaTier(settings.arena))
        except StorageError as error:
            # Redis takes what the arena would have; only speed is lost.
            _log.warning("action=arena_absent reason=%s", error)
    return RedisPayloadStore(
        settings.payload_urls,
        local=local,
        spill=[ObjectTier(objects)] if settings.payload_spill else (),
        quota_bytes=settings.payload_quota_bytes,
        watermark=settings.payload_watermark,
    )


@functools.cache
def services() -> Services:
    """Those of this process, from its environment."""
    return connect(load_settings())
