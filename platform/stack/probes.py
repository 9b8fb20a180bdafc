"""Whether a role of the stack works, asked from outside."""

from __future__ import annotations

import http.client
import socket

from vla_platform.stack.info import StackInfo
from vla_platform.stack.ports import LOOPBACK
from vla_platform.stack.roles import Ready, Role
from vla_platform.stack.servers import REDIS_PORTS, redis_ready, s3_ready


def is_ready(info: StackInfo, name: str, role: Role | None) -> bool:
    """`role` is None for the servers."""
    if name == "s3":
        return s3_ready(info.s3)
    if name in REDIS_PORTS:
        return redis_ready(info.redis_url if name == "redis-control" else info.payload_url)
    if role is None or role.ready is Ready.FILE:
        return (info.var / "ready" / name).exists()
    port = info.ports[name]
    return _answers_http(port) if role.ready is Ready.HTTP else _accepts(port)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _answers_http(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2.0)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
