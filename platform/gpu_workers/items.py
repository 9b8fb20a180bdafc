"""What the inference consumer knows of a request from its arrival to its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_platform.errors import DeadlineError
from vla_platform.gpu_workers.inference import Outcome
from vla_platform.inference.arena import SlotBytes
from vla_platform.inference.channel.base import Delivery
from vla_platform.inference.protocol import ARRAYS, Answer, Prediction, PredictRequest


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One batch, for metrics. Times in seconds; requests, samples and tokens by tenant."""

    batch_id: int
    requests: dict[str, int]
    samples: dict[str, int]
    tokens: dict[str, int]
    waited_s: float  # of the oldest request, in this worker
    forward_s: float
    decode_s: float
    num_forwards: int
    num_waiting: int  # samples left in this worker
    num_failed: int


Observer = Callable[[BatchReport], None]


@dataclass(eq=False)
class OpenDelivery:
    """A delivery that is not settled yet."""

    delivery: Delivery
    client: str
    since: float
    num_left: int


@dataclass(eq=False)
class Item:
    """A request in this worker: what the batching policy sees of it, and where its answer goes."""

    opened: OpenDelivery
    request: PredictRequest
    deadline: float
    alone: bool  # delivered before: it might be what ended a worker
    pixels: SlotBytes | None = None  # until it is prepared
    lane: str = ""
    prepared: Any = None
    parts: list[Prediction] = field(default_factory=list)
    is_answered: bool = False

    @property
    def tenant(self) -> str:
        return self.opened.delivery.tenant

    @property
    def sender(self) -> str:
        return self.opened.client

    @property
    def num_samples(self) -> int:
        return self.request.num_rows

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.request.request_id


Answered = tuple[Item, Outcome]


def deadline_passed(item: Item) -> DeadlineError:
    return DeadlineError(
        f"the deadline passed before a batch had room; the timeout is {item.request.timeout_s:g} s",
        request_id=item.request.request_id,
    )


def joined(parts: list[Prediction]) -> Prediction:
    if len(parts) == 1:
        return parts[0]
    keys = [part.features_key for part in parts if part.features_key is not None]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ARRAYS
        if getattr(parts[0], name) is not None
    }
    return replace(parts[0], features_key=",".join(keys) or None, **arrays)


def answer_to(item: Item, outcome: Outcome) -> Answer:
    if isinstance(outcome, Prediction):
        return Answer(request_id=item.request.request_id, prediction=outcome)
    return Answer(request_id=item.request.request_id, error=outcome.to_dict())
