"""The default channel: Redis Streams on the payload Redis, one per tenant and base model.

Many entries come with one call, replies and acknowledgements go with one pipeline. An entry that a
worker took and did not settle is claimed by another after `claim_idle_s`. The streams are not
persistent: after a restart of the broker clients send again what was not answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vla_platform.errors import AccessError, QueueFullError, UnavailableError
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel, RequestSender
from vla_platform.inference.protocol import dead_letters_of, replies_of, stream_of

GROUP = "workers"
MAX_ENTRIES = 1024
"""Of one tenant and base model that wait: above, its clients are refused, and what they force in
nevertheless is cut off above four times as many."""
MAX_DEAD_LETTERS = 1000
REPLY_TTL_S = 60
TENANTS_EVERY_S = 0.5
CLAIM_EVERY_S = 1.0
MAX_REPLIES = 64  # frames that a client takes with one call


def open_client(url: str, *, socket_timeout_s: float = 5.0) -> Any:
    """A connection that notices a dead peer: every wait is bounded, nothing is retried silently."""
    keepalive = {}
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            keepalive[getattr(socket, name)] = value
    return redis.Redis.from_url(
        url,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=2.0,
        socket_keepalive=True,
        socket_keepalive_options=keepalive,
        retry=Retry(NoBackoff(), 0),
    )


class RedisStreamsChannel(RequestChannel):
    """`tenants` tells whose streams to read; it is asked again every half second."""

    def __init__(
        self,
        client: Any,
        base_model: str,
        *,
        tenants: Callable[[], Iterable[str]],
        consumer: str | None = None,
        claim_idle_s: float = 3.0,
    ) -> None:
        self._redis = client
        self._base = base_model
        self._tenants = tenants
        self._consumer = consumer or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._claim_idle_ms = int(claim_idle_s * 1000)
        self._streams: dict[str, str] = {}  # stream to tenant
        self._looked = self._claimed = float("-inf")
        self._clock_ms = 0.0  # server time minus monotonic time
        self._dead = threading.Event()
        self._incoming, self._outgoing = _Wire(client), _Wire(client)
        self._settling = threading.Lock()

    def receive(self, *, max_entries: int, timeout_s: float) -> list[Delivery]:
        with _answers():
            now = time.monotonic()
            if now - self._looked >= TENANTS_EVERY_S:
                self._looked = now
                self._look_for_tenants()
            if not self._streams:
                self._dead.wait(min(timeout_s, TENANTS_EVERY_S))
                return []
            if now - self._claimed >= CLAIM_EVERY_S:
                self._claimed = now
                stuck = self._claim(max_entries)
                if stuck:
                    return stuck
            return self._read(max_entries, timeout_s)

    def settle(self, replies: Sequence[Reply], done: Sequence[Delivery]) -> None:
        commands: list[tuple[Any, ...]] = []
        for reply in replies:
            key = replies_of(reply.tenant, reply.client)
            commands += [("RPUSH", key, reply.frame), ("EXPIRE", key, REPLY_TTL_S)]
        for stream, ids in _by_stream(done).items():
            commands += [("XACK", stream, GROUP, *ids), ("XDEL", stream, *ids)]
        if commands:
            with _answers(), self._settling:
                self._outgoing.post(commands)
                self._outgoing.collect()

    def renew(self, deliveries: Sequence[Delivery]) -> None:
        with _answers(), self._redis.pipeline(transaction=False) as pipe:
            for stream, ids in _by_stream(deliveries).items():
                pipe.xclaim(stream, GROUP, self._consumer, 0, ids, justid=True)
            pipe.execute(raise_on_error=False)

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        idle = 3_600_000  # older than any claim waits for
        with _answers(), self._redis.pipeline(transaction=False) as pipe:
            for stream, ids in _by_stream(deliveries).items():
                pipe.xclaim(stream, GROUP, self._consumer, 0, ids, idle=idle, justid=True)
            pipe.execute()

    def bury(self, delivery: Delivery, reason: str) -> None:
        stream, entry = delivery.tag
        note = {"tenant": delivery.tenant, "entry": entry.decode(), "attempts": delivery.attempts}
        key = dead_letters_of(self._base)
        with _answers(), self._redis.pipeline(transaction=False) as pipe:
            pipe.lpush(key, json.dumps({**note, "reason": reason, "at": time.time()}))
            pipe.ltrim(key, 0, MAX_DEAD_LETTERS - 1)
            pipe.xack(stream, GROUP, entry)
            pipe.xdel(stream, entry)
            pipe.execute()

    def depth(self) -> int:
        with _answers(), self._redis.pipeline(transaction=False) as pipe:
            for stream in self._streams:
                pipe.xlen(stream)
            return sum(pipe.execute())

    def close(self) -> None:
        self._dead.set()
        with contextlib.suppress(redis.RedisError):
            for stream in self._streams:
                pending = self._redis.xpending_range(
                    stream, GROUP, "-", "+", 1, consumername=self._consumer
                )
                if not pending:  # deleting it with entries would lose them
                    self._redis.xgroup_delconsumer(stream, GROUP, self._consumer)
        self._incoming.close()
        self._outgoing.close()
        self._redis.close()

    def _look_for_tenants(self) -> None:
        try:
            names = set(self._tenants())
        except UnavailableError:
            return  # the directory is down: go on with those that are known
        seconds, microseconds = self._redis.time()
        self._clock_ms = seconds * 1e3 + microseconds / 1e3 - time.monotonic() * 1e3
        wanted = {stream_of(self._base, name): name for name in sorted(names)}
        for stream in wanted.keys() - self._streams.keys():
            self._open_group(stream)
        self._streams = wanted

    def _open_group(self, stream: str) -> None:
        try:
            self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _read(self, max_entries: int, timeout_s: float) -> list[Delivery]:
        block_ms = max(1, int(timeout_s * 1000))
        asked = ("COUNT", max_entries, "BLOCK", block_ms, "STREAMS", *self._streams)
        after = (">",) * len(self._streams)
        self._incoming.post([("XREADGROUP", "GROUP", GROUP, self._consumer, *asked, *after)])
        try:
            (found,) = self._incoming.collect()
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # The broker came back empty, or somebody deleted a stream.
            for stream in self._streams:
                self._open_group(stream)
            return []
        by_stream = found.items() if isinstance(found, dict) else found or ()  # RESP3, RESP2
        return [
            self._delivery(stream.decode(), entry, fields[1], attempts=1)
            for stream, entries in by_stream
            for entry, fields in entries
        ]

    def _claim(self, max_entries: int) -> list[Delivery]:
        """Entries that somebody took and did not settle; and the cutting of streams that grow."""
        with self._redis.pipeline(transaction=False) as pipe:
            for stream in self._streams:
                pipe.xautoclaim(
                    stream, GROUP, self._consumer, self._claim_idle_ms, count=max_entries
                )
                pipe.xtrim(stream, maxlen=4 * MAX_ENTRIES, approximate=True)
            answers = pipe.execute(raise_on_error=False)
        deliveries = []
        for stream, answer in zip(self._streams, answers[::2], strict=True):
            if isinstance(answer, redis.ResponseError):
                self._open_group(stream)
                continue
            for entry, fields in answer[1]:
                pending = self._redis.xpending_range(stream, GROUP, entry, entry, 1)
                attempts = pending[0]["times_delivered"] if pending else 1
                frame = fields.get(b"f", b"")
                deliveries.append(self._delivery(stream, entry, frame, attempts=attempts))
        return deliveries

    def _delivery(self, stream: str, entry: bytes, frame: bytes, *, attempts: int) -> Delivery:
        age_ms = time.monotonic() * 1e3 + self._clock_ms - int(entry.partition(b"-")[0])
        return Delivery(
            tenant=self._streams[stream],
            frame=frame,
            tag=(stream, entry),
            attempts=attempts,
            age_s=max(0.0, age_ms / 1e3),
        )


class RedisStreamsSender(RequestSender):
    def __init__(self, client: Any, client_id: str, *, max_entries: int = MAX_ENTRIES) -> None:
        self._redis = client
        self._client = client_id
        self._max_entries = max_entries
        self._full: set[str] = set()
        self._tenants: dict[str, None] = {}  # in order of first use
        self._first = threading.Event()
        self._incoming, self._outgoing = _Wire(client), _Wire(client)
        self._sent_to: str | None = None  # whose reply is still to be read

    def send(self, tenant: str, base_model: str, frame: bytes) -> None:
        stream = stream_of(base_model, tenant)
        self._tenants.setdefault(tenant)
        self._first.set()
        with _answers():
            if stream in self._full and self._redis.xlen(stream) >= self._max_entries:
                raise QueueFullError(
                    f"{self._max_entries} requests of {tenant} wait already; "
                    "send fewer at once, or try again later",
                    tenant=tenant,
                    base_model=base_model,
                )
            self.confirm()
            self._outgoing.post([("XADD", stream, "*", "f", frame), ("XLEN", stream)])
        self._sent_to = stream

    def confirm(self) -> None:
        stream, self._sent_to = self._sent_to, None
        if stream is None:
            return
        with _answers():
            _, waiting = self._outgoing.collect()
        # Asking first would cost every request a round trip; so the one after is refused.
        if waiting >= self._max_entries:
            self._full.add(stream)
        else:
            self._full.discard(stream)

    def receive(self, *, timeout_s: float) -> list[bytes]:
        if not self._first.wait(timeout_s):
            return []
        keys = [replies_of(tenant, self._client) for tenant in list(self._tenants)]
        with _answers():
            self._incoming.post(
                [("BLMPOP", timeout_s, len(keys), *keys, "LEFT", "COUNT", MAX_REPLIES)]
            )
            (found,) = self._incoming.collect()
        return list(found[1]) if found else []

    def close(self) -> None:
        self._first.set()
        with contextlib.suppress(redis.RedisError):
            for tenant in self._tenants:
                self._redis.delete(replies_of(tenant, self._client))
        self._incoming.close()
        self._outgoing.close()
        self._redis.close()


class _Wire:
    """A connection of its own for commands that go out now and whose replies are read later:
    meanwhile the caller prepares what comes next. Belongs to one thread."""

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        self._connection: Any = None
        self._num_posted = 0

    def post(self, commands: Sequence[tuple[Any, ...]]) -> None:
        with self._intact():
            if self._connection is None:
                self._connection = self._pool.get_connection()
            self._num_posted = len(commands)
            self._connection.send_packed_command(self._connection.pack_commands(commands))

    def collect(self) -> list[Any]:
        """The replies of what was posted. Raises the first error among them."""
        with self._intact():
            num, self._num_posted = self._num_posted, 0
            replies = []
            for _ in range(num):
                try:
                    replies.append(self._connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
        for reply in replies:
            if isinstance(reply, redis.ResponseError):
                raise reply
        return replies

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None

    @contextlib.contextmanager
    def _intact(self) -> Iterator[None]:
        """A connection with an unread reply would give it to the next caller: it is dropped."""
        try:
            yield
        except BaseException:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.disconnect()
                self._pool.release(connection)
            raise


def _by_stream(deliveries: Iterable[Delivery]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = defaultdict(list)
    for one in deliveries:
        found[one.tag[0]].append(one.tag[1])
    return found


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """Everything that the broker may do wrong, as the platform's own errors."""
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise AccessError(f"the payload Redis refuses: {error}") from error
    except redis.OutOfMemoryError as error:
        raise QueueFullError(f"the payload Redis is full: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise UnavailableError(f"the payload Redis does not answer: {error}") from error
