"""From a channel's delivery to requests that may join a batch: pixels read, modules in memory.

What cannot get so far has its answer here. A delivery that cannot be read, or that has ended its
workers, is set aside.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from vla_platform.errors import PlatformError, PoisonError, QueueFullError, RequestError
from vla_platform.gpu_workers.inference import Engine
from vla_platform.gpu_workers.items import Item, OpenDelivery, deadline_passed
from vla_platform.gpu_workers.open_requests import OpenRequests
from vla_platform.gpu_workers.replies import Replies
from vla_platform.inference.arena import ArenaReader, SlotBytes
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel
from vla_platform.inference.frames import (
    RequestFrame,
    pack_answers,
    unpack_requests,
)
from vla_platform.inference.protocol import (
    Answer,
    PredictRequest,
    request_id_of,
)
from vla_storage.errors import CodedError

MAX_DELIVERIES = 3
"""A request whose third delivery did not end either is set aside: it ends its workers."""
MAX_LOADING = 256
"""Requests of one tenant that may wait for modules: they hold pixels and are not in a batch yet."""

_log = logging.getLogger(__name__)


class Intake:
    """`take` belongs to one thread. `offer` gets what may be queued, from that thread or from one
    that has loaded a module."""

    def __init__(
        self,
        channel: RequestChannel,
        engine: Engine,
        requests: OpenRequests,
        replies: Replies,
        *,
        arenas: ArenaReader,
        offer: Callable[[list[Item]], None],
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._requests = requests
        self._replies = replies
        self._offer = offer
        self._arenas = arenas
        self._lock = threading.Lock()
        self._loading: Counter[str] = Counter()  # requests that wait for a module, by tenant

    def take(self, delivery: Delivery) -> None:
        """Whatever is wrong with a delivery ends that one only."""
        if self._requests.holds(delivery):
            return
        try:
            self._take(delivery)
        except Exception as error:
            _log.exception("action=delivery_failed tenant=%s", delivery.tenant)
            self._requests.forget(delivery)
            self._bury(delivery, f"it could not be taken: {error!r:.200}")

    def _take(self, delivery: Delivery) -> None:
        try:
            frame = unpack_requests(delivery.frame)
        except CodedError as error:
            self._bury(delivery, str(error))
            return
        if delivery.attempts > MAX_DELIVERIES:
            self._refuse_poison(delivery, frame)
            return
        now = time.monotonic()
        opened = OpenDelivery(delivery, frame.client, now, len(frame.requests))
        self._requests.open(opened)
        if not frame.requests:
            self._replies.acknowledge([delivery])
        items = [self._item(opened, frame, raw, now) for raw in frame.requests]
        ready = [item for item in items if item is not None and self._prepare(item)]
        if ready:
            self._offer(ready)

    def _item(
        self, opened: OpenDelivery, frame: RequestFrame, raw: dict[str, Any], now: float
    ) -> Item | None:
        """A request with its pixels; None where it has its answer already."""
        try:
            request = PredictRequest.from_dict(raw)
        except RequestError as error:
            self._replies.refuse(opened, request_id_of(raw), error)
            return None
        deadline = now + request.timeout_s - opened.delivery.age_s
        item = Item(opened, request, deadline, alone=opened.delivery.attempts > 1)
        if not self._requests.add(item):
            self._replies.acknowledge(self._requests.needs_no_answer(opened))
            return None
        if deadline <= now:
            self._replies.put([(item, deadline_passed(item))])
            return None
        try:
            item.pixels = self._pixels(frame, request)
        except CodedError as error:
            self._replies.put([(item, error)])
            return None
        return item

    def _pixels(self, frame: RequestFrame, request: PredictRequest) -> SlotBytes:
        first, generation = request.place
        if generation >= 0:
            if frame.arena is None:
                raise RequestError("a request points into an arena that its frame does not name")
            # A session's frames stay: they must not change, whoever gives up what.
            get = self._arenas.read if request.session is not None else self._arenas.view
            return get(frame.arena, first, generation, request.size_bytes)
        if not 0 <= first <= len(frame.body) - request.size_bytes:
            raise RequestError("a request points outside its frame")
        return SlotBytes(np.frombuffer(frame.body, np.uint8, request.size_bytes, first))

    def _prepare(self, item: Item) -> bool:
        """Whether the request may be queued now; else it is answered, or waits for its module."""
        assert item.pixels is not None
        try:
            found = self._prepared(item, item.pixels)
        except CodedError as error:
            self._replies.put([(item, error)])
            return False
        except Exception as error:
            _log.exception("action=prepare_failed request=%s", item.request.request_id)
            told = PlatformError(f"the request could not be prepared: {error}")
            self._replies.put([(item, told)])
            return False
        if isinstance(found, Future):
            self._wait_for_module(item, found)
            return False
        item.pixels = None
        item.lane = f"alone {item.request.request_id}" if item.alone else found.lane
        return True

    def _prepared(self, item: Item, pixels: SlotBytes) -> Any | Future[Any]:
        """What the engine makes of it. Whatever it saw of bytes that changed meanwhile counts for
        nothing: `PixelsLostError` then."""
        try:
            found = self._engine.prepare(item.tenant, item.sender, item.request, pixels.data)
        except Exception:
            pixels.check()
            raise
        if isinstance(found, Future):
            item.pixels = pixels.copied()  # a module may take seconds
        else:
            item.prepared = found
            pixels.check()
        return found

    def _wait_for_module(self, item: Item, loading: Future[Any]) -> None:
        with self._lock:
            self._loading[item.tenant] += 1
            is_too_many = self._loading[item.tenant] > MAX_LOADING
        if is_too_many:
            loading = Future()
            loading.set_exception(
                QueueFullError("too many requests wait for a module to load", tenant=item.tenant)
            )
        loading.add_done_callback(lambda done: self._module_is_in(item, done))

    def _module_is_in(self, item: Item, done: Future[Any]) -> None:
        """Called by a loading thread."""
        with self._lock:
            self._loading[item.tenant] -= 1
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            if self._prepare(item):
                self._offer([item])
            return
        if not isinstance(error, CodedError):
            error = PlatformError(f"the module could not be loaded: {error!r:.200}")
        self._replies.put([(item, error)])

    def _refuse_poison(self, delivery: Delivery, frame: RequestFrame) -> None:
        error = PoisonError(
            f"the request ended {delivery.attempts - 1} workers and is set aside",
            attempts=delivery.attempts - 1,
        )
        ids = [request_id_of(raw) for raw in frame.requests]
        answers = [Answer(request_id=name, error=error.to_dict()) for name in ids]
        _log.error("action=request_poisoned tenant=%s requests=%s", delivery.tenant, ids)
        with contextlib.suppress(CodedError):
            reply = Reply(tenant=delivery.tenant, client=frame.client, frame=pack_answers(answers))
            self._channel.settle([reply], [])
        self._bury(delivery, str(error))

    def _bury(self, delivery: Delivery, reason: str) -> None:
        _log.warning("action=entry_buried tenant=%s reason=%s", delivery.tenant, reason)
        with contextlib.suppress(CodedError):
            self._channel.bury(delivery, reason)
