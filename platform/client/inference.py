"""The way to actions: one proxy per environment host, shared by all its sessions and tenants.

One thread sends, one receives; requests that wait together travel together. A call is thread-safe
and asyncio-safe, and ends by its timeout whatever happens. It is safe to send again: an answer
depends on the request alone, and the second one to arrive is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import operator
import queue
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self

from vla_platform.client.observations import Bytes, SessionFrames, bytes_of
from vla_platform.envs.base import Observation
from vla_platform.errors import (
    DataError,
    DeadlineError,
    HistoryLostError,
    ModuleLoadError,
    NotFoundError,
    PixelsLostError,
    PixelsUnreachableError,
    UnavailableError,
    to_error,
)
from vla_platform.inference.arena import Arena, Arenas
from vla_platform.inference.channel.base import RequestSender
from vla_platform.inference.channel.redis_streams import RedisStreamsSender, open_client
from vla_platform.inference.frames import pack_requests, unpack_answers
from vla_platform.inference.protocol import (
    MAX_TIMEOUT_S,
    Answer,
    Prediction,
    PredictRequest,
)
from vla_storage.closing import Closing
from vla_storage.errors import CodedError

DEFAULT_TIMEOUT_S = 30.0
RESEND_S = 2.0  # an answer that takes longer is asked for again
RETRY_S = 0.2  # after the broker did not take a frame
POLL_S = 0.1
MAX_TOGETHER = 16  # requests of one frame: the worker reads the first while the next are written
OPTIONS = (
    "version", "signature", "sample", "seed", "return_values", "return_log_probs",
    "return_features", "session", "step", "history",
)  # fmt: skip
INLINE_S = 60.0  # how long a worker on another host is remembered

_log = logging.getLogger(__name__)
BaseModelOf = Callable[[str, str], str]
"""Base model of `(tenant, policy)`. Raises `NotFoundError`."""


@dataclass(eq=False)
class _Call:
    """One request on its way. `parts` are the observation's bytes, for sending again."""

    tenant: str
    base_model: str
    request: PredictRequest
    parts: list[Bytes]
    deadline: float
    resolve: Callable[[Prediction | Exception], None]
    loop: asyncio.AbstractEventLoop | None
    window: list[Bytes] | None = None  # all frames of a session, for a worker that lost them
    sent: float = field(default=float("inf"))
    tries: int = 0
    slot: tuple[Arena, int, int] | None = None  # with its generation
    problem: Exception | None = None


class InferenceProxy(Closing):
    """`sender(client_id)` opens the channel; `base_model_of` finds a policy's stream.

    `shared_memory=False` sends all pixels through the broker.
    """

    def __init__(
        self,
        sender: Callable[[str], RequestSender],
        base_model_of: BaseModelOf,
        *,
        shared_memory: bool = True,
    ) -> None:
        self.client_id = uuid.uuid4().hex
        self._sender = sender(self.client_id)
        self._base_model_of = base_model_of
        self._base_models: dict[tuple[str, str], str] = {}
        self._arenas = Arenas(enabled=shared_memory)
        self._inline_until: dict[tuple[str, str], float] = {}
        self._calls: dict[str, _Call] = {}
        self._unconfirmed: list[_Call] = []  # of the frame that was handed over last
        self._sessions = SessionFrames()
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"infer-{name}", daemon=True)
            for name, run in (("send", self._send_loop), ("receive", self._receive_loop))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def connect(
        cls, payload_url: str, base_model_of: BaseModelOf, *, shared_memory: bool = True
    ) -> Self:
        """Over Redis Streams, with the credentials in the URL: a tenant's own, or the platform's,
        which reach all tenants (`Ledger.base_model_of` then is the directory)."""
        return cls(
            lambda client_id: RedisStreamsSender(open_client(payload_url), client_id),
            base_model_of,
            shared_memory=shared_memory,
        )

    def predict(
        self,
        observations: Observation | Sequence[Observation],
        *,
        tenant: str,
        policy: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Prediction:
        """Action chunks for one observation or several, Shape: (B, H, A), in the data's units.

        options: `version` (a policy version, a checkpoint id, or None for the current one),
        `signature` (refuse a policy of another schema), `sample` and `seed` (draw from the policy;
        equal seeds draw equally), `return_values`, `return_log_probs`, `return_features`,
        `session`, `step` and `history` (policies that look back: the proxy ships new frames only).

        Raises `NotFoundError` (no such tenant, policy or version), `DataError` (the observation
        does not fit the policy), `UnsupportedError`, `DeadlineError`, `QueueFullError`,
        `UnavailableError`. The arrays must not change before the answer is there.
        """
        answer = self.submit(
            observations, tenant=tenant, policy=policy, timeout_s=timeout_s, **options
        )
        return answer.result(timeout_s + 5.0)

    def submit(
        self,
        observations: Observation | Sequence[Observation],
        *,
        tenant: str,
        policy: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Future[Prediction]:
        """The same, as a future."""
        future: Future[Prediction] = Future()
        future.set_running_or_notify_cancel()

        def resolve(outcome: Prediction | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._start(observations, tenant, policy, timeout_s, options, resolve, None)
        return future

    async def predict_async(
        self,
        observations: Observation | Sequence[Observation],
        *,
        tenant: str,
        policy: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Prediction:
        """The same for asyncio. A cancelled call's answer is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Prediction] = loop.create_future()

        def resolve(outcome: Prediction | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if (tenant, policy) not in self._base_models:
            await loop.run_in_executor(None, self._base_model, tenant, policy)
        self._start(observations, tenant, policy, timeout_s, options, resolve, loop)
        return await future

    def close(self) -> None:
        """End all calls with `UnavailableError`."""
        if self._closed:
            return
        self._closed = True
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(5)
        gone = UnavailableError("the inference proxy was closed")
        self._finish([(call, gone) for call in list(self._calls.values())])
        self._sender.close()
        self._arenas.close()

    def _start(
        self,
        observations: Observation | Sequence[Observation],
        tenant: str,
        policy: str,
        timeout_s: float,
        options: Mapping[str, Any],
        resolve: Callable[[Prediction | Exception], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        if self._closed:
            raise UnavailableError("the inference proxy is closed")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise DataError(
                f"a timeout is above 0 and at most {MAX_TIMEOUT_S:g} s, not {timeout_s}",
                column="timeout_s",
            )
        if unknown := options.keys() - OPTIONS:
            raise DataError(
                f"predict has no option {', '.join(sorted(unknown))}; it has {', '.join(OPTIONS)}",
                column=min(unknown),
            )
        rows = [observations] if isinstance(observations, Observation) else list(observations)
        shape, parts = bytes_of(rows)
        options = dict(options)
        session, step = options.pop("session", None), options.pop("step", None)
        history = options.pop("history", 1)
        window = None
        if session is not None:
            parts, window, options["session"] = self._sessions.step(
                (tenant, session), step, history, parts
            )
        base_model = self._base_model(tenant, policy)
        request = PredictRequest(
            request_id=f"{self.client_id[:12]}-{next(self._numbers)}",
            policy=policy,
            version=_whole(options.pop("version", None), "version", or_text=True),
            seed=_whole(options.pop("seed", None), "seed"),
            tasks=tuple(row.task for row in rows),
            row=shape,
            timeout_s=timeout_s,
            place=(0, -1),
            **options,
        )
        end = time.monotonic() + timeout_s
        call = _Call(tenant, base_model, request, parts, end, resolve, loop, window)
        with self._lock:
            self._calls[request.request_id] = call
        self._waiting.put(call)

    def _base_model(self, tenant: str, policy: str) -> str:
        key = (tenant, policy)
        if key not in self._base_models:
            self._base_models[key] = self._base_model_of(tenant, policy)
        return self._base_models[key]

    # --- sending ---

    def _send_loop(self) -> None:
        while True:
            first = self._waiting.get()
            if first is None:
                return
            calls = [first]
            with contextlib.suppress(queue.Empty):
                while len(calls) < MAX_TOGETHER:
                    more = self._waiting.get_nowait()
                    if more is None:
                        self._waiting.put(None)
                        break
                    calls.append(more)
            try:
                self._send([call for call in calls if call.request.request_id in self._calls])
            except Exception as error:
                _log.exception("action=send_failed")
                self._finish([(call, error) for call in calls])
            if self._waiting.empty():
                self._confirm()

    def _send(self, calls: list[_Call]) -> None:
        """One frame per tenant, base model and arena; what was sent before goes alone."""
        frames: dict[tuple[Any, ...], list[_Call]] = defaultdict(list)
        for call in calls:
            self._place(call)
            if call.request.request_id not in self._calls:  # given up meanwhile
                self._free(call)
                continue
            arena = None if call.slot is None else call.slot[0].name
            alone = call.request.request_id if call.tries else ""
            frames[call.tenant, call.base_model, arena, alone].append(call)
        for (tenant, base_model, arena, _), members in frames.items():
            self._send_frame(tenant, base_model, arena, members)

    def _send_frame(
        self, tenant: str, base_model: str, arena: str | None, calls: list[_Call]
    ) -> None:
        now, at = time.monotonic(), 0
        requests, body = [], []
        for call in calls:
            left = max(0.001, call.deadline - now)
            if call.slot is None:
                place = (at, -1)
                at += sum(part.size for part in call.parts)
                body += [part.data for part in call.parts]
            else:
                place = call.slot[1:]
            wire = call.request.to_dict()
            wire["place"], wire["timeout_s"] = place, round(left, 3)
            requests.append(wire)
            call.tries += 1
            call.sent = now
        frame = pack_requests(self.client_id, arena, requests, body)
        self._confirm()
        self._unconfirmed = calls
        try:
            self._sender.send(tenant, base_model, frame)
        except CodedError as error:
            self._not_sent(error)

    def _confirm(self) -> None:
        """Hear what became of the frame before; by now its answer has come."""
        try:
            self._sender.confirm()
        except CodedError as error:
            self._not_sent(error)
        self._unconfirmed = []

    def _not_sent(self, error: CodedError) -> None:
        calls, self._unconfirmed = self._unconfirmed, []
        if not isinstance(error, UnavailableError):
            self._finish([(call, error) for call in calls])
            return
        for call in calls:
            call.problem = error
            call.sent = time.monotonic() - RESEND_S + RETRY_S

    def _place(self, call: _Call) -> None:
        """Put the bytes into shared memory where that can be; a second try finds them there."""
        inline = self._inline_until.get((call.tenant, call.base_model), 0.0) > time.monotonic()
        if call.slot is not None and not inline:
            return
        self._free(call)
        if not inline:
            call.slot = self._arenas.put(call.parts)

    def _free(self, call: _Call) -> None:
        with self._lock:
            slot, call.slot = call.slot, None
        if slot is not None:
            slot[0].give_back(slot[1])

    # --- receiving ---

    def _receive_loop(self) -> None:
        was_down = False
        while not self._closed:
            try:
                frames = self._sender.receive(timeout_s=POLL_S)
                answers = [answer for frame in frames for answer in unpack_answers(frame)]
            except CodedError as error:  # no broker, or a worker of another release
                was_down = True
                for call in list(self._calls.values()):
                    call.problem = error
                time.sleep(POLL_S)
                answers = []
            else:
                if was_down:
                    was_down = False
                    self._resend(older_than_s=RETRY_S)
            if answers:
                self._take(answers)
            self._expire()
            self._resend(older_than_s=RESEND_S)

    def _take(self, answers: list[Answer]) -> None:
        outcomes: list[tuple[_Call, Prediction | Exception]] = []
        for answer in answers:
            call = self._calls.get(answer.request_id)
            if call is None:
                continue  # the second answer, or given up
            if answer.prediction is not None:
                outcomes.append((call, answer.prediction))
                continue
            error = to_error(answer.error or {})
            if isinstance(error, NotFoundError | ModuleLoadError):
                # The policy may be served by another base model since.
                self._base_models.pop((call.tenant, call.request.policy), None)
            if isinstance(error, PixelsLostError):
                self._free(call)  # an earlier try's slot went to another call: this one goes again
                self._waiting.put(call)
            elif isinstance(error, PixelsUnreachableError) and call.slot is not None:
                until = time.monotonic() + INLINE_S
                self._inline_until[call.tenant, call.base_model] = until
                self._waiting.put(call)
            elif isinstance(error, HistoryLostError) and call.window is not None:
                self._ship_window(call)
            else:
                outcomes.append((call, error))
        self._finish(outcomes)

    def _ship_window(self, call: _Call) -> None:
        assert call.window is not None and call.request.session is not None
        session = replace(call.request.session, num_frames=len(call.window), is_whole=True)
        call.request = replace(call.request, session=session)
        call.parts, call.window = call.window, None
        self._free(call)
        self._waiting.put(call)

    def _expire(self) -> None:
        now = time.monotonic()
        late: list[tuple[_Call, Prediction | Exception]] = []
        for call in list(self._calls.values()):
            if call.deadline <= now:
                error = call.problem or DeadlineError(
                    f"no answer within {call.request.timeout_s:g} s; "
                    "is an inference worker of this base model running? Retrying is safe",
                    request_id=call.request.request_id,
                    base_model=call.base_model,
                )
                late.append((call, error))
        self._finish(late)

    def _resend(self, *, older_than_s: float) -> None:
        before = time.monotonic() - older_than_s
        for call in list(self._calls.values()):
            if call.sent < before:
                call.sent = float("inf")
                self._waiting.put(call)

    def _finish(self, outcomes: Sequence[tuple[_Call, Prediction | Exception]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Any]]] = defaultdict(list)
        with self._lock:
            ended = [
                (call, outcome)
                for call, outcome in outcomes
                if self._calls.pop(call.request.request_id, None) is not None
            ]
        for call, outcome in ended:
            self._free(call)
            if call.loop is None:
                call.resolve(outcome)
            else:
                by_loop[call.loop].append((call, outcome))
        for loop, members in by_loop.items():
            # One wake-up of the loop for all answers that came together.
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve_all, members)


def _whole(value: Any, name: str, *, or_text: bool = False) -> Any:
    """Numbers as numpy has them too."""
    if value is None or (or_text and isinstance(value, str)):
        return value
    try:
        return operator.index(value)
    except TypeError as error:
        raise DataError(f"{name} cannot be {value!r:.80}", column=name) from error


def _resolve_all(members: list[tuple[_Call, Prediction | Exception]]) -> None:
    for call, outcome in members:
        call.resolve(outcome)
