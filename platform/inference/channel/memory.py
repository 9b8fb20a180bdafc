"""A channel within one process: for tests and for reading how a channel works."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vla_platform.errors import QueueFullError, UnavailableError
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel, RequestSender


@dataclass
class MemoryBroker:
    """What a channel's both ends share. `down` plays an outage."""

    max_entries: int = 1024
    down: bool = False
    entries: dict[str, deque[Delivery]] = field(default_factory=lambda: defaultdict(deque))
    pending: dict[int, tuple[str, float, Delivery]] = field(default_factory=dict)
    replies: dict[str, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    dead: list[tuple[Delivery, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _next: int = 0

    def check(self) -> None:
        if self.down:
            raise UnavailableError("the broker is down")

    def number(self) -> int:
        self._next += 1
        return self._next


class MemoryChannel(RequestChannel):
    def __init__(self, broker: MemoryBroker, base_model: str, *, claim_idle_s: float = 5.0) -> None:
        self._broker = broker
        self._base = base_model
        self._claim_idle_s = claim_idle_s

    def receive(self, *, max_entries: int, timeout_s: float) -> list[Delivery]:
        broker, waiting = self._broker, self._broker.entries[self._base]
        with broker.changed:
            broker.check()
            broker.changed.wait_for(lambda: waiting or self._stuck(), timeout_s)
            found = self._stuck()
            while waiting and len(found) < max_entries:
                found.append(waiting.popleft())
            now = time.monotonic()
            for one in found:
                broker.pending[one.tag[0]] = (self._base, now, one)
            return [replace(one, age_s=now - one.tag[1]) for one in found]

    def settle(self, replies: Sequence[Reply], done: Sequence[Delivery]) -> None:
        with self._broker.changed:
            self._broker.check()
            for reply in replies:
                self._broker.replies[reply.client].append(reply.frame)
            for one in done:
                self._broker.pending.pop(one.tag[0], None)
            self._broker.changed.notify_all()

    def renew(self, deliveries: Sequence[Delivery]) -> None:
        self._touch(deliveries, time.monotonic())

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        self._touch(deliveries, float("-inf"))

    def bury(self, delivery: Delivery, reason: str) -> None:
        self._broker.dead.append((delivery, reason))
        self.settle([], [delivery])

    def depth(self) -> int:
        return len(self._broker.entries[self._base]) + len(self._broker.pending)

    def _stuck(self) -> list[Delivery]:
        before = time.monotonic() - self._claim_idle_s
        return [
            replace(one, attempts=one.attempts + 1)
            for base, at, one in list(self._broker.pending.values())
            if base == self._base and at < before
        ]

    def _touch(self, deliveries: Sequence[Delivery], at: float) -> None:
        with self._broker.changed:
            for one in deliveries:
                if one.tag[0] in self._broker.pending:
                    self._broker.pending[one.tag[0]] = (self._base, at, one)
            self._broker.changed.notify_all()


class MemorySender(RequestSender):
    def __init__(self, broker: MemoryBroker, client: str) -> None:
        self._broker = broker
        self._client = client

    def send(self, tenant: str, base_model: str, frame: bytes) -> None:
        broker = self._broker
        with broker.changed:
            broker.check()
            waiting = broker.entries[base_model]
            if sum(one.tenant == tenant for one in waiting) >= broker.max_entries:
                raise QueueFullError("too many requests wait", tenant=tenant)
            tag: Any = (broker.number(), time.monotonic())
            waiting.append(Delivery(tenant=tenant, frame=frame, tag=tag))
            broker.changed.notify_all()

    def receive(self, *, timeout_s: float) -> list[bytes]:
        with self._broker.changed:
            self._broker.check()
            waiting = self._broker.replies[self._client]
            self._broker.changed.wait_for(lambda: bool(waiting), timeout_s)
            found = list(waiting)
            waiting.clear()
            return found
