"""The real channels: delivery, claims, poison, isolation of tenants, outages of the broker."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from tests.conftest import running
from vla_platform.control.payload_access import apply_payload_access
from vla_platform.control.tenant_records import Tenant
from vla_platform.errors import AccessError, QueueFullError, UnavailableError
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel
from vla_platform.inference.channel.kombu import KombuChannel, KombuSender
from vla_platform.inference.channel.redis_streams import (
    GROUP,
    RedisStreamsChannel,
    RedisStreamsSender,
    open_client,
)
from vla_platform.inference.protocol import dead_letters_of, replies_of, stream_of
from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.servers import redis_ready, redis_server

CLIENT = "a" * 32
pytestmark = pytest.mark.services


@pytest.fixture
def open_channel(payload_redis_url: str) -> Iterator[Callable[..., RedisStreamsChannel]]:
    opened: list[RedisStreamsChannel] = []

    def make(**options: Any) -> RedisStreamsChannel:
        options = {"tenants": lambda: ["acme", "zeta"], "claim_idle_s": 0.2} | options
        opened.append(RedisStreamsChannel(open_client(payload_redis_url), "tiny", **options))
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()


@pytest.fixture
def sender(payload_redis_url: str) -> Iterator[RedisStreamsSender]:
    one = RedisStreamsSender(open_client(payload_redis_url), CLIENT, max_entries=4)
    yield one
    one.close()


def take(channel: RequestChannel, count: int = 1, timeout_s: float = 20.0) -> list[Delivery]:
    found: list[Delivery] = []
    end = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        with contextlib.suppress(UnavailableError):
            found += channel.receive(max_entries=64, timeout_s=0.05)
    return found


def settle(channel: RequestChannel, done: list[Delivery]) -> None:
    """As the consumer does: again, where the connection was gone."""
    for _ in range(20):
        with contextlib.suppress(UnavailableError):
            channel.settle([], done)
            return
    raise AssertionError("the channel does not settle any more")


def test_frames_go_there_and_answers_come_back(open_channel, sender, payload_redis_url: str):
    for number in range(3):
        sender.send("acme", "tiny", b"frame %d" % number)
    sender.confirm()
    channel = open_channel()
    found = take(channel, 3)
    assert [(one.tenant, one.frame) for one in found] == [
        ("acme", b"frame 0"),
        ("acme", b"frame 1"),
        ("acme", b"frame 2"),
    ]
    channel.settle([Reply(tenant="acme", client=CLIENT, frame=b"answer")], found)
    assert sender.receive(timeout_s=5.0) == [b"answer"]
    with redis.Redis.from_url(payload_redis_url) as client:
        assert client.xlen(stream_of("tiny", "acme")) == 0
        assert client.xpending(stream_of("tiny", "acme"), GROUP)["pending"] == 0


def test_what_one_worker_leaves_another_gets_with_the_number_of_its_deliveries(
    open_channel, sender
):
    """F02: a worker dies with what it took; kept alive by `renew`, nobody else gets it."""
    sender.send("acme", "tiny", b"frame")
    sender.confirm()
    first, second = open_channel(), open_channel()
    taken = take(first)
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        first.renew(taken)
        assert second.receive(max_entries=8, timeout_s=0.05) == []
    again = take(second)
    assert (again[0].frame, again[0].attempts) == (b"frame", 2)
    assert again[0].age_s >= 0.8


def test_what_is_handed_back_goes_to_another_at_once(open_channel, sender):
    sender.send("acme", "tiny", b"frame")
    sender.confirm()
    first, second = open_channel(), open_channel(claim_idle_s=600.0)
    first.hand_back(take(first))
    assert [one.frame for one in take(second, timeout_s=5.0)] == [b"frame"]


def test_a_buried_entry_is_gone_and_noted(open_channel, sender, payload_redis_url: str):
    sender.send("acme", "tiny", b"frame")
    sender.confirm()
    channel = open_channel()
    channel.bury(take(channel)[0], "it ended three workers")
    with redis.Redis.from_url(payload_redis_url, decode_responses=True) as client:
        (note,) = client.lrange(dead_letters_of("tiny"), 0, -1)
        assert client.xlen(stream_of("tiny", "acme")) == 0
    assert "three workers" in note and "acme" in note


def test_a_full_stream_refuses_its_tenant_and_no_other(sender):
    for _ in range(4):
        sender.send("acme", "tiny", b"frame")
    sender.confirm()
    with pytest.raises(QueueFullError):
        sender.send("acme", "tiny", b"frame")
    sender.send("zeta", "tiny", b"frame")
    sender.confirm()


def test_a_tenant_writes_its_own_stream_and_reads_its_own_answers_only(
    open_channel, payload_redis_url: str
):
    """B05: the broker's ACL is the identity; `acme` is not `acme-2`, nor the end of `x-acme`."""
    host = payload_redis_url.removeprefix("redis://")
    with redis.Redis.from_url(payload_redis_url) as admin:
        for name in ("acme", "acme-2", "x-acme"):
            digest = hashlib.sha256(f"pw-{name}".encode()).hexdigest()
            apply_payload_access(admin, Tenant(tenant_id=name, password_sha256=digest))
        channel = open_channel(tenants=lambda: ["acme", "acme-2", "x-acme"])
        mine = RedisStreamsSender(open_client(f"redis://acme:pw-acme@{host}"), CLIENT)
        mine.send("acme", "tiny", b"mine")
        mine.confirm()
        (taken,) = take(channel)
        assert taken.tenant == "acme"
        for other in ("acme-2", "x-acme"):
            with pytest.raises(AccessError):
                mine.send(other, "tiny", b"foreign")
                mine.confirm()
        channel.settle([Reply(tenant="acme", client=CLIENT, frame=b"answer")], [taken])
        reader = RedisStreamsSender(open_client(f"redis://acme:pw-acme@{host}"), CLIENT)
        reader.send("acme", "tiny", b"again")
        reader.confirm()
        assert reader.receive(timeout_s=5.0) == [b"answer"]
        raw = open_client(f"redis://acme:pw-acme@{host}")
        for command in (
            ("XRANGE", stream_of("tiny", "acme"), "-", "+"),
            ("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", stream_of("tiny", "acme"), ">"),
            ("XTRIM", stream_of("tiny", "acme"), "MAXLEN", 0),
            ("BLMPOP", 0.1, 1, replies_of("acme-2", CLIENT), "LEFT"),
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("GET", "acme-2:payload:x"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                raw.execute_command(*command)
        for client in (mine, reader):
            client.close()
        raw.close()
        for name in ("acme", "acme-2", "x-acme"):
            admin.execute_command("ACL", "DELUSER", name)


class FlakyBroker:
    """A Valkey of its own that can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(("redis",))["redis"]
        self.url = f"redis://{LOOPBACK}:{self.port}/0"
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        server = redis_server("flaky", self.folder, self.port, persistent=False)
        self._stack.enter_context(running(server, lambda: redis_ready(self.url)))

    def kill(self) -> None:
        self._stack.close()


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[FlakyBroker]:
    broker = FlakyBroker(tmp_path)
    broker.start()
    yield broker
    broker.kill()


def test_a_restarted_broker_is_served_again(flaky: FlakyBroker):
    """F23: streams and groups are gone with it; both ends come back by themselves."""
    channel = RedisStreamsChannel(open_client(flaky.url), "tiny", tenants=lambda: ["acme"])
    sender = RedisStreamsSender(open_client(flaky.url), CLIENT)
    sender.send("acme", "tiny", b"before")
    sender.confirm()
    assert [one.frame for one in take(channel)] == [b"before"]
    flaky.kill()
    with pytest.raises(UnavailableError):
        channel.receive(max_entries=1, timeout_s=0.1)
    with pytest.raises(UnavailableError):
        sender.send("acme", "tiny", b"lost")
        sender.confirm()
    flaky.start()
    sender.send("acme", "tiny", b"after")
    sender.confirm()
    (found,) = take(channel, timeout_s=10.0)
    channel.settle([Reply(tenant="acme", client=CLIENT, frame=b"answer")], [found])
    assert (found.frame, sender.receive(timeout_s=5.0)) == (b"after", [b"answer"])
    channel.close()
    sender.close()


def test_a_sender_whose_broker_is_not_there_yet_sends_once_it_is(flaky: FlakyBroker):
    """What was not sent has no reply to wait for."""
    flaky.kill()
    sender = RedisStreamsSender(open_client(flaky.url), CLIENT)
    with pytest.raises(UnavailableError):
        sender.send("acme", "tiny", b"lost")
    sender.confirm()
    flaky.start()
    sender.send("acme", "tiny", b"kept")
    sender.confirm()
    with redis.Redis.from_url(flaky.url) as admin:
        kept = [fields[b"f"] for _, fields in admin.xrange(stream_of("tiny", "acme"))]
    assert kept == [b"kept"]
    sender.close()


def test_ten_disconnects_in_a_row_leave_nobody_deaf(flaky: FlakyBroker):
    """F24, PF-03, PF-12."""
    channel = RedisStreamsChannel(open_client(flaky.url), "tiny", tenants=lambda: ["acme"])
    sender = RedisStreamsSender(open_client(flaky.url), CLIENT)
    with redis.Redis.from_url(flaky.url) as admin:
        for number in range(10):
            with contextlib.suppress(redis.RedisError):
                admin.client_kill_filter(_type="normal", skipme=True)
            for _ in range(20):
                with contextlib.suppress(UnavailableError):
                    sender.send("acme", "tiny", b"%d" % number)
                    sender.confirm()
                    break
            found = take(channel, timeout_s=10.0)
            assert b"%d" % number == found[-1].frame
            settle(channel, found)
    channel.close()
    sender.close()


def test_a_half_open_connection_is_given_up(flaky: FlakyBroker):
    """A peer that takes bytes and says nothing is an outage within the socket's timeout."""
    silent = socket.create_server((LOOPBACK, 0))
    port = silent.getsockname()[1]
    client = open_client(f"redis://{LOOPBACK}:{port}/0", socket_timeout_s=0.5)
    channel = RedisStreamsChannel(client, "tiny", tenants=lambda: ["acme"])
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        channel.receive(max_entries=1, timeout_s=0.1)
    assert time.monotonic() - began < 10.0
    silent.close()


@pytest.mark.parametrize("transport", ["memory", "redis"])
def test_kombu_carries_the_same(transport: str, payload_redis_url: str):
    url = "memory://" if transport == "memory" else payload_redis_url
    options = {"unacked_restore_interval": 1, "visibility_timeout": 60}
    channel = KombuChannel(
        Connection(url, transport_options=options), "tiny", tenants=lambda: ["acme"]
    )
    sender = KombuSender(Connection(url, transport_options=options), CLIENT)
    pixels = bytes(range(256)) * 4
    for number in range(3):
        sender.send("acme", "tiny", b"%d" % number + pixels)
    found = take(channel, 3)
    assert [("acme", b"%d" % number + pixels) for number in range(3)] == [
        (one.tenant, one.frame) for one in found
    ]
    channel.hand_back(found[2:])
    again = take(channel, 1)
    assert found[2].frame == again[0].frame
    channel.bury(again[0], "why")
    channel.settle([Reply(tenant="acme", client=CLIENT, frame=b"answer")], found[:2])
    end = time.monotonic() + 20
    while not (got := sender.receive(timeout_s=0.2)):
        assert time.monotonic() < end
    assert got == [b"answer"]
    channel.close()
    sender.close()
