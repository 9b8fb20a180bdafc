"""What an inference worker has taken from its channel and not answered yet. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from vla_platform.gpu_workers.items import Item, OpenDelivery
from vla_platform.inference.channel.base import Delivery


class OpenRequests:
    """A delivery is settled when its last request has its answer; until then it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[Any, OpenDelivery] = {}  # by the channel's tag
        self._items: dict[tuple[str, str], Item] = {}

    def holds(self, delivery: Delivery) -> bool:
        """Whether this worker is at work on it: it was claimed from ourselves."""
        with self._lock:
            return delivery.tag in self._deliveries

    def open(self, opened: OpenDelivery) -> None:
        with self._lock:
            self._deliveries[opened.delivery.tag] = opened

    def add(self, item: Item) -> bool:
        """False: the same request is at work already, and its answer will do for both."""
        with self._lock:
            return self._items.setdefault(item.key, item) is item

    def answered(self, items: Iterable[Item]) -> list[Delivery]:
        """Those deliveries of which nothing is left now."""
        done: list[Delivery] = []
        with self._lock:
            for item in items:
                if self._items.get(item.key) is item:
                    del self._items[item.key]
                done += _one_less(item.opened)
        return done

    def needs_no_answer(self, opened: OpenDelivery) -> list[Delivery]:
        """One of its requests is done with: its delivery, where it was the last."""
        with self._lock:
            return _one_less(opened)

    def settled(self, deliveries: Iterable[Delivery]) -> None:
        with self._lock:
            for delivery in deliveries:
                self._deliveries.pop(delivery.tag, None)

    def forget(self, delivery: Delivery) -> None:
        """It is set aside, with all that it held."""
        with self._lock:
            self._deliveries.pop(delivery.tag, None)
            for key, item in list(self._items.items()):
                if item.opened.delivery is delivery:
                    del self._items[key]

    def before(self, since: float) -> list[Delivery]:
        """Those that were taken before then."""
        with self._lock:
            return [one.delivery for one in self._deliveries.values() if one.since < since]

    def give_up(self) -> list[Delivery]:
        """All that are left; they are nobody's then."""
        with self._lock:
            left = [one.delivery for one in self._deliveries.values()]
            self._deliveries.clear()
        return left


def _one_less(opened: OpenDelivery) -> list[Delivery]:
    opened.num_left -= 1
    return [opened.delivery] if opened.num_left == 0 else []
