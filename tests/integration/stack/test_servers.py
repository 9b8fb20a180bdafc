"""The embedded servers answer as the platform needs them."""

from __future__ import annotations

from contextlib import closing

import boto3
import pytest
import redis

from vla_platform.stack.servers import S3Address, redis_ready, s3_ready

pytestmark = pytest.mark.services


def config(url: str, name: str) -> str:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return str(client.config_get(name)[name])


def test_control_redis_persists_and_payload_redis_does_not(
    control_redis_url: str, payload_redis_url: str
) -> None:
    assert config(control_redis_url, "appendonly") == "yes"
    assert config(control_redis_url, "appendfsync") == "no"
    assert config(payload_redis_url, "appendonly") == "no"
    assert config(payload_redis_url, "save") == ""


def test_neither_redis_evicts(control_redis_url: str, payload_redis_url: str) -> None:
    for url in (control_redis_url, payload_redis_url):
        assert config(url, "maxmemory-policy") == "noeviction"


def test_the_bucket_of_the_object_store_begins_empty(s3: S3Address) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        region_name="us-east-1",
    )
    with closing(client):
        assert client.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == 0


def test_readiness_of_absent_servers_is_false() -> None:
    nowhere = S3Address(endpoint="http://127.0.0.1:9", access_key="a", secret_key="b", bucket="c")

    assert not redis_ready("redis://127.0.0.1:9/0")
    assert not s3_ready(nowhere)
