"""Environments between two uses: what a rollout leaves is there for the next one.

Making a scene of a real simulator costs more than playing an episode in it. Which sessions are kept
and for how long, without knowing what a session is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Parked(Generic[T]):
    key: object
    thing: T
    until: float


class Parking(Generic[T]):
    """Things by key, for `keep_s` seconds each. `now` is monotonic."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._parked: list[_Parked[T]] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._parked)

    def put(self, key: object, thing: T, now: float) -> None:
        self._parked.append(_Parked(key, thing, now + self._keep_s))

    def take(self, key: object) -> T | None:
        """One of this key, the newest, or None."""
        for at in range(len(self._parked) - 1, -1, -1):
            if self._parked[at].key == key:
                return self._parked.pop(at).thing
        return None

    @property
    def things(self) -> list[T]:
        return [one.thing for one in self._parked]

    def oldest(self) -> T | None:
        return self._parked.pop(0).thing if self._parked else None

    def expired(self, now: float) -> list[T]:
        over = [one.thing for one in self._parked if one.until <= now]
        self._parked = [one for one in self._parked if one.until > now]
        return over

    def clear(self) -> list[T]:
        things, self._parked = self.things, []
        return things
