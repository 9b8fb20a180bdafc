"""Wrong services are refused at start-up, each with what to change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import Celery

from vla_platform.errors import ConfigurationError, UnavailableError
from vla_platform.stack.gates import (
    PROBE_PREFIX,
    check_celery,
    check_clock,
    check_control_redis,
    check_object_store,
    check_payload_redis,
)
from vla_platform.stack.servers import S3Address
from vla_storage.objects import Body, MemoryObjectStore, S3ObjectStore

pytestmark = pytest.mark.services
NOWHERE = "redis://127.0.0.1:9/0"


@contextmanager
def setting(url: str, name: str, value: str) -> Iterator[None]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        before = client.config_get(name)[name]
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, before)


def test_the_embedded_services_pass(
    control_redis_url: str, payload_redis_url: str, s3: S3Address
) -> None:
    check_control_redis(control_redis_url)
    check_payload_redis(payload_redis_url, control_redis_url)
    with s3.objects() as objects:
        check_object_store(objects)
        assert list(objects.list(PROBE_PREFIX)) == []


def test_f28_an_evicting_control_redis_is_refused(control_redis_url: str) -> None:
    with (
        setting(control_redis_url, "maxmemory-policy", "allkeys-lru"),
        pytest.raises(ConfigurationError, match=r"allkeys-lru.*noeviction"),
    ):
        check_control_redis(control_redis_url)


def test_a_control_redis_that_keeps_nothing_is_warned_about(
    payload_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_control_redis(payload_redis_url)

    assert "appendonly is off" in caplog.text


@pytest.mark.parametrize("database", ["/0", "/1"])
def test_a_payload_redis_that_is_the_control_redis_is_refused(
    control_redis_url: str, database: str
) -> None:
    same = control_redis_url.removesuffix("/0") + database
    with pytest.raises(ConfigurationError, match="same server"):
        check_payload_redis(same, control_redis_url)


def test_an_evicting_payload_redis_is_refused(
    control_redis_url: str, payload_redis_url: str
) -> None:
    with (
        setting(payload_redis_url, "maxmemory-policy", "volatile-ttl"),
        pytest.raises(ConfigurationError, match=r"volatile-ttl.*noeviction"),
    ):
        check_payload_redis(payload_redis_url, control_redis_url)


def test_a_user_without_config_still_gets_the_policy_checked(control_redis_url: str) -> None:
    with redis.Redis.from_url(control_redis_url) as client:
        client.execute_command("ACL", "SETUSER", "hosted", "on", ">pw", "~*", "+ping", "+info")
        client.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~*", "+ping")
    hosted = control_redis_url.replace("://", "://hosted:pw@")
    try:
        check_control_redis(hosted)
        with (
            setting(control_redis_url, "maxmemory-policy", "allkeys-lru"),
            pytest.raises(ConfigurationError, match="allkeys-lru"),
        ):
            check_control_redis(hosted)
        with pytest.raises(ConfigurationError, match=r"\+info"):
            check_control_redis(hosted.replace("hosted", "narrow"))
        with pytest.raises(ConfigurationError, match="password"):
            check_control_redis(hosted.replace(":pw@", ":wrong@"))
    finally:
        with redis.Redis.from_url(control_redis_url) as client:
            client.execute_command("ACL", "DELUSER", "hosted", "narrow")


def test_an_absent_service_is_unavailable_and_a_retry_helps(control_redis_url: str) -> None:
    with S3ObjectStore(
        "b", endpoint="http://127.0.0.1:9", access_key="a", secret_key="b"
    ) as objects:
        for check in (
            lambda: check_control_redis(NOWHERE),
            lambda: check_payload_redis(NOWHERE, control_redis_url),
            lambda: check_object_store(objects),
        ):
            with pytest.raises(UnavailableError) as caught:
                check()
            assert caught.value.retryable


class IgnoresAbsence(MemoryObjectStore):
    def put(self, key: str, data: Body, **options: Any) -> str:
        return super().put(key, data, **{**options, "if_absent": False})


class IgnoresMatch(MemoryObjectStore):
    def put(self, key: str, data: Body, **options: Any) -> str:
        return super().put(key, data, **{**options, "if_match": None})


class StoresTrailers(MemoryObjectStore):
    def put(self, key: str, data: Body, **options: Any) -> str:
        content = data if isinstance(data, bytes) else data.read_bytes()
        framed = b"%x\r\n%s\r\n0\r\nx-amz-checksum-crc32:AAAA\r\n" % (len(content), content)
        return super().put(key, framed, **{**options, "sha256": None})


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        (IgnoresAbsence, "If-None-Match"),
        (IgnoresMatch, "If-Match"),
        (StoresTrailers, "altered"),
    ],
)
def test_f63_pf24_an_unfit_object_store_is_refused_and_left_clean(
    objects: Callable[[], MemoryObjectStore], problem: str
) -> None:
    store = objects()
    with pytest.raises(ConfigurationError, match=problem):
        check_object_store(store)

    assert list(store.list("")) == []


def test_a_wrong_bucket_or_key_is_a_configuration_error(s3: S3Address) -> None:
    with (
        S3ObjectStore(
            s3.bucket, endpoint=s3.endpoint, access_key=s3.access_key, secret_key="wrong"
        ) as objects,
        pytest.raises(ConfigurationError, match="credentials"),
    ):
        check_object_store(objects)


@pytest.mark.parametrize("accepted", [["json", "pickle"], ["pickle"], ["application/x-python"], []])
def test_celery_that_decodes_more_than_json_is_refused(accepted: list[str]) -> None:
    app = Celery("test", set_as_current=False)
    app.conf.accept_content = accepted
    with pytest.raises(ConfigurationError, match="accept_content"):
        check_celery(app)


def test_celery_with_json_only_passes_unless_results_say_otherwise() -> None:
    app = Celery("test", set_as_current=False)
    app.conf.accept_content = ["json"]
    check_celery(app)

    app.conf.result_accept_content = ["json", "pickle"]
    with pytest.raises(ConfigurationError, match="result_accept_content"):
        check_celery(app)


@pytest.mark.parametrize(("offset_s", "word"), [(600.0, "ahead"), (-1.5, "behind")])
def test_f73_a_clock_more_than_a_second_off_is_refused(
    control_redis_url: str, offset_s: float, word: str
) -> None:
    with redis.Redis.from_url(control_redis_url) as client:
        assert abs(check_clock(client)) < 1.0
        with pytest.raises(ConfigurationError, match=word):
            check_clock(client, wall_clock=lambda: time.time() + offset_s)
