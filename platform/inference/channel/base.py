"""The way between clients and inference workers: frames there, frames back.

A channel knows no request: it moves opaque frames, tells whose they are, and counts deliveries. It
delivers at least once; a delivery that was not settled comes again, to this worker or another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One frame of requests on a worker's side."""

    tenant: str  # who wrote it, as the broker vouches for it
    frame: bytes = field(repr=False)
    tag: Any  # the channel's own name of it
    attempts: int = 1  # deliveries so far, this one included
    age_s: float = 0.0  # time since it was sent


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One frame of answers to one client of one tenant."""

    tenant: str
    client: str
    frame: bytes = field(repr=False)


class RequestChannel(ABC):
    """A worker's end. `receive` belongs to one thread; the others are thread-safe.

    Every method may raise `UnavailableError`: the broker does not answer now.
    """

    @abstractmethod
    def receive(self, *, max_entries: int, timeout_s: float) -> list[Delivery]:
        """What has come, at most about `max_entries`; waits up to `timeout_s` for the first."""

    @abstractmethod
    def settle(self, replies: Sequence[Reply], done: Sequence[Delivery]) -> None:
        """Send replies and acknowledge what they answer, in one go."""

    @abstractmethod
    def renew(self, deliveries: Sequence[Delivery]) -> None:
        """These are still being worked on: nobody else shall get them."""

    @abstractmethod
    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """These will not be worked on: another worker shall get them at once."""

    @abstractmethod
    def bury(self, delivery: Delivery, reason: str) -> None:
        """Acknowledge without an effect and keep a note for the operator."""

    def depth(self) -> int:
        """Entries that wait or are being worked on, of all tenants."""
        return 0

    def close(self) -> None:
        """Release connections."""
        return None


class RequestSender(ABC):
    """A client's end. `receive` belongs to one thread, `send` to another."""

    @abstractmethod
    def send(self, tenant: str, base_model: str, frame: bytes) -> None:
        """Hand a frame over. Raises `QueueFullError` where too many of the tenant's entries wait,
        `AccessError` where the broker refuses the tenant, `UnavailableError` where it does not
        answer; or leaves that to `confirm`."""

    def confirm(self) -> None:
        """Wait until the broker has the last frame that was handed over; raises as `send` does."""
        return None

    @abstractmethod
    def receive(self, *, timeout_s: float) -> list[bytes]:
        """Frames of answers; waits up to `timeout_s`. Raises `UnavailableError`."""

    def close(self) -> None:
        """Release connections."""
        return None
