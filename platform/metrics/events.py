"""The one emitter of metric events.

An event goes to the stream of its workload, which the tenant may read, and to the platform's own
stream, which the collector drains to S3 and Prometheus. Emitting never fails a training step: what
a control Redis does not take for a minute is lost, and counted nowhere.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

PLATFORM_STREAM = "vla:metrics"
MAX_EVENTS = 100_000
OUTAGE_S = 60.0
"""How long events wait for a control Redis that does not answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One metric event of one workload."""

    tenant: str
    workload: str
    kind: str  # step | update | heldout | rollout | checkpoint | inference | ...
    values: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)  # seconds since the epoch
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # so that sent twice is counted once
    version: int = 1


def stream_of(tenant: str, workload: str) -> str:
    return f"vla:t:{tenant}:w:{workload}:events"


class Emitter:
    """Sends events from a background thread, off the training path."""

    def __init__(self, client: Any, *, most_waiting: int = 10_000) -> None:
        self._redis = client
        self._waiting: queue.Queue[Event | None] = queue.Queue(most_waiting)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Returns at once. A full queue drops the event: metrics never hold up training."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            _log.warning("action=metric_dropped workload=%s", event.workload)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what waits, then stop; a Redis that does not answer is not waited for."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < 256 and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            events = [event for event in batch if event is not None]
            end = time.monotonic() + OUTAGE_S
            while True:
                try:
                    self._send(events)
                    break
                except (redis.ConnectionError, redis.TimeoutError) as error:
                    # Some may have arrived: the collector knows them by their ids.
                    if time.monotonic() > end or self._closing.is_set():
                        _log.warning("action=metrics_lost count=%d reason=%s", len(events), error)
                        break
                    self._closing.wait(0.5)
                except redis.RedisError as error:
                    _log.warning("action=metrics_lost count=%d reason=%s", len(events), error)
                    break
            if None in batch:
                return

    def _send(self, events: list[Event]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for event in events:
                text = json.dumps({"kind": event.kind, "at": event.at, **event.values})
                stream = stream_of(event.tenant, event.workload)
                pipe.xadd(stream, {"event": text}, maxlen=MAX_EVENTS, approximate=True)
                whole = {"event": json.dumps(asdict(event))}
                pipe.xadd(PLATFORM_STREAM, whole, maxlen=MAX_EVENTS, approximate=True)
            pipe.execute()
