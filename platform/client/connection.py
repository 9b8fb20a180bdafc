"""A tenant's connections: the queue it may write, the keys it may read, its storage prefix."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit, urlunsplit

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from vla_platform.broker import ingress_queue, queue
from vla_platform.errors import AccessError, PlatformError, SpecError, UnavailableError
from vla_storage.errors import CodedError
from vla_storage.objects import S3ObjectStore


class Connection:
    """From `vla://TENANT:PASSWORD@HOST:PORT/0?bucket=..&access_key=..&secret_key=..&endpoint=..`,
    which `vla tenants add` prints."""

    def __init__(self, url: str) -> None:
        parts = _parts(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.scheme not in ("vla", "vlas") or not parts.username or "bucket" not in query:
            raise SpecError(
                "a platform URL looks like vla://TENANT:PASSWORD@HOST:PORT/0?bucket=...; "
                "`vla tenants add NAME` prints yours",
                problems=[],
            )
        self.tenant = parts.username
        scheme = "rediss" if parts.scheme == "vlas" else "redis"
        broker = urlunsplit((scheme, parts.netloc, parts.path, "", ""))
        self.redis: Any = redis.Redis.from_url(
            broker, decode_responses=True, socket_timeout=70, socket_connect_timeout=10
        )
        self.objects = S3ObjectStore(
            query["bucket"],
            endpoint=query.get("endpoint"),
            access_key=query.get("access_key"),
            secret_key=query.get("secret_key"),
        )
        payload = query.get("payload")
        user = parts.netloc.rpartition("@")[0]
        self.payload_url = None if payload is None else f"{scheme}://{user}@{payload}"
        self._app = Celery("vla-client", broker=broker, set_as_current=False)
        self._app.conf.update(task_serializer="json", accept_content=["json"])
        self._queue = queue(ingress_queue(self.tenant))

    def key(self, name: str) -> str:
        return f"vla:t:{self.tenant}:{name}"

    def call(self, task: str, *, timeout_s: float, shown: str, **arguments: Any) -> Any:
        """Send one ingress task and wait for its reply.

        Sent again once when half the time is over: requests are idempotent.
        """
        request_id = uuid.uuid4().hex
        end = time.monotonic() + timeout_s
        with answers():
            for _ in range(2):
                self._app.send_task(
                    task,
                    kwargs={"request_id": request_id, **arguments},
                    queue=self._queue,
                    ignore_result=True,
                    kwargsrepr=f"({shown})",
                    retry=True,
                )
                left = max(end - time.monotonic(), 1.0)
                wait = min(left, max(timeout_s / 2, 1.0), 60.0)
                reply = self.redis.blpop([self.key(f"reply:{request_id}")], timeout=wait)
                if reply is not None:
                    return _answer(json.loads(reply[1]))
        raise UnavailableError(
            f"the platform took no notice of {task} for {timeout_s:g} s; "
            "is its control worker running? Retrying is safe"
        )

    def close(self) -> None:
        self._app.close()
        self.redis.close()
        self.objects.close()


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """Everything that the broker may do wrong, as the platform's own errors."""
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise AccessError(
            f"the platform refuses this URL: {error}; ask the operator for a new one "
            "(`vla tenants add`)"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError, OperationalError, OSError) as error:
        if "invalid username-password" in str(error) or "permissions" in str(error):
            raise AccessError(f"the platform refuses this URL: {error}") from error
        raise UnavailableError(f"the platform does not answer: {error}") from error


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises for a port that is none)
    except ValueError as error:
        raise SpecError(f"not a URL: {error}", problems=[]) from error
    return parts


def _answer(reply: dict[str, Any]) -> Any:
    if "error" in reply:
        raise to_error(reply["error"])
    return reply["result"]


def to_error(wire: dict[str, Any]) -> CodedError:
    """The typed error again, from its wire form."""
    pending: list[type[CodedError]] = [CodedError]
    while pending:
        kind = pending.pop()
        if kind.code == wire.get("code"):
            return kind(str(wire.get("message")), **wire.get("details", {}))
        pending.extend(kind.__subclasses__())
    details = {"wire_code": wire.get("code"), **wire.get("details", {})}
    return PlatformError(str(wire.get("message")), **details)
