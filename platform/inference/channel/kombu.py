"""The channel for AMQP brokers, over kombu: one queue per tenant and base model.

Several times slower than Redis Streams, for messages come and are acknowledged one by one. The
broker's permissions have to let each tenant write its own queues only, as its ACL does in Redis.
What a worker took and did not settle comes again when its connection ends. Brokers that count
deliveries (RabbitMQ's quorum queues) let a poisoned request be set aside; elsewhere one that comes
again runs alone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from vla_platform.errors import UnavailableError
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel, RequestSender
from vla_platform.inference.protocol import dead_letters_of

ANONYMOUS = Exchange("", type="direct")
BINARY = {"content_type": "application/data", "content_encoding": "binary"}
PREFETCH = 64
REPLY_EXPIRES_S = 60.0
LOOK_EVERY_S = 0.5


def request_queue(base_model: str, tenant: str) -> Queue:
    name = f"infer.{base_model}.{tenant}"
    return Queue(name, exchange=ANONYMOUS, routing_key=name, durable=True)


def reply_queue(client: str) -> Queue:
    name = f"infer.reply.{client}"
    return Queue(
        name,
        exchange=ANONYMOUS,
        routing_key=name,
        durable=False,
        auto_delete=False,
        expires=REPLY_EXPIRES_S,
    )


class KombuChannel(RequestChannel):
    """All of kombu happens under one lock: its connections belong to one thread at a time."""

    def __init__(
        self,
        connection: Connection,
        base_model: str,
        *,
        tenants: Callable[[], Iterable[str]],
        prefetch: int = PREFETCH,
    ) -> None:
        """`prefetch`, messages taken ahead, has to be no less than a batch (PF-13)."""
        self._prefetch = prefetch
        self._connection = connection
        self._base = base_model
        self._tenants = tenants
        self._lock = threading.RLock()
        self._consumer: Any = None
        self._producer: Any = None
        self._queues: dict[str, str] = {}  # name to tenant
        self._taken: deque[Delivery] = deque()
        self._looked = float("-inf")

    def receive(self, *, max_entries: int, timeout_s: float) -> list[Delivery]:
        end = time.monotonic() + timeout_s
        while True:
            with self._lock, self._answers():
                self._look_for_tenants()
                with contextlib.suppress(TimeoutError, socket.timeout):
                    while len(self._taken) < max_entries:
                        self._connection.drain_events(timeout=0.005)
                if self._taken or time.monotonic() >= end:
                    count = min(len(self._taken), max_entries)
                    return [self._taken.popleft() for _ in range(count)]
            time.sleep(0.001)  # let the replying thread have the lock

    def settle(self, replies: Sequence[Reply], done: Sequence[Delivery]) -> None:
        with self._lock, self._answers():
            for reply in replies:
                queue = reply_queue(reply.client)
                self._publish(reply.frame, queue)
            for one in done:
                one.tag.ack()

    def renew(self, deliveries: Sequence[Delivery]) -> None:
        return None  # the broker keeps them for as long as the connection lives

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock, self._answers():
            for one in deliveries:
                one.tag.requeue()

    def bury(self, delivery: Delivery, reason: str) -> None:
        name = dead_letters_of(self._base)
        queue = Queue(name, exchange=ANONYMOUS, routing_key=name, max_length=1000)
        note = f"{delivery.tenant}: {reason}"[:2000].encode()
        with self._lock, self._answers():
            self._publish(note, queue)
            delivery.tag.ack()

    def depth(self) -> int:
        return len(self._taken)

    def close(self) -> None:
        with self._lock, contextlib.suppress(UnavailableError), self._answers():
            if self._consumer is not None:
                self._consumer.cancel()
            for one in self._taken:
                one.tag.requeue()
            self._connection.release()

    def _publish(self, body: bytes, queue: Queue) -> None:
        if self._producer is None:
            self._producer = Producer(self._connection.channel())
        self._producer.publish(
            body, routing_key=queue.routing_key, declare=[queue], delivery_mode=1, **BINARY
        )

    def _look_for_tenants(self) -> None:
        now = time.monotonic()
        if self._consumer is not None and now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        if self._consumer is None:
            channel = self._connection.channel()
            self._consumer = Consumer(channel, on_message=self._take, prefetch_count=self._prefetch)
            self._queues.clear()
        try:
            names = set(self._tenants())
        except UnavailableError:
            return
        for tenant in sorted(names):
            queue = request_queue(self._base, tenant)
            if queue.name not in self._queues:
                self._queues[queue.name] = tenant
                self._consumer.add_queue(queue)
        if self._queues:
            self._consumer.consume()

    def _take(self, message: Any) -> None:
        name = message.delivery_info["routing_key"]
        body = message.body
        self._taken.append(
            Delivery(
                tenant=self._queues[name],
                frame=body if isinstance(body, bytes) else bytes(body),
                tag=message,
                attempts=_attempts(message),
            )
        )

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except (OperationalError, OSError, *self._connection.connection_errors) as error:
            self._consumer = self._producer = None
            self._taken.clear()
            with contextlib.suppress(OSError):
                self._connection.close()
            raise UnavailableError(f"the broker does not answer: {error}") from error


def _attempts(message: Any) -> int:
    counted = (message.headers or {}).get("x-delivery-count")
    if isinstance(counted, int):
        return 1 + counted
    return 2 if message.delivery_info.get("redelivered") else 1


class KombuSender(RequestSender):
    """Two connections: one for each thread."""

    def __init__(self, connection: Connection, client: str) -> None:
        self._sending = connection
        self._receiving = connection.clone()
        self._client = client
        self._producer: Any = None
        self._consumer: Any = None
        self._frames: list[bytes] = []

    def send(self, tenant: str, base_model: str, frame: bytes) -> None:
        queue = request_queue(base_model, tenant)
        try:
            if self._producer is None:
                self._producer = Producer(self._sending.channel())
            self._producer.publish(
                frame, routing_key=queue.routing_key, declare=[queue], delivery_mode=1, **BINARY
            )
        except (OperationalError, OSError, *self._sending.connection_errors) as error:
            self._producer = None
            self._sending.close()
            raise UnavailableError(f"the broker does not answer: {error}") from error

    def receive(self, *, timeout_s: float) -> list[bytes]:
        try:
            if self._consumer is None:
                channel = self._receiving.channel()
                self._consumer = Consumer(
                    channel, [reply_queue(self._client)], on_message=self._take, no_ack=True
                )
                self._consumer.consume()
            with contextlib.suppress(TimeoutError, socket.timeout):
                self._receiving.drain_events(timeout=timeout_s)
        except (OperationalError, OSError, *self._receiving.connection_errors) as error:
            self._consumer = None
            self._receiving.close()
            raise UnavailableError(f"the broker does not answer: {error}") from error
        found, self._frames = self._frames, []
        return found

    def close(self) -> None:
        self._sending.release()
        self._receiving.release()

    def _take(self, message: Any) -> None:
        body = message.body
        self._frames.append(body if isinstance(body, bytes) else bytes(body))
