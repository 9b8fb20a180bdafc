"""A tenant's connections: the queue it may write, the keys it may read, its storage prefix."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit, urlunsplit

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from vla_platform.broker import MAX_ARGUMENT_BYTES, ingress_queue, queue
from vla_platform.errors import AccessError, SpecError, UnavailableError, to_error
from vla_storage.objects import S3ObjectStore
from vla_storage.payloads import PayloadStore, RedisPayloadStore

WAIT_S = 10.0
"""For a reply, by one read: a connection that is silent for twice as long is given up."""
RETRY_S = 0.5


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
            broker, decode_responses=True, socket_timeout=2 * WAIT_S, socket_connect_timeout=10
        )
        self.objects = S3ObjectStore(
            query["bucket"],
            endpoint=query.get("endpoint"),
            access_key=query.get("access_key"),
            secret_key=query.get("secret_key"),
        )
        self._payload_urls = [
            as_user(address, self.tenant, parts.password or "")
            for address in query.get("payload", "").split(",")
            if address
        ]
        self._app = Celery("vla-client", broker=broker, set_as_current=False)
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            broker_transport_options={"socket_timeout": 2 * WAIT_S},
        )
        self._queue = queue(ingress_queue(self.tenant))

    @property
    def payload_url(self) -> str | None:
        """Where inference requests go, with the tenant's own user."""
        return self._payload_urls[0] if self._payload_urls else None

    @functools.cached_property
    def payloads(self) -> PayloadStore:
        """The payload store, with the tenant's own user. Raises `AccessError`."""
        if not self._payload_urls:
            raise AccessError(
                "this URL names no payload store; ask the operator for a new one "
                "(`vla tenants add`)"
            )
        return RedisPayloadStore(self._payload_urls)

    def key(self, name: str) -> str:
        return f"vla:t:{self.tenant}:{name}"

    def call(self, task: str, *, timeout_s: float, shown: str, **arguments: Any) -> Any:
        """Send one ingress task and wait for its reply.

        Raises `SpecError` for more than `MAX_ARGUMENT_BYTES`, which the platform would not take.
        Sent again when half the time is over, or when the connection was lost with the request
        under way: a request that comes twice has one effect, known by its id.
        """
        size = sum(len(str(value).encode()) for value in arguments.values())
        if size > MAX_ARGUMENT_BYTES:
            raise SpecError(
                f"{task} would carry {size} bytes; at most {MAX_ARGUMENT_BYTES} are taken",
                problems=[],
            )
        request_id = uuid.uuid4().hex
        end = time.monotonic() + timeout_s
        send_at, num_sent = 0.0, 0
        problem: UnavailableError | None = None
        num_lost = 0
        while (now := time.monotonic()) < end:
            try:
                with answers():
                    if now >= send_at:
                        self._send(task, shown, {"request_id": request_id, **arguments})
                        send_at, num_sent = now + max(timeout_s / 2, 1.0), num_sent + 1
                    left_s = max(min(send_at, end) - time.monotonic(), 0.1)
                    reply = self.redis.blpop(
                        [self.key(f"reply:{request_id}")], timeout=min(left_s, WAIT_S)
                    )
            except UnavailableError as error:
                num_lost += 1
                if not num_sent and num_lost > 1:
                    raise  # there is nobody
                problem, send_at = error, 0.0
                time.sleep(RETRY_S)
                continue
            if reply is not None:
                return _answer(json.loads(reply[1]))
        raise UnavailableError(
            f"the platform took no notice of {task} for {timeout_s:g} s; "
            "is its control worker running? Retrying is safe"
        ) from problem

    def _send(self, task: str, shown: str, arguments: dict[str, Any]) -> None:
        self._app.send_task(
            task,
            kwargs=arguments,
            queue=self._queue,
            ignore_result=True,
            kwargsrepr=f"({shown})",
            retry=True,
        )

    def close(self) -> None:
        self._app.close()
        self.redis.close()
        self.objects.close()
        if "payloads" in self.__dict__:
            self.payloads.close()


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


def as_user(address: str, user: str, password: str) -> str:
    """A Redis URL with a user in it; `password` as it stands in a URL."""
    parts = urlsplit(address)
    host = f"{user}:{quote(unquote(password), safe='')}@{parts.hostname}:{parts.port or 6379}"
    return urlunsplit(parts._replace(netloc=host))


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
