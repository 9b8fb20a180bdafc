"""Start-up gates: wrong services and settings are refused before they can lose anybody's work.

Each check raises `ConfigurationError` with what is wrong and what to change;
`UnavailableError` means that the service did not answer, and retrying helps.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import redis
from celery import Celery

from vla_platform.errors import ConfigurationError, UnavailableError
from vla_storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    StorageError,
    StorageUnavailableError,
)
from vla_storage.objects import ObjectStore

_log = logging.getLogger(__name__)

MIN_REDIS = (7, 0)
MAX_CLOCK_SKEW_S = 1.0
PROBE_PREFIX = "platform/probes/"
# Over the 4 MB at which SeaweedFS begins to cut an object into chunks.
_LARGE_BYTES = 9 << 20


def check_control_redis(url: str) -> None:
    """At least Redis 7 (Valkey counts), never evicting. Warns where writes are not kept on disk."""
    with _redis(url, "control Redis") as client:
        info = client.info("server")
        version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
        policy = _setting(client, "maxmemory-policy")
        append_only = _setting(client, "appendonly")
    if version < MIN_REDIS:
        raise ConfigurationError(
            f"control Redis: version {info['redis_version']}; use Redis >= 7 or Valkey",
            found=str(info["redis_version"]),
        )
    if policy not in (None, "noeviction"):
        raise ConfigurationError(
            f"control Redis: maxmemory-policy is {policy}, which silently deletes work; "
            "set it to noeviction",
            found=policy,
        )
    if append_only == "no":
        _log.warning(
            "action=gate_warning reason=control Redis: appendonly is off; what is in flight is "
            "lost when it restarts (set appendonly yes)"
        )


def check_payload_redis(url: str, control_url: str) -> None:
    """Another server than the control Redis: samples must not take the ledger's memory.

    Another database number of the same server is the same server.
    """
    with _redis(url, "payload Redis") as payload, _redis(control_url, "control Redis") as control:
        ids = [str(client.info("server")["run_id"]) for client in (payload, control)]
        policy = _setting(payload, "maxmemory-policy")
    if ids[0] == ids[1]:
        raise ConfigurationError(
            "payload Redis: it is the same server as the control Redis; "
            "point VLA_PAYLOAD_URL to a second one, without persistence"
        )
    if policy not in (None, "noeviction"):
        raise ConfigurationError(
            f"payload Redis: maxmemory-policy is {policy}, which deletes samples of running jobs; "
            "set it to noeviction",
            found=policy,
        )


def check_object_store(objects: ObjectStore) -> None:
    """Bytes come back as they went in, small and large; conditional writes are obeyed (PF-24).

    Writes below `platform/probes/` and removes what it wrote.
    """
    key = f"{PROBE_PREFIX}{uuid4().hex}"
    try:
        _probe_bytes(objects, key)
        _probe_conditions(objects, key)
    except StorageUnavailableError as error:
        raise UnavailableError(f"object store: {error}") from error
    except StorageError as error:
        raise ConfigurationError(f"object store: {error}; check bucket and credentials") from error
    finally:
        with contextlib.suppress(StorageError):
            objects.delete(key)


def check_celery(app: Celery) -> None:
    """JSON and nothing else is decoded: a pickle from the broker would be code."""
    for setting in ("accept_content", "result_accept_content"):
        found = app.conf[setting]
        if setting == "result_accept_content" and found is None:
            continue  # then accept_content holds for results too
        if [str(item) for item in found] != ["json"]:
            raise ConfigurationError(
                f"Celery: {setting} is {sorted(map(str, found))}; set it to ['json']",
                found=sorted(map(str, found)),
            )


def check_clock(client: redis.Redis, *, wall_clock: Callable[[], float] = time.time) -> float:
    """Seconds by which this machine is ahead of the control Redis, whose time leases use.

    The middle of the request is compared, so that a slow reply is not taken for a wrong clock.
    """
    try:
        before = wall_clock()
        seconds, microseconds = client.time()
        middle = (before + wall_clock()) / 2
    except redis.RedisError as error:
        raise UnavailableError(f"control Redis: {error}") from error
    skew_s = float(middle - (seconds + microseconds / 1e6))
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        raise ConfigurationError(
            f"clock: this machine is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} "
            f"the control Redis; at most {MAX_CLOCK_SKEW_S:.0f} s is allowed: synchronise with NTP",
            skew_s=skew_s,
        )
    return skew_s


def _probe_bytes(objects: ObjectStore, key: str) -> None:
    pattern = bytes(range(256)) + b"\r\n0;chunk-signature\r\n"
    for content in (b"", pattern, pattern * (_LARGE_BYTES // len(pattern))):
        objects.put(key, content, sha256=hashlib.sha256(content).hexdigest())
        # Transfer framing or trailers stored inside the object would show in bytes and size.
        if objects.get(key) != content or objects.head(key).size != len(content):
            raise ConfigurationError(
                f"object store: {len(content)} bytes came back altered (it stores transfer "
                "framing or checksums inside objects); use another store or a newer version"
            )
    if [info.key for info in objects.list(key)] != [key]:
        raise ConfigurationError("object store: a new object does not show in listings")


def _probe_conditions(objects: ObjectStore, key: str) -> None:
    with _refused(ObjectExistsError, "If-None-Match: *"):
        objects.put(key, b"second", if_absent=True)
    stale = objects.put(key, b"first")
    current = objects.put(key, b"second", if_match=stale)
    if objects.get(key) != b"second":
        raise ConfigurationError("object store: a read does not show the write before it")
    with _refused(ObjectChangedError, "If-Match"):
        objects.put(key, b"third", if_match=stale)
    if objects.get_with_etag(key) != (b"second", current):
        raise ConfigurationError("object store: a refused conditional write changed the object")


@contextlib.contextmanager
def _refused(expected: type[StorageError], header: str) -> Iterator[None]:
    try:
        yield
    except expected:
        return
    raise ConfigurationError(
        f"object store: it ignores {header}, so two writers could both win; "
        "use a store with conditional writes (S3, SeaweedFS, MinIO, Ceph)",
        header=header,
    )


@contextlib.contextmanager
def _redis(url: str, name: str) -> Iterator[Any]:
    try:
        with redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=5.0, socket_connect_timeout=5.0
        ) as client:
            yield client
    except redis.exceptions.AuthenticationError as error:
        raise ConfigurationError(f"{name}: {error}; check user and password in its URL") from error
    except redis.exceptions.NoPermissionError as error:
        raise ConfigurationError(f"{name}: {error}; allow +info to its user") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise UnavailableError(f"{name}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _setting(client: Any, name: str) -> str | None:
    """None where the server does not tell: hosted ones refuse CONFIG; INFO tells the policy."""
    try:
        found: str | None = client.config_get(name).get(name)
    except redis.ResponseError:
        found = client.info("memory").get("maxmemory_policy") if name.startswith("max") else None
    return found
