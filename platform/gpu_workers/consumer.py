"""The inference consumer: from a channel's frames to answered requests, by group batching.

Four threads: one fetches, reads pixels and prepares; one runs batches on the device; one replies;
one watches. So the next batch is collected while the device works. What was taken from the channel
is acknowledged when it is answered: a worker that dies leaves it for another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from vla_platform.errors import (
    PlatformError,
    PoisonError,
    QueueFullError,
    RequestError,
    UnsoundWorkerError,
)
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.group_batching import Batch, GroupBatching, Part
from vla_platform.gpu_workers.inference import Engine, Outcome, RunCost, RunPart
from vla_platform.gpu_workers.items import (
    Answered,
    BatchReport,
    Item,
    Observer,
    OpenDelivery,
    Refused,
    ToSend,
    answer_to,
    deadline_passed,
    joined,
)
from vla_platform.inference.arena import ArenaReader
from vla_platform.inference.channel.base import Delivery, Reply, RequestChannel
from vla_platform.inference.protocol import (
    Answer,
    Prediction,
    PredictRequest,
    RequestFrame,
    pack_answers,
    request_id_of,
    unpack_requests,
)
from vla_storage.errors import CodedError

MAX_DELIVERIES = 3
"""A request whose third delivery did not end either is set aside: it ends its workers."""
MAX_LOADING = 256
"""Requests of one tenant that may wait for modules: they hold pixels and are not in a batch yet."""
BACKLOG = 4  # batches that a worker takes from the channel ahead
FETCH_S = 0.1
RETRY_S = 0.2
WATCH_S = 0.25

_log = logging.getLogger(__name__)


class InferenceConsumer:
    """One per worker and base model. `on_hang` ends a process whose forward does not end."""

    def __init__(
        self,
        channel: RequestChannel,
        engine: Engine,
        batching: GroupBatching[Item],
        *,
        turns: DeviceTurns | None = None,
        observers: Sequence[Observer] = (),
        arenas: ArenaReader | None = None,
        watchdog_s: float = 60.0,
        renew_s: float = 1.0,
        on_hang: Callable[[], None] = lambda: os._exit(os.EX_SOFTWARE),
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._batching = batching
        self._turns = turns or DeviceTurns()
        self._observers = list(observers)
        self._watchdog_s = watchdog_s
        self._renew_s = renew_s
        self._on_hang = on_hang
        self._arenas = arenas or ArenaReader()
        self._changed = threading.Condition()  # guards the batching policy and what is open
        self._open: dict[Any, OpenDelivery] = {}
        self._items: dict[tuple[str, str], Item] = {}
        self._loading: dict[str, int] = defaultdict(int)  # requests that wait for a module
        self._replies: queue.SimpleQueue[ToSend | None] = queue.SimpleQueue()
        self._stopping = threading.Event()  # take nothing new
        self._halted = threading.Event()  # give up what cannot be sent
        self._busy_since: float | None = None
        self._num_batches = 0
        self._threads = {
            name: threading.Thread(
                target=self._guarded, args=(run,), name=f"infer-{name}", daemon=True
            )
            for name, run in (
                ("fetch", self._fetch_loop),
                ("device", self._device_loop),
                ("reply", self._reply_loop),
                ("watch", self._watch_loop),
            )
        }

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def stop(self, *, grace_s: float = 20.0) -> None:
        """Warm shutdown: take nothing new, finish what waits, hand back what cannot be."""
        end = time.monotonic() + grace_s
        self._stopping.set()
        self._threads["fetch"].join(max(0.1, end - time.monotonic()))
        with self._changed:
            self._changed.notify_all()
        self._threads["device"].join(max(0.1, end - time.monotonic()))
        self._replies.put(None)
        self._threads["reply"].join(max(0.1, end - time.monotonic()))
        self._halted.set()
        with self._changed:
            left = [one.delivery for one in self._open.values()]
            self._open.clear()
        if left:
            with contextlib.suppress(CodedError):
                self._channel.hand_back(left)
        self._threads["watch"].join(2 * WATCH_S)
        self._arenas.close()
        self._channel.close()

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a batch in this worker."""
        return self._batching.num_samples

    def _guarded(self, run: Callable[[], None]) -> None:
        """A worker that lost one of its threads would look alive and answer nobody: it ends."""
        try:
            run()
        except Exception:
            _log.critical("action=inference_thread_died", exc_info=True)
            self._on_hang()

    # --- fetching ---

    def _fetch_loop(self) -> None:
        most = self._batching.max_samples
        looked = time.monotonic()
        was_down = False
        while not self._stopping.is_set():
            with self._changed:
                if self._batching.num_samples >= BACKLOG * most:
                    self._changed.wait(FETCH_S)
                    continue
            try:
                deliveries = self._channel.receive(max_entries=most, timeout_s=FETCH_S)
            except CodedError as error:
                if not was_down:  # once per outage
                    _log.warning("action=receive_failed reason=%s", error)
                was_down = True
                self._stopping.wait(RETRY_S)
                continue
            was_down = False
            for delivery in deliveries:
                self._take(delivery)
            if time.monotonic() - looked > 5.0:
                looked = time.monotonic()
                self._arenas.forget_closed()

    def _take(self, delivery: Delivery) -> None:
        with self._changed:
            if delivery.tag in self._open:
                return  # claimed from ourselves: it is being worked on
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
        with self._changed:
            self._open[delivery.tag] = opened
        if not frame.requests:
            self._acknowledge(opened)
        items = [self._item(opened, frame, raw, now) for raw in frame.requests]
        self._offer([item for item in items if item is not None and self._prepare(item)])

    def _item(
        self, opened: OpenDelivery, frame: RequestFrame, raw: dict[str, Any], now: float
    ) -> Item | None:
        """A request with its pixels; None where it has its answer already."""
        try:
            request = PredictRequest.from_dict(raw)
        except RequestError as error:
            self._replies.put((Refused(opened, request_id_of(raw), error), None))
            return None
        deadline = now + request.timeout_s - opened.delivery.age_s
        item = Item(opened, request, deadline, alone=opened.delivery.attempts > 1)
        with self._changed:
            is_second = item.key in self._items
            if is_second:  # sent again while the first is at work: that one's answer will do
                opened.num_left -= 1
            else:
                self._items[item.key] = item
        if is_second:
            if opened.num_left == 0:
                self._acknowledge(opened)
            return None
        if deadline <= now:
            self._answer([(item, deadline_passed(item))])
            return None
        try:
            item.pixels = self._pixels(frame, request)
        except CodedError as error:
            self._answer([(item, error)])
            return None
        return item

    def _pixels(self, frame: RequestFrame, request: PredictRequest) -> Any:
        first, generation = request.place
        if generation >= 0:
            if frame.arena is None:
                raise RequestError("a request points into an arena that its frame does not name")
            return self._arenas.read(frame.arena, first, generation, request.size_bytes)
        if not 0 <= first <= len(frame.body) - request.size_bytes:
            raise RequestError("a request points outside its frame")
        return np.frombuffer(frame.body, np.uint8, request.size_bytes, first)

    def _prepare(self, item: Item) -> bool:
        """Whether the request may be queued now; else it is answered, or waits for its module."""
        try:
            found = self._engine.prepare(item.tenant, item.sender, item.request, item.pixels)
        except CodedError as error:
            self._answer([(item, error)])
            return False
        except Exception as error:
            _log.exception("action=prepare_failed request=%s", item.request.request_id)
            self._answer([(item, PlatformError(f"the request could not be prepared: {error}"))])
            return False
        if isinstance(found, Future):
            self._wait_for_module(item, found)
            return False
        item.prepared = found
        item.lane = f"alone {item.request.request_id}" if item.alone else found.lane
        return True

    def _wait_for_module(self, item: Item, loading: Future[Any]) -> None:
        with self._changed:
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
        with self._changed:
            self._loading[item.tenant] -= 1
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            if self._prepare(item):
                self._offer([item])
        elif isinstance(error, CodedError):
            self._answer([(item, error)])
        else:
            self._answer([(item, PlatformError(f"the module could not be loaded: {error!r:.200}"))])

    def _offer(self, items: list[Item]) -> None:
        if items:
            with self._changed:
                now = time.monotonic()
                for item in items:
                    self._batching.offer(item, now)
                self._changed.notify_all()

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

    # --- running ---

    def _device_loop(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            try:
                self._run(batch)
            except UnsoundWorkerError as error:
                _log.critical("action=%s reason=%s", error.code, error)
                self._on_hang()
                return

    def _next_batch(self) -> Batch[Item] | None:
        """Waits for a batch to be due; None when stopped and nothing is left."""
        with self._changed:
            while True:
                now = time.monotonic()
                late = self._batching.expire(now)
                if late:
                    self._answer([(item, deadline_passed(item)) for item in late])
                if self._stopping.is_set() and not self._threads["fetch"].is_alive():
                    return self._batching.flush(now)
                batch = self._batching.take(now)
                if batch is not None:
                    return batch
                due = self._batching.due(now)
                self._changed.wait(FETCH_S if due is None else min(FETCH_S, max(0.0, due - now)))

    def _run(self, batch: Batch[Item]) -> None:
        self._num_batches += 1
        with self._turns.inference():
            self._busy_since = time.monotonic()
            outcomes, cost = self._outcomes(batch.parts)
            self._busy_since = None
        answered: list[Answered] = []
        for part, outcome in zip(batch.parts, outcomes, strict=True):
            whole = self._whole(part, outcome)
            if whole is not None:
                answered.append((part.request, whole))
        with self._changed:
            now = time.monotonic()
            self._batching.finished(now)
            for item, _ in answered:
                self._batching.answered(item, now)
            self._changed.notify_all()  # there is room for more
            nobody_waits = not self._batching.num_samples
        if nobody_waits and answered:
            self._reply(answered)  # the device has nothing to do that handing over would save
            answered = []
        self._replies.put((answered, self._report(batch, outcomes, cost)))

    def _outcomes(self, parts: Sequence[Part[Item]]) -> tuple[list[Outcome], RunCost]:
        """All at once; where that fails, one by one, so that one bad request fails alone."""
        runs = [RunPart(part.request.prepared, part.start, part.stop) for part in parts]
        try:
            return self._engine.run(runs)
        except UnsoundWorkerError:
            raise
        except (CodedError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            if len(parts) == 1:
                _log.exception("action=request_failed")
                failed = (
                    error
                    if isinstance(error, CodedError)
                    else PlatformError(f"the forward of this request failed: {error}")
                )
                return [failed], RunCost()
            _log.warning("action=batch_failed size=%d reason=%r", len(parts), error)
        outcomes: list[Outcome] = []
        total = RunCost()
        for part in parts:
            self._busy_since = time.monotonic()
            one, cost = self._outcomes([part])
            outcomes += one
            total.forward_s += cost.forward_s
            total.decode_s += cost.decode_s
            total.num_forwards += cost.num_forwards
            for tenant, tokens in cost.tokens.items():
                total.tokens[tenant] = total.tokens.get(tenant, 0) + tokens
        return outcomes, total

    def _whole(self, part: Part[Item], outcome: Outcome) -> Outcome | None:
        """The answer to the part's request once it is complete."""
        item = part.request
        if item.is_answered:
            return None  # a part of it failed or expired before
        if isinstance(outcome, Prediction):
            item.parts.append(outcome)
            if not part.is_last:
                return None
        item.is_answered = True
        return joined(item.parts) if isinstance(outcome, Prediction) else outcome

    def _report(self, batch: Batch[Item], outcomes: list[Outcome], cost: RunCost) -> BatchReport:
        requests: dict[str, int] = defaultdict(int)
        samples: dict[str, int] = defaultdict(int)
        for part in batch.parts:
            requests[part.request.tenant] += 1
            samples[part.request.tenant] += part.stop - part.start
        return BatchReport(
            batch_id=self._num_batches,
            requests=requests,
            samples=samples,
            tokens=cost.tokens,
            waited_s=batch.waited_s,
            forward_s=cost.forward_s,
            decode_s=cost.decode_s,
            num_forwards=cost.num_forwards,
            num_waiting=self._batching.num_samples,
            num_failed=sum(isinstance(outcome, CodedError) for outcome in outcomes),
        )

    # --- replying ---

    def _answer(self, answered: list[Answered]) -> None:
        for item, _ in answered:
            item.is_answered = True
        self._replies.put((answered, None))

    def _acknowledge(self, opened: OpenDelivery) -> None:
        """There is nothing to say about this delivery, or no more."""
        with contextlib.suppress(CodedError):
            self._channel.settle([], [opened.delivery])
        with self._changed:
            self._open.pop(opened.delivery.tag, None)

    def _reply_loop(self) -> None:
        while True:
            first = self._replies.get()
            if first is None:
                return
            answered, report = first
            if isinstance(answered, Refused):
                self._refuse(answered)
            elif answered:
                self._reply(answered)
            if report is not None:
                for observe in self._observers:
                    try:
                        observe(report)
                    except Exception:
                        _log.exception("action=observer_failed")

    def _reply(self, answered: list[Answered]) -> None:
        by_client: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        done: list[Delivery] = []
        with self._changed:
            for item, outcome in answered:
                by_client[item.tenant, item.sender].append(answer_to(item, outcome))
                if self._items.get(item.key) is item:
                    del self._items[item.key]
                item.opened.num_left -= 1
                if item.opened.num_left == 0:
                    done.append(item.opened.delivery)
        for item, _ in answered:
            if item.prepared is not None:
                self._engine.release(item.prepared)
            if item.request.place[1] >= 0 and item.pixels is not None:
                self._arenas.give_back(item.pixels)
        replies = [
            Reply(tenant=tenant, client=client, frame=pack_answers(answers))
            for (tenant, client), answers in by_client.items()
        ]
        self._settle(replies, done)
        with self._changed:
            for delivery in done:
                self._open.pop(delivery.tag, None)

    def _refuse(self, refused: Refused) -> None:
        opened = refused.opened
        answer = Answer(request_id=refused.request_id, error=refused.error.to_dict())
        tenant = opened.delivery.tenant
        with self._changed:
            opened.num_left -= 1
            done = [opened.delivery] if opened.num_left == 0 else []
        reply = Reply(tenant=tenant, client=opened.client, frame=pack_answers([answer]))
        self._settle([reply], done)
        with self._changed:
            for delivery in done:
                self._open.pop(delivery.tag, None)

    def _settle(self, replies: list[Reply], done: list[Delivery]) -> None:
        """A broker that is down for a while gets the answers late; for longer, not at all: clients
        have sent again by then, and what was not acknowledged is worked on again."""
        end = time.monotonic() + 10.0
        while True:
            try:
                self._channel.settle(replies, done)
                return
            except CodedError as error:
                _log.warning("action=reply_failed reason=%s", error)
                if time.monotonic() > end or self._halted.wait(RETRY_S):
                    return

    # --- watching ---

    def _watch_loop(self) -> None:
        renewed = time.monotonic()
        while not self._halted.wait(WATCH_S):
            now = time.monotonic()
            busy = self._busy_since
            if busy is not None and now - busy > self._watchdog_s:
                _log.critical("action=forward_hangs seconds=%.0f", now - busy)
                self._on_hang()
                return
            if now - renewed < self._renew_s:
                continue
            renewed = now
            with self._changed:
                old = [o.delivery for o in self._open.values() if now - o.since > self._renew_s]
            if old:
                with contextlib.suppress(CodedError):
                    self._channel.renew(old)
