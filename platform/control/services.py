"""The connections of one platform process, made once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import redis

from vla_platform.control.ledger import Ledger
from vla_platform.metrics.events import Emitter
from vla_platform.settings import Settings, load_settings
from vla_storage.objects import S3ObjectStore
from vla_storage.payloads import PayloadStore, RedisPayloadStore


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: Settings
    ledger: Ledger
    objects: S3ObjectStore
    payloads: PayloadStore
    payload_client: Any  # the payload Redis itself, for its users and streams
    emitter: Emitter

    @property
    def signing_key(self) -> bytes:
        return self.settings.signing_key_file.read_bytes().strip()


def connect(settings: Settings) -> Services:
    ledger = Ledger.connect(settings.redis_url)
    payload_client = redis.Redis.from_url(settings.payload_url, socket_timeout=30)
    return Services(
        settings=settings,
        ledger=ledger,
        objects=S3ObjectStore(
            settings.s3_bucket,
            endpoint=settings.s3_endpoint,
            access_key=settings.s3_access_key,
            secret_key=settings.s3_secret_key,
        ),
        payloads=RedisPayloadStore(payload_client),
        payload_client=payload_client,
        emitter=Emitter(ledger.client),
    )


@functools.cache
def services() -> Services:
    """Those of this process, from its environment."""
    return connect(load_settings())
