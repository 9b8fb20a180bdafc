"""Answers on their way back: one frame per client, and the acknowledgement of what they answer.

A thread of its own sends them, so that the device goes on with its next batch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from vla_platform.gpu_workers.items import (
    Answered,
    BatchReport,
    Observer,
    OpenDelivery,
    answer_to,
)
from vla_platform.gpu_workers.open_requests import OpenRequests
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel
from vla_platform.inference.frames import pack_answers
from vla_platform.inference.protocol import (
    Answer,
)
from vla_storage.errors import CodedError

RETRY_S = 0.2
GIVE_UP_S = 10.0
"""Of a broker that is down: by then clients have sent again, and what was not acknowledged is
worked on again."""

_log = logging.getLogger(__name__)


class Replies:
    """`release(prepared)` tells the engine that a request has its answer."""

    def __init__(
        self,
        channel: RequestChannel,
        requests: OpenRequests,
        *,
        release: Callable[[Any], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        self._channel = channel
        self._requests = requests
        self._release = release
        self._observers = list(observers)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._halted = threading.Event()

    def run(self) -> None:
        """Until `end`: what this class's own thread does."""
        while (send := self._waiting.get()) is not None:
            send()

    def end(self) -> None:
        """`run` returns once everything is sent."""
        self._waiting.put(None)

    def halt(self) -> None:
        """Give up what cannot be sent."""
        self._halted.set()

    def put(self, answered: list[Answered]) -> None:
        """Send these from the own thread."""
        for item, _ in answered:
            item.is_answered = True
        self._waiting.put(lambda: self.send(answered))

    def refuse(self, opened: OpenDelivery, request_id: str, error: CodedError) -> None:
        """Something in a delivery that is no request."""
        answer = Answer(request_id=request_id, error=error.to_dict())
        frame = pack_answers([answer])
        reply = Reply(tenant=opened.delivery.tenant, client=opened.client, frame=frame)
        self._waiting.put(lambda: self._settle([reply], self._requests.needs_no_answer(opened)))

    def report(self, batch: BatchReport) -> None:
        """Tell the observers, behind what waits to be sent."""
        self._waiting.put(lambda: self._observe(batch))

    def send(self, answered: list[Answered]) -> None:
        """At once, from the thread that calls."""
        if not answered:
            return
        by_client: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        for item, outcome in answered:
            by_client[item.tenant, item.sender].append(answer_to(item, outcome))
        done = self._requests.answered(item for item, _ in answered)
        for item, _ in answered:
            if item.prepared is not None:
                self._release(item.prepared)
        replies = [
            Reply(tenant=tenant, client=client, frame=pack_answers(answers))
            for (tenant, client), answers in by_client.items()
        ]
        self._settle(replies, done)

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """There is nothing to say about these, or no more."""
        if deliveries:
            with contextlib.suppress(CodedError):
                self._channel.settle([], deliveries)
            self._requests.settled(deliveries)

    def _settle(self, replies: list[Reply], done: list[Delivery]) -> None:
        """A broker that is down for a while gets the answers late; for longer, not at all."""
        end = time.monotonic() + GIVE_UP_S
        while True:
            try:
                self._channel.settle(replies, done)
                break
            except CodedError as error:
                _log.warning("action=reply_failed reason=%s", error)
                if time.monotonic() > end or self._halted.wait(RETRY_S):
                    break
        self._requests.settled(done)

    def _observe(self, batch: BatchReport) -> None:
        for observe in self._observers:
            try:
                observe(batch)
            except Exception:
                _log.exception("action=observer_failed")
