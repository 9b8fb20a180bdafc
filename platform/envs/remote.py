"""The host's end of tenants' remote sessions. One thread reads, the host's loop works."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import redis

from vla_platform.envs import wire
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.remote_protocol import (
    MAX_CALL_BYTES,
    REPLY_TTL_S,
    from_session,
    open_requests,
    to_host,
)
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import DataError, PlatformError, QuotaError
from vla_platform.vital import vital_thread
from vla_storage.errors import CodedError

MAX_WAITING = 256
"""Calls of one tenant that may wait in a host."""
_BLOCK_S = 1.0
_log = logging.getLogger(__name__)


class RemoteSessions:
    """Serves the sessions that the control worker assigned to this host.

    Sessions keep the name that the tenant knows; the host's own id stays inside.
    """

    def __init__(self, client: redis.Redis, host: EnvironmentHost, host_id: str) -> None:
        self._redis: Any = client
        self._host = host
        self._host_id = host_id
        self._names: dict[tuple[str, str], str] = {}  # (tenant, name) to the host's id
        # Whoever calls a session that has just ended is told so.
        self._read_until: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._stop = threading.Event()
        self._thread = vital_thread(self._read, name="remote-sessions")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5 * _BLOCK_S)

    def _read(self) -> None:
        opening = open_requests(self._host_id)
        while not self._stop.is_set():
            now = time.monotonic()
            self._read_until |= {tenant: now + REPLY_TTL_S for tenant, _ in list(self._names)}
            self._read_until = {one: at for one, at in self._read_until.items() if now < at}
            keys = {to_host(tenant, self._host_id): tenant for tenant in sorted(self._read_until)}
            try:
                found = self._redis.blmpop(
                    _BLOCK_S, 1 + len(keys), opening, *keys, direction="LEFT", count=64
                )
            except redis.RedisError as error:
                _log.warning("action=remote_read_failed reason=%s", error)
                self._stop.wait(_BLOCK_S)
                continue
            if found is None:
                continue
            key, messages = found
            name = key.decode() if isinstance(key, bytes) else key
            for raw in messages:
                try:
                    if name == opening:
                        self._open(raw)
                    else:
                        self._take(keys[name], raw)
                except Exception:  # whatever is in it, it is one message of one tenant's
                    _log.exception("action=message_dropped key=%s", name)

    def _open(self, raw: bytes) -> None:
        message = wire.decode(raw)
        tenant, session = str(message["tenant"]), str(message["session"])
        request: EnvironmentRequest = message["request"]
        if (tenant, session) in self._names:
            return  # its request came again
        # Known at once: the tenant's next call may come before the environment is made.
        work = self._host.call(self._host.open(tenant, request, remote=True))
        self._names[tenant, session] = ""

        def opened(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._names[tenant, session], info = done.result()
                self._reply(tenant, session, 0, info, None)
            else:
                self._names.pop((tenant, session), None)
                self._reply(tenant, session, 0, None, error)

        work.add_done_callback(opened)

    def _take(self, tenant: str, raw: bytes) -> None:
        try:
            if len(raw) > MAX_CALL_BYTES:
                raise DataError(f"a call of {len(raw)} bytes; at most {MAX_CALL_BYTES} are taken")
            message = wire.decode(raw)
            session, number, op = message["session"], message["call"], message["op"]
            arguments = message["arguments"]
            if not (isinstance(session, str) and type(number) is int and isinstance(op, str)
                    and isinstance(arguments, dict)):  # fmt: skip
                raise DataError("a call has session, call, op and arguments")
        except (DataError, KeyError) as error:
            _log.warning("action=call_dropped tenant=%s reason=%s", tenant, error)
            return
        try:
            if self._waiting[tenant] >= MAX_WAITING:
                raise QuotaError(f"{MAX_WAITING} calls wait already", tenant=tenant)
            work = self._host.call(self._work(tenant, session, op, arguments))
        except CodedError as error:
            self._reply(tenant, session, number, None, error)
            return
        with self._counting:
            self._waiting[tenant] += 1
        work.add_done_callback(functools.partial(self._done, tenant, session, number))

    def _done(self, tenant: str, session: str, number: int, work: Future[Any]) -> None:
        with self._counting:
            self._waiting[tenant] -= 1
        error = work.exception()
        self._reply(tenant, session, number, None if error else work.result(), error)

    async def _work(self, tenant: str, session: str, op: str, arguments: dict[str, Any]) -> Any:
        inner = self._names.get((tenant, session)) or session[:40]
        host = self._host
        try:
            if op == "reset":
                return await host.reset(tenant, inner, arguments["seed"], arguments.get("options"))
            if op == "step":
                return await host.step(
                    tenant, inner, arguments["actions"],
                    every_frame=bool(arguments.get("every_frame", False)),
                )  # fmt: skip
            if op == "snapshot":
                return await host.snapshot(tenant, inner)
            if op == "restore":
                return await host.restore(tenant, inner, arguments["snapshot"])
            if op == "keep":
                return host.keep(tenant, inner)
            if op == "close":
                self._names.pop((tenant, session), None)
                return await host.close(tenant, inner)
        except KeyError as error:
            raise DataError(f"{op} needs {error}") from error
        raise DataError(f"unknown call {op[:40]!r}")

    def _reply(
        self, tenant: str, session: str, number: int, result: Any, error: BaseException | None
    ) -> None:
        if error is not None and not isinstance(error, CodedError):
            _log.error("action=call_failed tenant=%s", tenant, exc_info=error)
            error = PlatformError("the host failed; see its log")
        reply = {"call": number, "result": result} if error is None else {
            "call": number, "error": error}  # fmt: skip
        try:
            key = from_session(tenant, session)
            with contextlib.suppress(redis.RedisError), self._redis.pipeline() as pipe:
                pipe.rpush(key, wire.encode(reply))
                pipe.pexpire(key, round(1000 * REPLY_TTL_S))
                pipe.execute()
        except CodedError as refused:
            _log.warning("action=reply_dropped tenant=%s reason=%s", tenant, refused)
