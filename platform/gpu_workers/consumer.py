"""The inference consumer: from a channel's frames to answered requests, by group batching.

Four threads: one fetches and prepares; one runs batches on the device; one replies;
one watches. So the next batch is collected while the device works. What was taken from the channel
is acknowledged when it is answered: a worker that dies leaves it for another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from vla_platform.errors import PlatformError, UnsoundWorkerError
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.group_batching import Batch, GroupBatching, Part
from vla_platform.gpu_workers.inference import Engine, Outcome, RunCost, RunPart
from vla_platform.gpu_workers.intake import Intake
from vla_platform.gpu_workers.items import (
    Answered,
    BatchReport,
    Item,
    Observer,
    deadline_passed,
    joined,
)
from vla_platform.gpu_workers.open_requests import OpenRequests
from vla_platform.gpu_workers.replies import RETRY_S, Replies
from vla_platform.inference.arena import ArenaReader
from vla_platform.inference.channel.base import RequestChannel
from vla_platform.inference.protocol import Prediction
from vla_platform.vital import vital_thread
from vla_storage.errors import CodedError

BACKLOG = 4  # batches that a worker takes from the channel ahead
FETCH_S = 0.1
HEAD_START_S = 0.0003  # waking takes 0.05 to 0.15 ms
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
        self._watchdog_s = watchdog_s
        self._renew_s = renew_s
        self._on_hang = on_hang
        self._changed = threading.Condition()  # guards the batching policy
        self._arenas = arenas or ArenaReader()
        self._requests = OpenRequests()
        self._replies = Replies(
            channel, self._requests, release=engine.release, observers=observers
        )
        self._intake = Intake(
            channel, engine, self._requests, self._replies, arenas=self._arenas, offer=self._offer
        )
        self._stopping = threading.Event()  # take nothing new
        self._halted = threading.Event()  # there is nothing more to watch
        self._busy_since: float | None = None
        self._num_batches = 0
        self._threads = {
            name: vital_thread(run, name=f"infer-{name}", end=self._on_hang)
            for name, run in (
                ("fetch", self._fetch_loop),
                ("device", self._device_loop),
                ("reply", self._replies.run),
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
        self._replies.end()
        self._threads["reply"].join(max(0.1, end - time.monotonic()))
        self._replies.halt()
        self._halted.set()
        left = self._requests.give_up()
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
                self._intake.take(delivery)
            if deliveries:
                self._let_the_device_start()
            if time.monotonic() - looked > 5.0:
                looked = time.monotonic()
                self._arenas.forget_closed()

    def _offer(self, items: list[Item]) -> None:
        with self._changed:
            now = time.monotonic()
            for item in items:
                self._batching.offer(item, now)
            self._changed.notify_all()

    def _let_the_device_start(self) -> None:
        """It wakes to find the interpreter taken, if this thread asks for more at once."""
        with self._changed:
            now = time.monotonic()
            due = self._batching.due(now)
            is_starting = not self._batching.is_busy and due is not None and due <= now
        if is_starting:
            time.sleep(HEAD_START_S)

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
                    self._replies.put([(item, deadline_passed(item)) for item in late])
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
        if nobody_waits:
            self._replies.send(answered)  # handing over would save the device nothing
        else:
            self._replies.put(answered)
        self._replies.report(self._report(batch, outcomes, cost))

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
            old = self._requests.before(now - self._renew_s)
            if old:
                with contextlib.suppress(CodedError):
                    self._channel.renew(old)
