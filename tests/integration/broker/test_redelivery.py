"""What the broker gives to another worker, and when, with the platform's own settings.

Real Valkey and real Celery workers' transport; the visibility timeout is shortened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer

from vla_platform.broker import DELIVERY, queue
from vla_platform.settings import load_settings

pytestmark = pytest.mark.services
WAITS_S = 6
QUEUE = queue("control")


class Worker:
    """A connection that takes messages and acknowledges none of them."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._connection = Connection(
            url, transport="vla_platform.broker:Transport", transport_options=options
        )
        self.got: list[str] = []
        self._consumer = Consumer(
            self._connection, [QUEUE], callbacks=[self._take], accept=["json"]
        )
        self._consumer.qos(prefetch_count=10)
        self._consumer.consume()

    def work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self._connection.drain_events(timeout=0.1)
            except TimeoutError:
                continue

    def send(self, text: str) -> None:
        with self._connection.Producer() as producer:
            producer.publish(text, routing_key=QUEUE.name, serializer="json")

    def _take(self, body: Any, message: Any) -> None:
        self.got.append(body)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def options() -> dict[str, Any]:
    return {**DELIVERY, "visibility_timeout": WAITS_S}


@pytest.fixture
def workers(
    control_redis_url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Worker]]:
    monkeypatch.setenv("VLA_REDIS_URL", control_redis_url)
    monkeypatch.setenv("VLA_PAYLOAD_URL", control_redis_url)
    monkeypatch.setenv("VLA_SIGNING_KEY_FILE", "/nonexistent")
    load_settings.cache_clear()
    found = [Worker(control_redis_url, options) for _ in range(4)]
    yield found
    for one in found:
        one.close()
    load_settings.cache_clear()


def test_fresh_messages_stay_with_whoever_took_them_pf06(workers: list[Worker]) -> None:
    first, *others = workers
    for number in range(5):
        first.send(f"m{number}")
    first.work(0.5)
    taken = sorted(first.got)
    for other in others:  # each looks for what is due as it begins, and every second
        other.work(0.7)
    assert (taken, [other.got for other in others]) == ([f"m{n}" for n in range(5)], [[], [], []])


def test_abandoned_messages_come_back_once_after_the_timeout_pf06(workers: list[Worker]) -> None:
    first, second, third, _ = workers
    first.send("work")
    first.work(0.5)
    taken_at = time.monotonic()
    while not second.got and time.monotonic() < taken_at + WAITS_S + 10:
        second.work(0.2)
    waited_s = time.monotonic() - taken_at
    third.work(1.5)
    assert (second.got, third.got) == (["work"], [])
    assert WAITS_S - 1 <= waited_s <= WAITS_S + 5
