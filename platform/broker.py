"""The broker as the platform uses it: kombu's Redis transport, with the queue as the identity.

A message says in its own properties which queue it came by, and whoever wrote it chose that text.
The broker's ACL lets a tenant write to one queue only, so the queue that a message was really
popped from is the proof of who sent it: `Transport` puts that name in place of the claim, before
the message is kept for redelivery or decoded.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu import Exchange, Queue
from kombu.transport import redis

INGRESS_PREFIX = "ingress."
MAX_MESSAGE_BYTES = 128 * 1024

_ANONYMOUS = Exchange("", type="direct")
_log = logging.getLogger(__name__)


def queue(name: str) -> Queue:
    """A queue on the anonymous exchange: published by name, so no routing table can get lost."""
    return Queue(name, exchange=_ANONYMOUS, routing_key=name)


def ingress_queue(tenant: str) -> str:
    return f"{INGRESS_PREFIX}{tenant}"


def tenant_of(queue_name: str) -> str:
    """The tenant that alone can write to an ingress queue."""
    return queue_name.removeprefix(INGRESS_PREFIX)


class Transport(redis.Transport):  # type: ignore[misc]
    """Stamps each message with its true queue; leaves oversize and compressed ones out."""

    def _deliver(self, message: dict[str, Any], queue: str) -> None:
        properties = message.setdefault("properties", {})
        headers = message.setdefault("headers", {})
        claim = properties.get("delivery_info") or {}
        size = len(message.get("body") or "")
        if queue.startswith(INGRESS_PREFIX) and (
            size > MAX_MESSAGE_BYTES or headers.get("compression")
        ):
            _log.error("action=message_dropped queue=%s size_bytes=%d", queue, size)
            return
        properties["delivery_info"] = {
            "exchange": "",
            "routing_key": queue,
            "priority": int(claim.get("priority") or 0),
        }
        super()._deliver(message, queue)
