"""When to close a batch and what is in it: pure policy, told the time by its caller.

Requests wait in lanes: those of one lane may share a forward. A lane is due when it holds
`max_samples`, when its oldest request has waited `max_wait_s` with the device free, or at once when
nobody else is expected: every answer that left lately and may come back as the sender's next
request within the waiting time has come back ("quorum"). So a lone client never waits, a closed
loop of many fills its batch, and clients that think for longer than `max_wait_s` hold nobody up.

The wait counts from the first moment at which the request was here and the device was free: the
time of the batch before is not the policy's to save, and counting it would split a closed loop
into two halves that never meet. It counts once: of the due lanes the one with the oldest request
goes first, so a request waits for another lane's batch, never for its queue.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_THINK_WEIGHT = 0.2  # of the newest think time in the running mean
_LATE_FACTOR = 2.0  # an answer this many think times old is not waited for
_LATE_SLACK_S = 0.002
_MAX_ANSWERS = 1024  # remembered per sender and lane


class Batchable(Protocol):
    """What the policy has to know of a request. Times are of the caller's clock, in seconds."""

    @property
    def lane(self) -> str: ...

    @property
    def sender(self) -> str: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def deadline(self) -> float: ...


R = TypeVar("R", bound=Batchable)


@dataclass(frozen=True)
class Part(Generic[R]):
    """Samples `start` up to `stop` of a request: all of it, unless it is larger than a batch."""

    request: R
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_samples


@dataclass(frozen=True)
class Batch(Generic[R]):
    lane: str
    parts: tuple[Part[R], ...]
    waited_s: float  # of its oldest request

    @property
    def num_samples(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


@dataclass
class _Waiting(Generic[R]):
    request: R
    arrived: float
    ready: float  # from when the wait counts; infinite while the device is busy
    started: int = 0  # samples that an earlier batch has taken


class _Answers:
    """Answers to one sender in one lane that may come back as its next request."""

    def __init__(self) -> None:
        self.given: deque[float] = deque(maxlen=_MAX_ANSWERS)
        self.think_s = 0.0

    def came_back(self, now: float) -> None:
        if self.given:
            think = max(0.0, now - self.given.popleft())
            self.think_s += _THINK_WEIGHT * (think - self.think_s)

    def wait_until(self, now: float, limit: float) -> float:
        """When to stop waiting for them; `now` or less where none is expected before `limit`."""
        patience = _LATE_FACTOR * self.think_s + _LATE_SLACK_S
        while self.given and self.given[0] + 10 * patience + 1.0 < now:
            self.given.popleft()
        last = max((at for at in self.given if at + self.think_s <= limit), default=None)
        return now if last is None else last + patience


class GroupBatching(Generic[R]):
    """The requests that wait. Not thread-safe.

    `quorum=False` waits for `max_wait_s` or a full batch always.
    """

    def __init__(self, *, max_samples: int, max_wait_s: float, quorum: bool = True) -> None:
        if max_samples < 1 or max_wait_s < 0:
            raise ValueError("a batch has at least one sample and a wait is not negative")
        self.max_samples = max_samples
        self.max_wait_s = max_wait_s
        self.quorum = quorum
        self._lanes: dict[str, deque[_Waiting[R]]] = {}
        self._answers: dict[str, dict[str, _Answers]] = {}  # lane, sender
        self.is_busy = False  # a batch was taken and is not finished
        self.num_samples = 0

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def offer(self, request: R, now: float) -> None:
        """Queue a request behind those that came before."""
        ready = math.inf if self.is_busy else now
        self._lanes.setdefault(request.lane, deque()).append(_Waiting(request, now, ready))
        self.num_samples += request.num_samples
        answers = self._answers.get(request.lane, {}).get(request.sender)
        if answers is not None:
            answers.came_back(now)

    def finished(self, now: float) -> None:
        """The device is free again: the batch that was taken is through."""
        self.is_busy = False
        for lane in self._lanes.values():
            for item in lane:
                item.ready = min(item.ready, now)

    def answered(self, request: R, now: float) -> None:
        """The sender has its answer: it may come back."""
        senders = self._answers.setdefault(request.lane, {})
        if len(senders) >= _MAX_ANSWERS and request.sender not in senders:
            senders.pop(next(iter(senders)))
        senders.setdefault(request.sender, _Answers()).given.append(now)

    def due(self, now: float) -> float | None:
        """When `take` should next be called: `now` or before for at once; None: nothing waits."""
        times = [self._lane_due(name, lane, now) for name, lane in self._lanes.items()]
        times += [item.request.deadline for lane in self._lanes.values() for item in lane]
        return min(times, default=None)

    def take(self, now: float) -> Batch[R] | None:
        """The next batch, or None where no lane is due. Call `expire` first."""
        due = {
            name: lane[0].arrived
            for name, lane in self._lanes.items()
            if self._lane_due(name, lane, now) <= now
        }
        return self._form(min(due, key=due.__getitem__), now) if due else None

    def flush(self, now: float) -> Batch[R] | None:
        """The next batch, due or not: for an orderly stop."""
        heads = {name: lane[0].arrived for name, lane in self._lanes.items()}
        return self._form(min(heads, key=heads.__getitem__), now) if heads else None

    def expire(self, now: float) -> list[R]:
        """Take out what nobody waits for any more, before it costs a forward."""
        late: list[R] = []
        for name in list(self._lanes):
            kept: deque[_Waiting[R]] = deque()
            for item in self._lanes[name]:
                if item.request.deadline <= now:
                    late.append(item.request)
                    self.num_samples -= item.request.num_samples - item.started
                else:
                    kept.append(item)
            self._replace(name, kept)
        return late

    def _form(self, name: str, now: float) -> Batch[R]:
        lane = self._lanes[name]
        arrived, room = lane[0].arrived, self.max_samples
        parts: list[Part[R]] = []
        while lane and room:
            item = lane[0]
            left = item.request.num_samples - item.started
            # Only a request that no batch can hold is cut.
            if left > room and (parts or left <= self.max_samples):
                break
            count = min(left, room)
            parts.append(Part(item.request, item.started, item.started + count))
            item.started += count
            room -= count
            if item.started == item.request.num_samples:
                lane.popleft()
        self._replace(name, lane)
        self.is_busy = True
        batch = Batch(name, tuple(parts), now - arrived)
        self.num_samples -= batch.num_samples
        return batch

    def _replace(self, name: str, lane: deque[_Waiting[R]]) -> None:
        if lane:
            self._lanes[name] = lane
        else:
            del self._lanes[name]

    def _lane_due(self, name: str, lane: deque[_Waiting[R]], now: float) -> float:
        head = lane[0]
        if head.started or self._is_full(lane):
            return head.arrived
        limit = head.ready + self.max_wait_s
        if not self.quorum:
            return limit
        senders = self._answers.get(name, {}).values()
        waits = max((answers.wait_until(now, limit) for answers in senders), default=now)
        return min(limit, waits)

    def _is_full(self, lane: deque[_Waiting[R]]) -> bool:
        count = 0
        for item in lane:
            count += item.request.num_samples - item.started
            if count >= self.max_samples:
                return True
        return False
