"""Tenants `a` and `ab`: every command family on both Redises and every verb of the object store,
tried across tenants; rotation and revocation within a second (B05, B06)."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
import redis
from botocore.config import Config
from botocore.exceptions import ClientError
from redis.backoff import NoBackoff
from redis.retry import Retry

from vla_platform.control.ledger import Ledger
from vla_platform.control.payload_access import apply_payload_access
from vla_platform.control.tenant_records import TENANTS_KEY, Tenant, list_tenants
from vla_platform.control.tenants import (
    TenantServers,
    add_tenant,
    apply_acl,
    remove_tenant,
    restore_acls,
    rotate_tenant,
)
from vla_platform.errors import TenantError
from vla_platform.stack.servers import S3Address
from vla_storage.objects import MemoryObjectStore, S3Admin

pytestmark = pytest.mark.services

CONTROL_KEYS = (
    "ingress.ab", "_kombu.binding.ingress.ab", "ingress.b", "vla:t:ab:workloads",
    "vla:t:ab:reply:1", "vla:t:ab:schedules", "vla:w:sft-1", "vla:j:1", "vla:usage:a",
    "vla:use:a:1", "vla:policy:a/p", "vla:tenants", "vla:metrics", "vla:weights", "control",
    "sft", "training", "unacked", "vla:beat:schedule:a:x", "vla:maintenance",
    "vla:gpu:gpu@host", "vla:w:sft-1:evaluated", "vla:t:ab:evaluations",
    "celery-task-meta-1", "_kombu.binding.control",
)  # fmt: skip
PAYLOAD_KEYS = (
    "ab:payload:p1", "infer:tiny:ab", "ab:infer:reply:1", "ab:env:to:h", "ab:env:from:s",
    "vla:env:open:h", "vla:tenants", "platform:payload:p1", "payload:quota:ab",
)  # fmt: skip
READ_ONLY = ("vla:t:a:workloads", "vla:t:a:schedules", "vla:t:a:evaluations", "vla:t:a:w:sft-1")
"""Of tenant `a` itself, but written by the platform alone."""
KEYLESS = {
    "auth", "hello", "reset", "quit", "ping", "echo", "select", "client|setinfo", "client|setname",
    "client|id", "info", "multi", "exec", "unwatch", "time", "fcall", "asking", "readonly",
    "readwrite", "discard", "wait", "waitaof", "command",
    "command|docs", "command|info", "command|list", "command|getkeys", "command|getkeysandflags",
    "command|count",
}  # fmt: skip
"""What a tenant may call without a key: its own connection and nothing of anybody's."""


@pytest.fixture
def servers(
    control_redis_url: str, payload_redis_url: str
) -> Iterator[dict[str, tuple[redis.Redis, tuple[str, ...]]]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for name, url, keys in (
            ("control", control_redis_url, CONTROL_KEYS),
            ("payload", payload_redis_url, PAYLOAD_KEYS),
        ):
            client = stack.enter_context(redis.Redis.from_url(url, decode_responses=True))
            client.set_response_callback("COMMAND", lambda answer, **_: answer)
            found[name] = (client, keys)
        for tenant in ("a", "ab"):
            record = Tenant(
                tenant_id=tenant, password_sha256=hashlib.sha256(tenant.encode()).hexdigest()
            )
            apply_acl(found["control"][0], record)
            apply_payload_access(found["payload"][0], record)
        yield found
        for client, _ in found.values():
            for tenant in ("a", "ab"):
                client.execute_command("ACL", "DELUSER", tenant)


def commands(client: redis.Redis) -> Iterator[tuple[list[str], int]]:
    """Every command of the server, subcommands too, with the number of its arguments."""
    for name in sorted(client.execute_command("COMMAND", "LIST")):
        (info,) = client.execute_command("COMMAND", "INFO", name)
        yield name.split("|"), max(1, abs(info[1]) - len(name.split("|")))


def shapes(words: list[str], least: int, key: str) -> Iterator[list[str]]:
    """The key wherever a command may take one."""
    for more in range(4):
        count = least + more
        yield [*words, *[key] * count]
        if count >= 2:
            yield [*words, "1", *[key] * (count - 1)]
            yield [*words, key, "1", *[key] * (count - 2)]
            yield [*words, "x", "1", *[key] * max(1, count - 2)]
            yield [*words, "0", "1", *[key] * max(1, count - 2)]
    yield [*words, "STREAMS", key, "0"]
    yield [*words, "GROUP", "g", "c", "STREAMS", key, "0"]
    yield [*words, "1", key, "LEFT"]
    yield [*words, "0", "1", key, "LEFT"]
    yield [*words, key, key, "STORE", key]


def allowed(client: redis.Redis, user: str, call: list[str]) -> bool:
    try:
        answer = client.execute_command("ACL", "DRYRUN", user, *call)
    except redis.ResponseError:
        return False  # no such call: too few arguments, or not a command
    return str(answer) == "OK"


def keys_of(client: redis.Redis, call: list[str]) -> list[str]:
    try:
        return list(client.execute_command("COMMAND", "GETKEYS", *call))
    except redis.ResponseError:
        return []


@pytest.mark.parametrize("server", ["control", "payload"])
def test_b05_no_command_reaches_a_key_of_anybody_else(
    servers: dict[str, tuple[redis.Redis, tuple[str, ...]]], server: str
) -> None:
    client, foreign = servers[server]
    tried = 0
    keyless: set[str] = set()
    reached: list[list[str]] = []
    for words, least in commands(client):
        for key in foreign:
            for call in shapes(words, least, key):
                tried += 1
                if not allowed(client, "a", call):
                    continue
                if key in keys_of(client, call):
                    reached.append(call)
                elif "|".join(words) not in {"xread", "blmpop", "lmpop"}:
                    keyless.add("|".join(words))
            if key != foreign[0] and not reached and "|".join(words) in keyless:
                break
    assert reached == []
    assert keyless - KEYLESS == set()
    assert tried > 5000


def test_a_tenant_reads_and_does_not_write_what_the_platform_tells_it(
    servers: dict[str, tuple[redis.Redis, tuple[str, ...]]],
) -> None:
    client, _ = servers["control"]
    for key in READ_ONLY:
        for call in (["HSET", key, "f", "v"], ["DEL", key], ["SADD", key, "x"],
                     ["LPUSH", key, "x"], ["SET", key, "x"], ["EXPIRE", key, "1"]):  # fmt: skip
            assert not allowed(client, "a", call), call
        assert allowed(client, "a", ["HGETALL", key])
    for call in (["LPUSH", "ingress.a", "x"], ["BLPOP", "vla:t:a:reply:1", "1"],
                 ["XREAD", "STREAMS", "vla:t:a:w:1:events", "0"]):  # fmt: skip
        assert allowed(client, "a", call), call


CREATING = {
    "list": (["LPUSH", "x"], ["RPUSH", "x"]), "set": (["SADD", "x"],),
    "hash": (["HSET", "f", "x"],),
    "string": (["SET", "x"], ["PSETEX", "1000", "x"], ["APPEND", "x"]),
    "zset": (["ZADD", "1", "x"],), "stream": (["XADD", "*", "f", "x"],),
}  # fmt: skip
"""What makes a key of each type."""


@pytest.mark.parametrize(
    ("server", "key", "wanted"),
    [
        ("control", "ingress.a", ["LPUSH", "x"]),
        ("control", "ingress.a\x06\x163", ["LPUSH", "x"]),
        ("control", "_kombu.binding.ingress.a", ["SADD", "x"]),
        ("control", "vla:t:a:reply:1", None),
        ("control", "vla:t:a:workloads", None),
        ("payload", "infer:tiny:a", ["XADD", "*", "f", "x"]),
        ("payload", "a:infer:reply:1", None),
        ("payload", "a:env:to:host", ["RPUSH", "x"]),
        ("payload", "a:env:from:session", None),
    ],
)
def test_no_tenant_makes_a_key_of_another_type_than_its_readers_expect(
    servers: dict[str, tuple[redis.Redis, tuple[str, ...]]],
    server: str,
    key: str,
    wanted: list[str] | None,
) -> None:
    """One such key among all tenants' stops its readers for everybody; and what is only popped
    cannot be filled either."""
    client, _ = servers[server]
    for calls in CREATING.values():
        for name, *rest in calls:
            expected = wanted == [name, *rest]
            assert allowed(client, "a", [name, key, *rest]) == expected, (name, key)


def test_nobody_administers_the_server_or_runs_scripts(
    servers: dict[str, tuple[redis.Redis, tuple[str, ...]]],
) -> None:
    for client, _ in servers.values():
        for call in (
            ["ACL", "LIST"], ["ACL", "SETUSER", "a", "+@all"], ["CONFIG", "GET", "*"],
            ["CONFIG", "SET", "maxmemory", "1"], ["FLUSHALL"], ["FLUSHDB"], ["KEYS", "*"],
            ["SCAN", "0"], ["RANDOMKEY"], ["DBSIZE"], ["MONITOR"], ["SHUTDOWN"],
            ["DEBUG", "SLEEP", "0"],
            ["EVAL", "return 1", "0"], ["SCRIPT", "LOAD", "return 1"], ["FUNCTION", "LIST"],
            ["FUNCTION", "LOAD", "x"], ["CLIENT", "LIST"], ["CLIENT", "KILL", "USER", "ab"],
            ["SUBSCRIBE", "x"], ["PSUBSCRIBE", "*"], ["PUBLISH", "x", "y"], ["REPLICAOF", "h", "1"],
            ["MIGRATE", "h", "1", "k", "0", "1"], ["SORT", "vla:t:a:workloads"], ["SAVE"],
            ["OBJECT", "ENCODING", "vla:w:1"], ["MEMORY", "USAGE", "vla:w:1"], ["SLOWLOG", "GET"],
            ["LATENCY", "RESET"], ["MODULE", "LIST"], ["SWAPDB", "0", "1"],
        ):  # fmt: skip
            assert not allowed(client, "a", call), call


@dataclass
class Two:
    """Two tenants at a real S3, as boto3 clients."""

    bucket: str
    a: Any
    ab: Any
    admin: S3Admin


def s3_as(address: S3Address, keys: tuple[str, str], service: str = "s3") -> Any:
    return boto3.client(
        service, endpoint_url=address.endpoint, aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1], region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )  # fmt: skip


@pytest.fixture
def two(s3: S3Address) -> Iterator[Two]:
    admin = s3.admin()
    with contextlib.closing(admin):
        a, ab = (s3_as(s3, admin.create_tenant(name)) for name in ("a", "ab"))
        until(lambda: a.put_object(Bucket=s3.bucket, Key="a/datasets/x", Body=b"of a"))
        until(lambda: ab.put_object(Bucket=s3.bucket, Key="ab/datasets/x", Body=b"of ab"))
        yield Two(bucket=s3.bucket, a=a, ab=ab, admin=admin)
        a.close()
        ab.close()
        for name in ("a", "ab"):
            admin.delete_tenant(name)


def until(action: Callable[[], Any], *, timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return action()
        except ClientError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_no_verb_reaches_another_tenants_objects(two: Two, s3: S3Address) -> None:
    bucket, own = two.bucket, two.a
    theirs: dict[str, Any] = {"Bucket": bucket, "Key": "ab/datasets/x"}
    upload = two.ab.create_multipart_upload(Bucket=bucket, Key="ab/datasets/large")["UploadId"]
    part = {"Bucket": bucket, "Key": "ab/datasets/large", "UploadId": upload}
    grant = {"TagSet": [{"Key": "k", "Value": "v"}]}
    attempts: dict[str, Callable[[], Any]] = {
        "get": lambda: own.get_object(**theirs),
        "get range": lambda: own.get_object(**theirs, Range="bytes=0-0"),
        "head": lambda: own.head_object(**theirs),
        "attributes": lambda: own.get_object_attributes(**theirs, ObjectAttributes=["ETag"]),
        "put": lambda: own.put_object(**theirs, Body=b"stolen"),
        "put new": lambda: own.put_object(Bucket=bucket, Key="ab/new", Body=b"stolen"),
        "put platform": lambda: own.put_object(Bucket=bucket, Key="platform/x", Body=b""),
        "put own record": lambda: own.put_object(
            Bucket=bucket, Key="a/workloads/r/outcome.json", Body=b"{}"
        ),
        "put own checkpoint": lambda: own.put_object(
            Bucket=bucket, Key="a/policies/p/checkpoints/r/0000000001/manifest.json", Body=b"{}"
        ),
        "put root": lambda: own.put_object(Bucket=bucket, Key="x", Body=b""),
        "put tenant's name": lambda: own.put_object(Bucket=bucket, Key="a", Body=b""),
        "put beside": lambda: own.put_object(Bucket=bucket, Key="a-x/y", Body=b""),
        "delete": lambda: own.delete_object(**theirs),
        "list": lambda: own.list_objects_v2(Bucket=bucket, Prefix="ab/"),
        "list all": lambda: own.list_objects_v2(Bucket=bucket),
        "list name": lambda: own.list_objects_v2(Bucket=bucket, Prefix="a"),
        "list v1": lambda: own.list_objects(Bucket=bucket, Prefix="ab/"),
        "list versions": lambda: own.list_object_versions(Bucket=bucket, Prefix="ab/"),
        "copy out": lambda: own.copy_object(
            Bucket=bucket, Key="a/datasets/copy", CopySource=f"{bucket}/ab/datasets/x"
        ),
        "copy in": lambda: own.copy_object(**theirs, CopySource=f"{bucket}/a/datasets/x"),
        "multipart": lambda: own.create_multipart_upload(Bucket=bucket, Key="ab/y"),
        "part": lambda: own.upload_part(**part, PartNumber=1, Body=b"stolen"),
        "parts": lambda: own.list_parts(**part),
        "abort": lambda: own.abort_multipart_upload(**part),
        "acl": lambda: own.get_object_acl(**theirs),
        "put acl": lambda: own.put_object_acl(**theirs, ACL="public-read"),
        "tags": lambda: own.get_object_tagging(**theirs),
        "put tags": lambda: own.put_object_tagging(**theirs, Tagging=grant),
        "bucket policy": lambda: own.get_bucket_policy(Bucket=bucket),
        "put policy": lambda: own.put_bucket_policy(Bucket=bucket, Policy="{}"),
        "bucket acl": lambda: own.put_bucket_acl(Bucket=bucket, ACL="public-read-write"),
        "delete bucket": lambda: own.delete_bucket(Bucket=bucket),
        "create bucket": lambda: own.create_bucket(Bucket="stolen"),
    }
    got_through = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except ClientError as error:
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] >= 400, name
        else:
            got_through.append(name)
    assert got_through == []
    answer = own.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "ab/datasets/x"}]})
    assert "Deleted" not in answer or answer.get("Errors")
    assert two.ab.get_object(**theirs)["Body"].read() == b"of ab"
    with s3.objects() as everything:
        assert [info.key for info in everything.list("a")] == ["a/datasets/x", "ab/datasets/x"]


def test_rotation_and_revocation_within_a_second(
    control_redis_url: str, payload_redis_url: str, s3: S3Address
) -> None:
    admin = s3.admin()
    ledger = Ledger.connect(control_redis_url)
    payload = redis.Redis.from_url(payload_redis_url)
    with contextlib.ExitStack() as stack:
        stack.callback(ledger.close)
        stack.callback(payload.close)
        stack.enter_context(contextlib.closing(admin))
        objects = stack.enter_context(
            s3.objects()
        )  # fmt: skip
        servers = TenantServers(
            client=ledger.client, objects=objects, iam=admin, payload_clients=(payload,),
            redis_url=control_redis_url, s3_endpoint=s3.endpoint, bucket=s3.bucket,
            payload_urls=(payload_redis_url,),
        )  # fmt: skip
        old = add_tenant(servers, "a")
        inside = [stack.enter_context(_redis(old, url)) for url in (None, payload_redis_url)]
        for one in inside:
            one.ping()
        old_s3 = s3_as(s3, _keys(old))
        until(lambda: old_s3.put_object(Bucket=s3.bucket, Key="a/datasets/x", Body=b""))
        started = time.monotonic()
        new = rotate_tenant(servers, "a")
        for one in inside:
            with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
                one.ping()
        _until_refused(lambda: old_s3.get_object(Bucket=s3.bucket, Key="a/datasets/x"))
        assert time.monotonic() - started < 1.0
        renewed = stack.enter_context(_redis(new, None))
        assert renewed.ping()
        new_s3 = s3_as(s3, _keys(new))
        until(lambda: new_s3.get_object(Bucket=s3.bucket, Key="a/datasets/x"))
        started = time.monotonic()
        remove_tenant(servers, "a")
        with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
            renewed.ping()
        _until_refused(lambda: new_s3.get_object(Bucket=s3.bucket, Key="a/datasets/x"))
        assert time.monotonic() - started < 1.0
        old_s3.close()
        new_s3.close()


def test_a_removal_that_was_cut_short_stays_and_is_done_by_the_next(
    control_redis_url: str, payload_redis_url: str, s3: S3Address
) -> None:
    with contextlib.ExitStack() as stack:
        ledger = Ledger.connect(control_redis_url)
        stack.callback(ledger.close)
        payload = stack.enter_context(redis.Redis.from_url(payload_redis_url))
        down = stack.enter_context(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)))
        servers = TenantServers(
            client=ledger.client, objects=MemoryObjectStore(),
            iam=stack.enter_context(contextlib.closing(s3.admin())), payload_clients=(payload,),
            redis_url=control_redis_url, s3_endpoint=s3.endpoint, bucket=s3.bucket,
        )  # fmt: skip
        url = add_tenant(servers, "a")
        with pytest.raises(redis.ConnectionError):
            remove_tenant(replace(servers, payload_clients=(down,)), "a")
        assert restore_acls(ledger.client, servers.objects) == []
        renewed = stack.enter_context(_redis(url, None))
        with pytest.raises(redis.AuthenticationError):
            renewed.ping()
        assert list_tenants(servers.objects) == []
        with pytest.raises(TenantError, match="no tenant"):
            rotate_tenant(servers, "a")
        with pytest.raises(TenantError, match="`vla tenants remove a` first"):
            add_tenant(servers, "a")
        remove_tenant(servers, "a")
        assert b"a" not in payload.smembers(TENANTS_KEY)
        with pytest.raises(TenantError, match="no tenant"):
            remove_tenant(servers, "a")
        add_tenant(servers, "a")
        remove_tenant(servers, "a")


def _redis(url: str, at: str | None) -> redis.Redis:
    parts = urlsplit(url)
    place = urlsplit(at) if at else parts
    return redis.Redis(
        host=place.hostname or "", port=place.port or 0, username=parts.username,
        password=parts.password, socket_timeout=5, retry=Retry(NoBackoff(), 0),
    )  # fmt: skip


def _keys(url: str) -> tuple[str, str]:
    query = parse_qs(urlsplit(url).query)
    return query["access_key"][0], query["secret_key"][0]


def _until_refused(action: Callable[[], Any], *, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            action()
        except ClientError:
            return
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_servers_own_user_does_not_become_a_tenant(
    control_redis_url: str, payload_redis_url: str, s3: S3Address
) -> None:
    """A worker's user, on whichever server: its password and rights stay what they were."""
    with (
        redis.Redis.from_url(control_redis_url, decode_responses=True) as client,
        redis.Redis.from_url(payload_redis_url) as payload,
        s3.objects() as objects,
        contextlib.closing(s3.admin()) as iam,
    ):
        payload.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~*", "+@all")
        before = payload.execute_command("ACL", "GETUSER", "worker")
        servers = TenantServers(
            client=client, objects=objects, iam=iam, payload_clients=(payload,),
            redis_url=control_redis_url, s3_endpoint=s3.endpoint, bucket=s3.bucket,
        )  # fmt: skip
        try:
            with pytest.raises(TenantError, match="user of the Redis server already"):
                add_tenant(servers, "worker")
            assert payload.execute_command("ACL", "GETUSER", "worker") == before
            assert list(objects.list("platform/tenants/")) == []
        finally:
            payload.execute_command("ACL", "DELUSER", "worker")
