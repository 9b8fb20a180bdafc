"""The broker as the platform uses it: kombu's Redis transport, with the queue as the identity.

The broker's ACL lets a tenant write to one queue only, so the queue that a message was really
popped from is the proof of who sent it. Nothing else of what a tenant wrote is believed: Celery
would follow a message's own callbacks, routing, times and encodings, so each ingress message is
replaced by a fresh one that carries an allowed task's name, its text arguments, and no more
(`fresh_message`). What does not fit is logged and left out.
"""

from __future__ import annotations

import base64
import json
import logging
import uuid
from typing import Any

from kombu import Exchange, Queue
from kombu.transport import redis

from vla_platform.failpoints import Failpoint, reach

VISIBILITY_S = 60
"""A message that is not acknowledged for so long is given to another worker. So nothing that is
sent with a delay may wait for as long in a worker's memory: it would be done twice."""
DELIVERY: dict[str, Any] = {
    "visibility_timeout": VISIBILITY_S,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 10,  # who died while it restored holds up the others no longer
    # A connection that falls silent without an error is noticed within 30 seconds, also where
    # several of a worker do. What waits for a message is not under the first of these.
    "socket_timeout": 8,
    "health_check_interval": 8,
    "socket_keepalive": True,
    "queue_order_strategy": "priority",
}
"""How the transport treats messages and connections."""

INGRESS_PREFIX = "ingress."
INGRESS_TASKS = {
    "ingress.submit": {"request_id", "spec", "key"},
    "ingress.cancel": {"request_id", "run"},
    "ingress.pause": {"request_id", "run"},
    "ingress.resume": {"request_id", "run"},
    "ingress.explain": {"request_id", "run"},
    "ingress.timeline": {"request_id", "run", "job_id"},
    "ingress.reserve_batch": {"request_id", "run"},
    "ingress.release_batch": {"request_id", "run", "job_id", "fence"},
    "ingress.batch_state": {"request_id", "run", "job_id"},
    "ingress.submit_batch": {"request_id", "run", "job_id", "fence", "samples"},
    "ingress.open_environment": {"request_id", "environment"},
    "ingress.change_checkpoints": {"request_id", "change"},
    "ingress.evaluate": {"request_id", "evaluation"},
    "ingress.schedule": {"request_id", "schedule"},
    "ingress.change_schedule": {"request_id", "name", "change"},
}
"""What a tenant may ask for, with exactly these arguments, all of them text."""
MAX_ARGUMENT_BYTES = 80 * 1024
"""Of all arguments of a request: a spec of 64 KB, and what stands around it."""
MAX_MESSAGE_BYTES = 128 * 1024
MAX_SHOWN = 200

_ANONYMOUS = Exchange("", type="direct")
_log = logging.getLogger(__name__)


def queue(name: str) -> Queue:
    """A queue on the anonymous exchange: published by name, so no routing table can get lost."""
    return Queue(name, exchange=_ANONYMOUS, routing_key=name)


def ingress_queue(tenant: str) -> str:
    return f"{INGRESS_PREFIX}{tenant}"


def rollout_queue(harness: str) -> str:
    """Served by whichever host of the harness is free."""
    return f"rollout.{harness}"


def evaluation_queue(harness: str) -> str:
    return f"evaluation.{harness}"


def environment_queues(harness: str) -> tuple[str, ...]:
    """What an environment host consumes; nothing where `harness` is empty."""
    if not harness:
        return ()
    return rollout_queue(harness), evaluation_queue(harness)


def tenant_of(queue_name: str) -> str:
    """The tenant that alone can write to an ingress queue."""
    return queue_name.removeprefix(INGRESS_PREFIX)


def fresh_message(message: Any, queue_name: str) -> dict[str, Any]:
    """The message that Celery gets in place of a tenant's.

    Raises `ValueError`, `TypeError`, `KeyError` or `RecursionError` for one that does not fit.
    """
    body = message["body"]
    if not isinstance(body, str) or len(body) > MAX_MESSAGE_BYTES:
        raise ValueError("the body is no text, or too long")
    if message["properties"]["body_encoding"] != "base64":
        raise ValueError("the body is not base64")
    arguments, given, _ = json.loads(base64.b64decode(body, validate=True))
    task = message["headers"]["task"]
    if not isinstance(task, str) or task not in INGRESS_TASKS:
        raise ValueError("tenants cannot send this task")
    if arguments != [] or not isinstance(given, dict) or set(given) != INGRESS_TASKS[task]:
        raise ValueError(f"{task} takes {sorted(INGRESS_TASKS[task])}")
    if not all(isinstance(value, str) for value in given.values()):
        raise TypeError("arguments are text")
    shown = message["headers"].get("kwargsrepr")
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    task_id = str(uuid.uuid4())
    return {
        "body": base64.b64encode(json.dumps([[], given, embed]).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": task,
            "id": task_id,
            "root_id": task_id,
            "parent_id": None,
            "group": None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "timelimit": [None, None],
            "argsrepr": "()",
            "kwargsrepr": shown[:MAX_SHOWN] if isinstance(shown, str) else "",
            "origin": tenant_of(queue_name),
            "ignore_result": True,
        },
        "properties": {
            "correlation_id": task_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_tag": str(uuid.uuid4()),
            "body_encoding": "base64",
            "priority": 0,
            "delivery_info": {"exchange": "", "routing_key": queue_name},
        },
    }


class Channel(redis.Channel):  # type: ignore[misc]
    """A text that is no JSON is left out instead of ending the worker."""

    def _brpop_read(self, **options: Any) -> Any:
        self.connection.decoded = False
        try:
            return super()._brpop_read(**options)
        except (ValueError, RecursionError) as error:
            if self.connection.decoded:
                raise  # not the text's fault
            _log.error("action=message_dropped reason=%s", error)
            return True


class Transport(redis.Transport):  # type: ignore[misc]
    """Gives Celery a fresh message for each one that came by an ingress queue."""

    Channel = Channel
    decoded = False

    def _deliver(self, message: Any, queue: str) -> None:
        self.decoded = True
        reach(Failpoint.AFTER_POP)
        if queue.startswith(INGRESS_PREFIX):
            try:
                message = fresh_message(message, queue)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                _log.error("action=message_dropped queue=%s reason=%.200r", queue, error)
                return
        super()._deliver(message, queue)
